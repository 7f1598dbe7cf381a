// How fast selections are at every SIMD level: ms of the thread's own time, and the bytes that must move (12 of every
// element, 8 of every selected one) per second as a fraction of those that memcpy moves.
//
//   build/core/benchmark_select [elements, default 16 Mi] [share, default 0.01] [rounds, default 11]
//
// All take turns, each beginning with the same residual.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.hpp"
#include "kernels/buckets.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/normal.hpp"
#include "kernels/random_subset.hpp"
#include "kernels/ranked.hpp"
#include "kernels/select.hpp"

#ifdef TELEGRAD_KERNELS_X86
#include <immintrin.h>
#endif

namespace {

using namespace telegrad;
using kernels::EntriesOut;
using kernels::Side;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Contender {
  std::string name;
  std::function<std::size_t()> call;  // returns how many entries it selects
  std::vector<double> seconds{};
  std::size_t selected = 0;
};

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

#ifdef TELEGRAD_KERNELS_X86
// memcpy may read the lines that it overwrites; this does not.
TELEGRAD_AVX512 void stream_avx512(const float* from, float* to, std::size_t size) {
  for (std::size_t i = 0; i + 16 <= size; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
  _mm_sfence();
}
#endif

// On huge pages, as long arrays of numpy are.
std::span<float> floats(std::vector<Array<float>>& owners, std::size_t size) {
  return owners.emplace_back(size).span();
}

}  // namespace

int main(int count, char** arguments) {
  const std::size_t n = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : std::size_t{1} << 24;
  const double share = count > 2 ? std::strtod(arguments[2], nullptr) : 0.01;
  const int rounds = count > 3 ? std::atoi(arguments[3]) : 11;
  const std::size_t k = std::max<std::size_t>(1, static_cast<std::size_t>(share * static_cast<double>(n)));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<Array<float>> owners;
  const std::span<float> before = floats(owners, n), gradient = floats(owners, n), residual = floats(owners, n),
                         copied = floats(owners, n), values = floats(owners, 2 * k + 64);
  for (float& value : before) value = normal(random);
  for (float& value : gradient) value = normal(random);
  std::vector<std::uint32_t> indices(2 * k + 64);
  const EntriesOut<float> out{indices, values};
  const EntriesOut<float> just_k{out.indices.first(k), out.values.first(k)};
  std::copy(before.begin(), before.end(), residual.begin());
  const float threshold = kernels::accumulate_topk(residual, gradient, k, Side::both, 0, out).threshold;
  const std::int32_t bound = kernels::key_of_threshold(threshold, Side::both);
  const std::size_t per_bucket = std::max<std::size_t>(1, k * 512 / n), rest = n % 512;
  const std::vector<std::pair<std::string, std::function<std::size_t()>>> kernels_by_name = {
      {"threshold", [&] { return kernels::accumulate_select(residual, gradient, bound, Side::both, 0, out); }},
      {"moments", [&] { return kernels::accumulate_moments(residual, gradient, Side::both).count * 0; }},
      {"normal", [&] { return kernels::accumulate_normal(residual, gradient).mean > 1e9 ? 1U : 0U; }},
      {"topk", [&] { return kernels::accumulate_topk(residual, gradient, k, Side::both, 0, out).count; }},
      {"topk, one sign", [&] { return kernels::accumulate_topk(residual, gradient, k, Side::positive, 0, out).count; }},
      {"trimmed", [&] { return kernels::accumulate_trimmed(residual, gradient, k, 0.2, Side::both, 0, out).count; }},
      {"search", [&] { return kernels::accumulate_search(residual, gradient, k, 1e-3, Side::both, 0, out).count; }},
      {"buckets",
       [&] {
         const std::size_t of_last = std::min(per_bucket, rest);
         std::vector<std::uint32_t> own(n / 512 * per_bucket + of_last);
         std::vector<float> own_values(own.size());
         return kernels::accumulate_buckets(residual, gradient, 512, per_bucket, of_last, 0, {own, own_values}).count;
       }},
      {"random", [&] { return kernels::accumulate_random(residual, gradient, {1, 0, 0, 0}, 0, just_k).count; }},
  };
  const auto copy = [&] {
    std::memcpy(copied.data(), gradient.data(), n * sizeof(float));
    return std::size_t{0};
  };
#ifdef TELEGRAD_KERNELS_X86
  const auto streaming_copy = [&] {
    stream_avx512(gradient.data(), copied.data(), n);
    return std::size_t{0};
  };
#endif
  for (const auto level : kernels::kSimdLevels) {
    if (level > kernels::best_simd_level()) continue;
    const kernels::ScopedSimdLevel forced(level);
    std::vector<Contender> contenders{{"copy", copy}};
#ifdef TELEGRAD_KERNELS_X86
    if (level >= kernels::SimdLevel::avx512) contenders.push_back({"streaming copy", streaming_copy});
#endif
    for (const auto& [name, call] : kernels_by_name) contenders.push_back({name, call});
    for (int round = 0; round < rounds; ++round) {
      for (Contender& contender : contenders) {
        std::memcpy(residual.data(), before.data(), n * sizeof(float));
        const double begin = thread_seconds();
        contender.selected = contender.call();
        contender.seconds.push_back(thread_seconds() - begin);
      }
    }
    const double copy_s = median(contenders.front().seconds);
    std::printf("level %d, %zu elements, k = %zu\n", static_cast<int>(level), n, k);
    for (const Contender& contender : contenders) {
      const double bytes = 12.0 * static_cast<double>(n) + 8.0 * static_cast<double>(contender.selected);
      const double bound_s = bytes / (8.0 * static_cast<double>(n)) * copy_s;
      std::printf("  %-16s %8.3f ms (least %8.3f)  %4.0f %%\n", contender.name.c_str(), 1e3 * median(contender.seconds),
                  1e3 * *std::min_element(contender.seconds.begin(), contender.seconds.end()),
                  100.0 * bound_s / median(contender.seconds));
    }
  }
  return 0;
}
