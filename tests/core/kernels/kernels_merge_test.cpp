#include "kernels/merge.hpp"

#include <algorithm>

#include "kernel_samples.hpp"
#include "kernels/merge_runs_avx512.hpp"
#include "kernels/operations.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using kernels::Entries;
using kernels::EntriesOut;
using samples::Guarded;
using samples::Run;

template <class V>
Run<V> random_run(std::mt19937& random, std::uint64_t begin, std::uint64_t end, double density) {
  Run<V> run{samples::random_indices(random, begin, end, density), {}};
  run.values = samples::awkward_values<V>(random, run.indices.size());
  return run;
}

struct Packed {
  std::size_t count;
  std::vector<std::uint32_t> indices;
  std::vector<std::uint64_t> values;

  friend bool operator==(const Packed&, const Packed&) = default;
};

// Runs a kernel that packs into poisoned outputs of `capacity` entries; nothing behind what it packs may be written, or, loosely,
// nothing behind the capacity.
template <class V, class Kernel>
Packed pack(std::size_t capacity, Kernel kernel, bool loosely = false) {
  Guarded<std::uint32_t> indices(capacity, 4);
  Guarded<V> values(capacity, 2 * sizeof(V));
  const std::size_t count = kernel(EntriesOut<V>{indices.span(), values.span()});
  const std::size_t written = std::min(count, capacity);
  const std::size_t touched = loosely ? capacity : written;
  EXPECT(indices.intact(touched) && values.intact(touched));
  auto kept_indices = indices.copy();
  auto kept_values = values.copy();
  kept_indices.resize(written);
  kept_values.resize(written);
  const auto bits = samples::bits(kept_values);
  return {count, kept_indices, {bits.begin(), bits.end()}};
}

template <class V>
void expect_merged(Reduction reduction, const Run<V>& a, const Run<V>& b) {
  const std::size_t capacity = a.indices.size() + b.indices.size();
  const auto pack_with = [&](auto kernel, const Run<V>& first, const Run<V>& second) {
    return pack<V>(capacity, [&](auto out) { return kernel(reduction, first.entries(), second.entries(), out); });
  };
  const auto expected = pack_with(kernels::reference::merge<V>, a, b);
  const auto merged = pack_with(kernels::merge<V>, a, b);
  const auto swapped = pack_with(kernels::merge<V>, b, a);
  EXPECT(merged == expected);
  EXPECT(swapped == expected);
}

