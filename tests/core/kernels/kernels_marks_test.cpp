#include "kernels/marks.hpp"

#include "kernel_samples.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

constexpr std::uint64_t kBases[] = {0, 64, 1000, 0xffffffffU - 5000};
constexpr double kDensities[] = {0.0, 0.02, 0.3, 0.6, 0.97, 1.0};

std::vector<std::uint32_t> indices_in(std::uint64_t base, std::size_t range, double density, std::mt19937& random) {
  if (density < 1.0) return samples::random_indices(random, base, base + range, density);
  std::vector<std::uint32_t> all;
  for (std::size_t i = 0; i < range; ++i) all.push_back(static_cast<std::uint32_t>(base + i));
  return all;
}

TEST("marks are those of the reference, of any range, and counted") {
  std::mt19937 random(3);
  for (const std::size_t range : samples::kSizes) {
    for (const double density : kDensities) {
      for (const std::uint64_t base : kBases) {
        const auto indices = indices_in(base, range, density, random);
        std::vector<std::uint64_t> expected(kernels::mark_words(range));
        EXPECT(kernels::reference::mark(indices, base, range, expected));
        samples::at_every_level([&] {
          Guarded<std::uint64_t> marks(kernels::mark_words(range), 8);
          Guarded<std::uint32_t> read(indices, 4);
          EXPECT(kernels::mark(read.span(), base, range, marks.span()));
          EXPECT_EQ(marks.copy(), expected);
          EXPECT(marks.intact());
          EXPECT_EQ(kernels::count_marks(marks.span()), indices.size());
        });
      }
    }
  }
}

TEST("a slice of marks has those of its indices, wherever it begins and ends") {
  std::mt19937 random(6);
  constexpr std::size_t kRange = 1000;
  for (const double density : kDensities) {
    const auto indices = indices_in(0, kRange, density, random);
    std::vector<std::uint64_t> marks(kernels::mark_words(kRange));
    EXPECT(kernels::reference::mark(indices, 0, kRange, marks));
    Guarded<std::uint64_t> read(marks, 8);
    for (std::size_t begin = 0; begin <= kRange; begin += 1 + random() % 17) {
      for (std::size_t end = begin; end <= kRange; end += end + 200 < kRange ? random() % 90 : 1 + random() % 7) {
        std::vector<std::uint32_t> here;
        std::ranges::copy_if(indices, std::back_inserter(here), [&](auto i) { return i >= begin && i < end; });
        std::vector<std::uint64_t> expected(kernels::mark_words(end - begin));
        EXPECT(kernels::reference::mark(here, begin, end - begin, expected));
        Guarded<std::uint64_t> slice(kernels::mark_words(end - begin), 8);
        kernels::slice_marks(read.span(), begin, end - begin, slice.span());
        EXPECT_EQ(slice.copy(), expected);
        EXPECT(slice.intact());
      }
    }
  }
}

TEST("indices that are repeated, out of order or outside the range are refused wherever they are, and nothing else is written") {
  std::mt19937 random(4);
  for (const double density : {0.02, 0.6, 1.0}) {
    for (const std::size_t range : {std::size_t{128}, std::size_t{1000}, std::size_t{4096}}) {
      for (const std::uint64_t base : kBases) {
        const auto right = indices_in(base, range, density, random);
        if (right.size() < 2) continue;
        for (int trial = 0; trial < 200; ++trial) {
          auto indices = right;
          const std::size_t at = trial < 3 ? indices.size() - 1 : random() % indices.size();
          switch (trial % 6) {
            case 0: indices[at] = static_cast<std::uint32_t>(base + range); break;
            case 1: indices[at] = at == 0 ? indices[1] : indices[at - 1]; break;
            case 2: indices[at] = static_cast<std::uint32_t>(random()) | 0x80000000U; break;
            case 3: indices[at] = base > 0 ? static_cast<std::uint32_t>(base - 1) : 0xffffffffU; break;
            case 4: std::swap(indices[at], indices[at == 0 ? 1 : at - 1]); break;
            default: indices[at] = static_cast<std::uint32_t>(random()); break;
          }
          std::vector<std::uint64_t> expected(kernels::mark_words(range));
          const bool is_right = kernels::reference::mark(indices, base, range, expected);
          samples::at_every_level([&] {
            Guarded<std::uint64_t> marks(kernels::mark_words(range));
            EXPECT_EQ(kernels::mark(indices, base, range, marks.span()), is_right);
            EXPECT(marks.intact());
            if (is_right) EXPECT_EQ(marks.copy(), expected);
          });
        }
      }
    }
  }
}

template <class V>
void expect_expanded(std::size_t range, double density, std::mt19937& random) {
  const auto indices = indices_in(0, range, density, random);
  std::vector<std::uint64_t> marks(kernels::mark_words(range));
  EXPECT(kernels::reference::mark(indices, 0, range, marks));
  const auto values = samples::awkward_values<V>(random, indices.size());
  const V absent = V(-7.0F);
  std::vector<V> expected(range);
  kernels::reference::expand_marks<V>(expected, marks, values, absent);
  samples::at_every_level([&] {
    Guarded<V> dense(range, sizeof(V));
    Guarded<V> read(values, sizeof(V));
    kernels::expand_marks<V>(dense.span(), marks, read.span(), absent);
    EXPECT_EQ(samples::bits(dense.copy()), samples::bits(expected));
    EXPECT(dense.intact());
  });
}

TEST("what is marked becomes dense with the bits of the reference") {
  std::mt19937 random(5);
  for (const std::size_t range : samples::kSizes) {
    for (const double density : kDensities) {
      expect_expanded<float>(range, density, random);
      expect_expanded<double>(range, density, random);
      expect_expanded<bf16>(range, density, random);
      expect_expanded<f16>(range, density, random);
      expect_expanded<std::int32_t>(range, density, random);
      expect_expanded<std::int64_t>(range, density, random);
    }
  }
}

}  // namespace
