// How fast the kernels of sparse vectors are, beside a copy: ns per item, and the bytes that a kernel must move per
// second as a fraction of those that memcpy moves.
//
//   build/core/benchmark_sparse_kernels [elements, default 16 Mi] [rounds, default 15]
//
// Kernels and copies (of 64 MiB, from memory to memory) take turns, and medians of the thread's own time are printed,
// so that a busy machine slows both alike. Bytes are what memory must move: of arrays that are passed through, each byte
// once; of a dense vector in which entries are scattered, whole cache lines, read and written back. A copy moves each
// byte twice.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/dispatch.hpp"
#include "kernels/entries.hpp"
#include "kernels/marks.hpp"
#include "kernels/merge.hpp"
#include "kernels/operations.hpp"
#include "kernels/reduce_marked.hpp"
#include "kernels/scatter.hpp"

namespace {

using namespace telegrad;
using kernels::Entries;
using kernels::EntriesOut;

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kCopyBytes = std::size_t{64} << 20;

struct Settings {
  std::uint32_t elements = 1U << 24;
  int rounds = 15;
};

template <class V>
struct Run {
  std::vector<std::uint32_t> indices;
  std::vector<V> values;

  Entries<V> entries() const { return {indices, values}; }
  std::size_t size() const { return indices.size(); }
};

// Each index below `elements` with probability `density`.
template <class V>
Run<V> uniform(std::mt19937_64& random, std::uint32_t elements, double density) {
  Run<V> run;
  std::geometric_distribution<std::uint64_t> gap(std::min(density, 0.999999));
  for (std::uint64_t i = gap(random); i < elements; i += 1 + gap(random)) {
    run.indices.push_back(static_cast<std::uint32_t>(i));
    run.values.push_back(V(static_cast<float>(random() % 1000) - 500.0F));
  }
  return run;
}

template <class V>
std::size_t lines_of(const Run<V>& run) {
  std::size_t lines = 0;
  std::uint64_t last = ~std::uint64_t{0};
  for (const std::uint32_t index : run.indices) {
    const std::uint64_t line = std::uint64_t{index} * sizeof(V) / kLineBytes;
    lines += line != last ? 1 : 0;
    last = line;
  }
  return lines;
}

// Of this thread: what others run in the meantime does not count.
double now_s() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double seconds_of(const auto& body) {
  const double begin_s = now_s();
  body();
  return now_s() - begin_s;
}

double median(std::vector<double> times) {
  std::ranges::nth_element(times, times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
  return times[times.size() / 2];
}

class Bench {
 public:
  explicit Bench(Settings settings) : settings_(settings), from_(kCopyBytes, 1), to_(kCopyBytes, 2) {
    std::printf("%-34s %9s %10s %9s %9s %7s\n", "kernel", "density", "items", "ns/item", "GB/s", "of copy");
  }

  /// `bytes`: what memory must move.
  void row(const std::string& name, double density, std::size_t items, std::size_t bytes, const auto& kernel) {
    if (items == 0) return;
    std::vector<double> kernel_s, copy_s;
    for (int round = 0; round < settings_.rounds; ++round) {
      copy_s.push_back(seconds_of([&] { std::memcpy(to_.data(), from_.data(), from_.size()); }));
      kernel_s.push_back(seconds_of(kernel));
      if (to_[from_.size() / 2] != 1) std::abort();
    }
    const double seconds = median(kernel_s);
    const double copied = median(copy_s) * static_cast<double>(bytes) / (2.0 * static_cast<double>(from_.size()));
    std::printf("%-34s %8.3f%% %10zu %9.2f %9.2f %6.0f%%\n", name.c_str(), density * 100.0, items,
                seconds * 1e9 / static_cast<double>(items), static_cast<double>(bytes) / seconds * 1e-9,
                copied / seconds * 100.0);
    std::fflush(stdout);
  }

  const Settings& settings() const { return settings_; }

 private:
  Settings settings_;
  std::vector<char> from_, to_;  // far larger than the caches
};

template <class V>
const char* name_of() {
  if (std::is_same_v<V, float>) return "f32";
  if (std::is_same_v<V, double>) return "f64";
  return std::is_same_v<V, bf16> ? "bf16" : "f16";
}

template <class V>
void measure(Bench& bench, double density, Reduction reduction) {
  constexpr std::size_t kEntryBytes = sizeof(std::uint32_t) + sizeof(V);
  constexpr std::size_t kRanks = 8;
  const std::uint32_t n = bench.settings().elements;
  const std::string suffix = std::string(" ") + name_of<V>() + (reduction == Reduction::sum ? "" : " min");
  std::mt19937_64 random(1);
  std::vector<Run<V>> runs;
  for (std::size_t rank = 0; rank < kRanks; ++rank) runs.push_back(uniform<V>(random, n, density));
  std::vector<V> dense(n);

  const std::size_t both = runs[0].size() + runs[1].size();
  std::vector<std::uint32_t> indices(both);
  std::vector<V> values(both);
  std::size_t count = 0;
  const auto merge = [&] {
    count = kernels::merge(reduction, runs[0].entries(), runs[1].entries(), EntriesOut<V>{indices, values});
  };
  merge();
  bench.row("merge of 2" + suffix, density, both, (both + count) * kEntryBytes, merge);

  // A slice of one rank's share: what an owner of a split collective reduces.
  std::vector<Run<V>> shares;
  std::vector<Entries<V>> inputs;
  std::size_t total = 0;
  for (const Run<V>& run : runs) {
    const auto size = std::ranges::lower_bound(run.indices, n / kRanks) - run.indices.begin();
    shares.push_back({{run.indices.begin(), run.indices.begin() + size},
                      {run.values.begin(), run.values.begin() + size}});
    total += static_cast<std::size_t>(size);
  }
  for (const Run<V>& share : shares) inputs.push_back(share.entries());
  for (const std::size_t ranks : {2U, 4U, 8U}) {
    const std::span<const Entries<V>> some(inputs.data(), ranks);
    std::size_t items = 0;
    for (const Entries<V>& one : some) items += one.size();
    std::vector<std::uint32_t> slice_indices(total);
    std::vector<V> slice_values(total);
    const auto reduce = [&] {
      count = kernels::reduce_sorted<V>(reduction, some, EntriesOut<V>{slice_indices, slice_values});
    };
    reduce();
    bench.row("slice reduction of " + std::to_string(ranks) + suffix, density, items, (items + count) * kEntryBytes,
              reduce);
  }

  const std::size_t scattered = runs[0].size() * kEntryBytes + 2 * kLineBytes * lines_of(runs[0]);
  bench.row("scatter" + suffix, density, runs[0].size(), scattered,
            [&] { kernels::scatter_reduce<V>(reduction, dense, runs[0].entries()); });
  const std::size_t passed = runs[0].size() * kEntryBytes + n * sizeof(V);
  const V absent = kernels::absent_element<V>(reduction);
  bench.row("expand" + suffix, density, n, passed,
            [&] { kernels::expand<V>(dense, runs[0].entries(), absent); });
  bench.row("compact" + suffix, density, n, passed, [&] {
    count = kernels::compact<V>(dense, absent, 0, EntriesOut<V>{indices, values});
  });
}

// What an owner of a filled sum adds: marks and values of some ranks.
template <class V>
void measure_marked(Bench& bench, double density) {
  const std::uint32_t n = bench.settings().elements;
  std::mt19937_64 random(2);
  std::vector<std::vector<std::uint64_t>> marks;
  std::vector<std::vector<V>> values;
  std::vector<kernels::MarkedValues<V>> inputs;
  std::vector<V> sum(n);
  std::size_t bytes = n * sizeof(V);
  for (const std::size_t ranks : {2U, 4U, 8U}) {
    while (values.size() < ranks) {
      Run<V> run = uniform<V>(random, n, density);
      marks.emplace_back(kernels::mark_words(n));
      kernels::mark(run.indices, 0, n, marks.back());
      values.push_back(std::move(run.values));
      inputs.push_back({marks.back(), values.back()});
      bytes += marks.back().size() * sizeof(std::uint64_t) + values.back().size() * sizeof(V);
    }
    bench.row("sum of " + std::to_string(ranks) + " marked " + name_of<V>(), density, n, bytes,
              [&] { kernels::reduce_marked<V>(Reduction::sum, inputs, sum); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (argc > 1) settings.elements = static_cast<std::uint32_t>(std::strtoul(argv[1], nullptr, 10));
  if (argc > 2) settings.rounds = std::max(1, std::atoi(argv[2]));
  std::printf("SIMD level %d, %u elements\n", static_cast<int>(kernels::simd_level()), settings.elements);
  Bench bench(settings);
  for (const double density : {0.001, 0.00781, 0.05, 0.2}) measure<float>(bench, density, Reduction::sum);
  measure<double>(bench, 0.01, Reduction::sum);
  measure<bf16>(bench, 0.01, Reduction::sum);
  measure<f16>(bench, 0.01, Reduction::sum);
  measure<float>(bench, 0.01, Reduction::min);
  for (const double density : {0.5, 0.75, 0.95}) measure_marked<float>(bench, density);
  measure_marked<double>(bench, 0.75);
  measure_marked<bf16>(bench, 0.75);
  return 0;
}