TEST("merging has the bits of the reference, both ways round") {
  std::mt19937 random(10);
  const auto check = [&]<class V>(V) {
    for (const std::uint64_t range : {1, 2, 17, 64, 1000, 20'000}) {
      for (const double density : {0.0, 0.01, 0.3, 1.0}) {
        for (const Reduction reduction : samples::kReductions) {
          for (const double other : {0.0, 0.3, 1.0}) {
            expect_merged(reduction, random_run<V>(random, 5, 5 + range, density),
                          random_run<V>(random, 5, 5 + range, other));
          }
          expect_merged(reduction, random_run<V>(random, 0, range, density),
                        random_run<V>(random, range, 2 * range, density));
        }
      }
    }
  };
  samples::at_every_level([&] {
    check(float{});
    check(double{});
    check(bf16{});
    check(f16{});
    check(std::int32_t{});
    check(std::int64_t{});
  });
}

TEST("merging runs of which one is far longer, clustered, or the same has the bits of the reference") {
  std::mt19937 random(18);
  const auto check = [&]<class V>(V) {
    const auto clustered = [&](std::uint32_t begin, std::uint32_t width, std::uint32_t step) {
      Run<V> run;
      for (std::uint32_t cluster = 0; cluster < 40; ++cluster) {
        for (std::uint32_t i = 0; i < width; ++i) run.indices.push_back(begin + cluster * step + i);
      }
      run.values = samples::awkward_values<V>(random, run.indices.size());
      return run;
    };
    const Run<V> one = clustered(0xffffffffU - 39 * 1000 - 99, 100, 1000);  // up to the last index
    Run<V> same = one;
    same.values = samples::awkward_values<V>(random, one.indices.size());
    for (const Reduction reduction : samples::kReductions) {
      expect_merged(reduction, one, same);
      expect_merged(reduction, one, clustered(0xffffffffU - 39 * 1000 - 400, 100, 1000));
      expect_merged(reduction, one, clustered(0xffffffffU - 39 * 1000 - 60, 50, 1000));
      expect_merged(reduction, one, random_run<V>(random, 0xffffffffU - 30'000, 0xffffffffU, 0.001));
    }
  };
  samples::at_every_level([&] {
    check(float{});
    check(double{});
    check(bf16{});
    check(f16{});
    check(std::int32_t{});
    check(std::int64_t{});
  });
}

TEST("an index whose sum is zero stays, and a lone -0 keeps its sign") {
  const Run<float> a{{1, 3, 0xffffffffU}, {2.0F, -0.0F, 1.0F}};
  const Run<float> b{{1, 2}, {-2.0F, 5.0F}};
  const auto merged =
      pack<float>(5, [&](auto out) { return kernels::merge(Reduction::sum, a.entries(), b.entries(), out); });
  EXPECT_EQ(merged.indices, (std::vector<std::uint32_t>{1, 2, 3, 0xffffffffU}));
  const auto expected = samples::bits(std::vector<float>{0.0F, 5.0F, -0.0F, 1.0F});
  EXPECT_EQ(merged.values, (std::vector<std::uint64_t>{expected.begin(), expected.end()}));
}

// The same by reduce_sorted_of(), which says who gave each entry.
template <class V>
void expect_givers(Reduction reduction, const std::vector<Entries<V>>& entries, std::size_t capacity,
                   const Packed& expected) {
  std::vector<std::uint8_t> who(expected.count);
  for (std::size_t i = 0; i < expected.count; ++i) {
    for (std::size_t input = 0; input < entries.size(); ++input) {
      if (std::ranges::binary_search(entries[input].indices, expected.indices[i])) who[i] |= static_cast<std::uint8_t>(1U << input);
    }
  }
  Guarded<std::uint8_t> givers(capacity);
  EXPECT(pack<V>(capacity, [&](auto out) {
           return kernels::reduce_sorted_of<V>(reduction, entries, out, givers.span());
         }) == expected);
  EXPECT(givers.intact());
  auto found = givers.copy();
  found.resize(expected.count);
  EXPECT_EQ(found, who);
}

TEST("reducing many runs has the bits of merging them one after the other") {
  std::mt19937 random(11);
  const auto check = [&]<class V>(V, std::size_t inputs, std::uint64_t begin, std::uint64_t range, double density) {
    std::vector<Run<V>> runs;
    std::vector<Entries<V>> entries;
    std::size_t total = 0;
    for (std::size_t p = 0; p < inputs; ++p) {
      runs.push_back(random_run<V>(random, begin, begin + range, p % 3 == 2 ? 0.0 : density));
    }
    for (const auto& run : runs) {
      entries.push_back(run.entries());
      total += run.indices.size();
    }
    for (const Reduction reduction : samples::kReductions) {
      const auto expected =
          pack<V>(total, [&](auto out) { return kernels::reference::reduce_sorted<V>(reduction, entries, out); });
      for (const std::size_t capacity : {total, expected.count}) {
        EXPECT(pack<V>(capacity, [&](auto out) { return kernels::reduce_sorted<V>(reduction, entries, out); }) ==
               expected);
        if (inputs <= kernels::kGiversMost) expect_givers(reduction, entries, capacity, expected);
      }
    }
  };
  for (const std::size_t inputs : {0, 1, 2, 3, 4, 5, 8, 33}) {
    for (const std::uint64_t range : {1, 63, 1000, 70'000}) {
      for (const double density : {0.001, 0.1, 1.0}) {
        if (density * static_cast<double>(range * inputs) > 6e4) continue;
        samples::at_every_level([&] {
          check(float{}, inputs, 12'345, range, density);
          check(double{}, inputs, 40'000, range, density);
          check(bf16{}, inputs, 0xffffffffU - range, range, density);
          check(f16{}, inputs, 0, range, density);
          check(std::int32_t{}, inputs, 77, range, density);
          check(std::int64_t{}, inputs, 0xffffffffU - range, range, density);
        });
      }
    }
  }
}

// As random_run() makes them, and ones that nothing is random about: alike, one far longer than others, one behind another.
template <class V>
std::vector<Run<V>> long_runs(std::mt19937& random, std::size_t inputs, int pattern) {
  constexpr std::uint64_t kRange = 1'500'000;
  constexpr std::uint64_t kBegin = 0xffffffffU - kRange;
  std::vector<Run<V>> runs;
  for (std::size_t p = 0; p < inputs; ++p) {
    const double density = pattern == 2 && p != 1 ? 1e-5 : 0.01;
    const std::uint64_t begin = pattern == 3 ? kBegin + p * (kRange / inputs) : kBegin;
    const std::uint64_t end = pattern == 3 ? begin + kRange / inputs : kBegin + kRange;
    runs.push_back(random_run<V>(random, begin, end, density));
    if (pattern == 1) {
      runs[p].indices = runs[0].indices;
      runs[p].values = samples::awkward_values<V>(random, runs[0].indices.size());
    }
  }
  return runs;
}

TEST("reducing long runs, in several chunks, has the bits of the reference") {
  std::mt19937 random(13);
  const auto check = [&]<class V>(V) {
    for (const std::size_t inputs : {2, 3, 4, 7}) {
      for (int pattern = 0; pattern < 4; ++pattern) {
        const std::vector<Run<V>> runs = long_runs<V>(random, inputs, pattern);
        std::vector<Entries<V>> entries;
        std::size_t total = 0;
        for (const auto& run : runs) {
          entries.push_back(run.entries());
          total += run.indices.size();
        }
        for (const Reduction reduction : {Reduction::sum, Reduction::max_abs}) {
          const auto expected =
              pack<V>(total, [&](auto out) { return kernels::reference::reduce_sorted<V>(reduction, entries, out); });
          EXPECT(pack<V>(total, [&](auto out) { return kernels::reduce_sorted<V>(reduction, entries, out); }) ==
                 expected);
          if (reduction == Reduction::sum) expect_givers(reduction, entries, total, expected);
        }
      }
    }
  };
  samples::at_every_level([&] {
    check(float{});
    check(double{});
    check(bf16{});
    check(f16{});
    check(std::int32_t{});
    check(std::int64_t{});
  });
}

#ifdef TELEGRAD_KERNELS_X86
TEST("a place is found from wherever one begins to look for it") {
  std::mt19937 random(17);
  for (const std::size_t size : {0, 1, 2, 15, 16, 17, 33, 200}) {
    std::vector<std::uint32_t> indices;
    for (std::size_t i = 0; i < size; ++i) indices.push_back(static_cast<std::uint32_t>(3 * i + random() % 3 + 1));
    for (std::size_t guess = 0; guess <= size; ++guess) {
      for (std::uint32_t end = 0; end < 3 * size + 6; ++end) {
        const auto expected = static_cast<std::size_t>(std::ranges::lower_bound(indices, end) - indices.begin());
        EXPECT_EQ(kernels::find_near(indices, end, guess), expected);
      }
    }
  }
}

TEST("of more runs of one entry each than a chunk holds all are taken, and nothing behind them is read") {
  constexpr std::size_t kRuns = 7000;
  std::vector<std::uint32_t> indices;  // of each run, and a zero behind it, at which a cut would take nothing
  const std::vector<float> values(kRuns, 1.0F);
  for (std::uint32_t run = 0; run < kRuns; ++run) indices.insert(indices.end(), {1 + run % 900, 0});
  std::vector<Entries<float>> rest, chunk;
  for (std::size_t run = 0; run < kRuns; ++run) {
    rest.push_back({std::span(indices).subspan(2 * run, 1), std::span(values).subspan(run, 1)});
  }
  kernels::take_chunk(rest, chunk);
  EXPECT(std::ranges::all_of(chunk, [](const auto& entries) { return entries.size() == 1; }));
  EXPECT(std::ranges::all_of(rest, [](const auto& entries) { return entries.empty(); }));
}
#endif

TEST("runs whose indices leave no room for a run's number are merged too") {
  std::mt19937 random(14);
  const auto few = [&](std::uint32_t last) {
    Run<float> run = random_run<float>(random, 5, 3000, 0.1);
    run.indices.push_back(last);
    run.values.push_back(2.0F);
    return run;
  };
  for (const std::uint32_t last : {0x3fffffffU, 0x40000003U, 0x40000004U, 0x40000005U, 0x7fffffffU, 0xffffffffU}) {
    const std::vector<Run<float>> runs{few(last), few(last), few(last), few(last - 1)};
    std::vector<Entries<float>> entries;
    std::size_t total = 0;
    for (const auto& run : runs) {
      entries.push_back(run.entries());
      total += run.indices.size();
    }
    const auto expected =
        pack<float>(total, [&](auto out) { return kernels::reference::reduce_sorted<float>(Reduction::sum, entries, out); });
    EXPECT(pack<float>(total, [&](auto out) { return kernels::reduce_sorted<float>(Reduction::sum, entries, out); }) ==
           expected);
  }
}

TEST("compacting keeps what is not absent, up to the capacity") {
  std::mt19937 random(12);
  const auto check = [&]<class V>(V, std::size_t size, Reduction reduction, bool mostly_absent) {
    const V absent = kernels::absent_element<V>(reduction);
    auto dense = samples::awkward_values<V>(random, size);
    for (V& value : dense) {
      if (mostly_absent && random() % 50 != 0) value = absent;
    }
    Guarded<V> guarded(dense, sizeof(V));
    const std::span<const V> given = guarded.span();
    const auto reference = [&](auto out) { return kernels::reference::compact(given, absent, 100, out); };
    const std::size_t all = pack<V>(size, reference).count;
    for (const std::size_t capacity : {size, all, all / 2, std::size_t{0}}) {
      const auto expected = pack<V>(capacity, reference);
      EXPECT(pack<V>(capacity, [&](auto out) { return kernels::compact(given, absent, 100, out); }, true) == expected);
    }
  };
  samples::at_every_level([&] {
    for (const std::size_t size : samples::kSizes) {
      for (const bool mostly_absent : {false, true}) {
        for (const Reduction reduction : samples::kReductions) {
          check(float{}, size, reduction, mostly_absent);
          check(double{}, size, reduction, mostly_absent);
          check(bf16{}, size, reduction, mostly_absent);
          check(f16{}, size, reduction, mostly_absent);
          check(std::int32_t{}, size, reduction, mostly_absent);
          check(std::int64_t{}, size, reduction, mostly_absent);
        }
      }
    }
  });
}

}  // namespace
