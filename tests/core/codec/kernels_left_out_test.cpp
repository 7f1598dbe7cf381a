#include "codec/left_out.hpp"

#include <algorithm>

#include "kernel_samples.hpp"
#include "codec/members.hpp"
#include "kernels/marks.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;

constexpr std::uint32_t kRange = 100'000;  // more than is marked in one go

// Of `all`, each with that probability.
std::vector<std::uint32_t> some_of(const std::vector<std::uint32_t>& all, double share, std::mt19937& random) {
  std::vector<std::uint32_t> some;
  for (const std::uint32_t index : all) {
    if (static_cast<double>(random()) < share * 0x1p32) some.push_back(index);
  }
  return some;
}

TEST("members are those of the reference, few or all, also where some lie behind the last one") {
  std::mt19937 random(11);
  for (const std::size_t range : samples::kSizes) {
    for (const double density : {0.02, 0.3, 1.0}) {
      const auto indices = samples::random_indices(random, 5, 5 + 10 * range, density);
      for (const double share : {0.0, 0.01, 0.12, 0.5, 0.9, 1.0}) {
        for (const bool behind : {false, true}) {
          auto members = some_of(indices, share, random);
          if (behind) {
            for (const std::uint32_t more : {1U, 2U, 9U}) members.push_back(static_cast<std::uint32_t>(5 + 10 * range + more));
          }
          std::vector<std::uint64_t> expected(kernels::mark_words(indices.size()));
          const std::span<const std::uint32_t> inside = members;
          const std::size_t count = kernels::reference::mark_members(indices, inside, expected);
          samples::at_every_level([&] {
            Guarded<std::uint32_t> read(indices, 4);
            std::vector<std::uint32_t> exactly(inside.begin(), inside.end());
            Guarded<std::uint32_t> among(exactly, 8);
            Guarded<std::uint64_t> marks(expected.size(), 8);
            EXPECT_EQ(kernels::mark_members(read.span(), among.span(), marks.span()), count);
            EXPECT_EQ(marks.copy(), expected);
            EXPECT(marks.intact());
          });
        }
      }
    }
  }
}

TEST("of indices that are in no order, marks say nothing, and nothing is written outside") {
  std::mt19937 random(12);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<std::uint32_t> indices(random() % 1000);
    std::vector<std::uint32_t> members(random() % 1000);
    for (auto& index : indices) index = static_cast<std::uint32_t>(random() % 400);
    for (auto& index : members) index = static_cast<std::uint32_t>(random() % 400);
    samples::at_every_level([&] {
      Guarded<std::uint64_t> marks(kernels::mark_words(indices.size()));
      EXPECT(kernels::mark_members(indices, members, marks.span()) <= indices.size());
      EXPECT(marks.intact());
    });
  }
}

// Given entries whose values are, with that probability, those of the sum.
template <class V>
struct Sample {
  Sample(std::mt19937& random, double density, double share, double same)
      : indices(samples::random_indices(random, 0, kRange, density)),
        values(samples::awkward_values<V>(random, indices.size())),
        given_indices(some_of(indices, share, random)) {
    const auto other = samples::awkward_values<V>(random, given_indices.size());
    std::size_t at = 0;
    for (std::size_t i = 0; i < given_indices.size(); ++i) {
      while (indices[at] != given_indices[i]) ++at;
      given_values.push_back(static_cast<double>(random()) < same * 0x1p32 ? values[at] : other[i]);
    }
  }
  kernels::Entries<V> sum() const { return {indices, values}; }
  kernels::Entries<V> given() const { return {given_indices, given_values}; }

  std::vector<std::uint32_t> indices;
  std::vector<V> values;
  std::vector<std::uint32_t> given_indices;
  std::vector<V> given_values;
};

template <class V>
void expect_left_out_and_put_back(const Sample<V>& sample) {
  std::vector<std::uint64_t> expected_known(kernels::mark_words(sample.given_indices.size()));
  std::vector<V> expected_rest(sample.values.size());
  expected_rest.resize(kernels::reference::leave_out<V>(sample.sum(), sample.given(), expected_known, expected_rest));
  samples::at_every_level([&] {
    Guarded<std::uint64_t> known(expected_known.size(), 8);
    Guarded<V> rest(sample.values.size(), sizeof(V));
    const std::size_t left = kernels::leave_out<V>(sample.sum(), sample.given(), known.span(), rest.span());
    EXPECT_EQ(left, expected_rest.size());
    EXPECT_EQ(known.copy(), expected_known);
    EXPECT(known.intact() && rest.intact());
    auto copied = rest.copy();
    copied.resize(left);
    EXPECT_EQ(samples::bits(copied), samples::bits(expected_rest));
    EXPECT_EQ(kernels::count_known(known.span(), sample.given_indices.size()), sample.values.size() - left);

    Guarded<V> values(sample.values.size(), sizeof(V));
    Guarded<V> read(copied, sizeof(V));
    EXPECT(kernels::put_back<V>(sample.indices, sample.given(), known.span(), read.span(), values.span()));
    EXPECT_EQ(samples::bits(values.copy()), samples::bits(sample.values));
    EXPECT(values.intact());
  });
}

TEST("what is left out is what has the sum's bits, and put back it makes the sum") {
  std::mt19937 random(13);
  for (const double density : {0.0, 0.001, 0.06, 0.6, 1.0}) {
    for (const double share : {0.0, 0.12, 0.5, 1.0}) {
      for (const double same : {0.0, 0.5, 0.95, 1.0}) {
        expect_left_out_and_put_back(Sample<float>(random, density, share, same));
        expect_left_out_and_put_back(Sample<double>(random, density, share, same));
        expect_left_out_and_put_back(Sample<bf16>(random, density, share, same));
        expect_left_out_and_put_back(Sample<f16>(random, density, share, same));
        expect_left_out_and_put_back(Sample<std::int32_t>(random, density, share, same));
        expect_left_out_and_put_back(Sample<std::int64_t>(random, density, share, same));
      }
    }
  }
}

template <class V>
void expect_left_out_of(std::mt19937& random, std::size_t size, double alone) {
  std::vector<std::uint8_t> givers(size);
  for (auto& one : givers) {
    const auto among = static_cast<std::uint8_t>(1 + random() % 255);
    one = static_cast<double>(random()) < alone * 0x1p32 ? static_cast<std::uint8_t>(1U << random() % 3) : among;
  }
  const auto sum = samples::awkward_values<V>(random, size);
  for (const std::size_t giver : {0, 2, 7}) {
    const auto entries = static_cast<std::size_t>(std::ranges::count_if(givers, [&](auto one) { return one >> giver & 1; }));
    std::vector<std::uint64_t> expected_known(kernels::mark_words(entries));
    std::vector<V> expected_rest(size);
    expected_rest.resize(kernels::reference::leave_out_of<V>(sum, givers, giver, expected_known, expected_rest));
    samples::at_every_level([&] {
      Guarded<std::uint8_t> gave(givers, 3);
      Guarded<V> values(sum, sizeof(V));
      Guarded<std::uint64_t> known(expected_known.size(), 8);
      Guarded<V> rest(size, sizeof(V));
      const std::size_t left =
          kernels::leave_out_of<V>(std::span<const V>(values.span()), std::span<const std::uint8_t>(gave.span()), giver, entries,
                                   known.span(), rest.span());
      EXPECT_EQ(left, expected_rest.size());
      EXPECT_EQ(known.copy(), expected_known);
      EXPECT(known.intact() && rest.intact());
      auto copied = rest.copy();
      copied.resize(left);
      EXPECT_EQ(samples::bits(copied), samples::bits(expected_rest));
    });
  }
}

TEST("where it is known who gave what, what only one gave is left out for him, unless it is NaN") {
  std::mt19937 random(16);
  for (const std::size_t size : samples::kSizes) {
    for (const double alone : {0.0, 0.5, 0.95, 1.0}) {
      expect_left_out_of<float>(random, size, alone);
      expect_left_out_of<double>(random, size, alone);
      expect_left_out_of<bf16>(random, size, alone);
      expect_left_out_of<f16>(random, size, alone);
      expect_left_out_of<std::int32_t>(random, size, alone);
      expect_left_out_of<std::int64_t>(random, size, alone);
    }
  }
}

TEST("marks beyond the last entry are no marks") {
  const std::uint64_t word = std::uint64_t{1} << 10;
  EXPECT_EQ(kernels::count_known(std::span(&word, 1), 11), std::size_t{1});
  EXPECT(kernels::count_known(std::span(&word, 1), 10) > 10);
  EXPECT_EQ(kernels::count_known({}, 0), std::size_t{0});
}

TEST("given entries that are not in the sum, or are in no order, are refused or put somewhere in it") {
  std::mt19937 random(14);
  for (int trial = 0; trial < 300; ++trial) {
    Sample<float> sample(random, 0.01, 0.3, 0.7);
    std::vector<std::uint64_t> known(kernels::mark_words(sample.given_indices.size()));
    std::vector<float> rest(sample.values.size());
    rest.resize(kernels::leave_out<float>(sample.sum(), sample.given(), known, rest));
    const std::size_t at = random() % sample.given_indices.size();
    if (trial % 2 == 0) {
      std::uint32_t stranger = 0;
      while (std::ranges::binary_search(sample.indices, stranger)) ++stranger;
      sample.given_indices[at] = stranger;
    } else {
      std::swap(sample.given_indices[at], sample.given_indices[random() % sample.given_indices.size()]);
    }
    samples::at_every_level([&] {
      Guarded<float> values(sample.values.size());
      const bool whole = kernels::put_back<float>(sample.indices, sample.given(), known, rest, values.span());
      if (trial % 2 == 0 && at > 0) EXPECT(!whole);
      EXPECT(values.intact());
    });
  }
}

}  // namespace
