#include "codec/pack_values.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <set>
#include <string>

#include "kernel_samples.hpp"
#include "codec/value_groups.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;
using Packed = std::vector<std::byte>;

constexpr std::size_t kSizes[] = {0, 1, 7, 63, 64, 65, 128, 200, 1000, 1023, 1024, 1025, 1088, 3000, 4096 + 77};

template <class V>
ConstBytes bytes_of(const std::vector<V>& values) {
  return std::as_bytes(std::span(values));
}

/// Of a Student's t distribution with three degrees of freedom, beyond `least`: what is left of gradients once the largest
/// are selected.
template <class V>
std::vector<V> gradients(std::mt19937& random, std::size_t count, double least = 0.0) {
  std::student_t_distribution<double> draw(3.0);
  std::vector<V> values;
  while (values.size() < count) {
    const double one = draw(random);
    if (std::abs(one) >= least) values.push_back(V(static_cast<float>(one * 1e-3)));
  }
  return values;
}

template <class V>
V of_exponent(unsigned exponent, std::uint32_t rest) {
  const std::uint32_t word = (rest & 0x807fffffU) | exponent << 23;
  if constexpr (sizeof(V) == 2) {
    return std::bit_cast<V>(static_cast<std::uint16_t>(word >> 16));
  } else {
    return std::bit_cast<V>(word);
  }
}

/// Of `range` exponents from `first` on, and one in `rarity` of any.
template <class V>
std::vector<V> around(std::mt19937& random, std::size_t count, unsigned first, unsigned range, unsigned rarity) {
  std::vector<V> values;
  for (std::size_t i = 0; i < count; ++i) {
    const bool any = rarity != 0 && random() % rarity == 0;
    const unsigned exponent = (any ? random() : first + random() % range) & 255U;
    values.push_back(of_exponent<V>(exponent, static_cast<std::uint32_t>(random())));
  }
  return values;
}

template <class V>
std::vector<std::vector<V>> awkward_values(std::mt19937& random) {
  std::vector<std::vector<V>> sets;
  for (const std::size_t count : kSizes) {
    sets.push_back(gradients<V>(random, count));
    sets.push_back(gradients<V>(random, count, 5.0));
    sets.push_back(around<V>(random, count, 0, 256, 0));  // all bits at random
    sets.push_back(samples::awkward_values<V>(random, count));
    for (const unsigned range : {1, 2, 3, 7, 12, 30}) {
      for (const unsigned first : {0U, 120U, 250U}) {  // 250: some wrap around from NaN to zero
        for (const unsigned rarity : {0, 5, 300}) sets.push_back(around<V>(random, count, first, range, rarity));
      }
    }
    std::vector<V> specials;
    const std::vector<V> special = samples::special_values<V>();
    for (std::size_t i = 0; i < count; ++i) specials.push_back(special[i % special.size()]);
    sets.push_back(specials);
    std::vector<V> unlike = around<V>(random, count, 100, 1, 0);  // the sample of 64 does not see what differs
    for (std::size_t i = 1; i < count; i += 2 * std::max<std::size_t>(1, count / 64)) unlike[i] = of_exponent<V>(7, 1);
    sets.push_back(unlike);
  }
  return sets;
}

template <class V>
void expect_alike(std::mt19937& random, std::set<unsigned>& widths) {
  constexpr DType kDType = dtype_of<V>;
  for (const std::vector<V>& set : awkward_values<V>(random)) {
    const kernels::ValuePlan expected_plan = kernels::plan_values(kDType, bytes_of(set));
    for (const kernels::ValueBlock& block : expected_plan.blocks) widths.insert(block.width);
    EXPECT(expected_plan.bytes <= (set.size() * sizeof(V) + 4 * expected_plan.blocks.size() + 7) / 8 * 8);
    EXPECT(expected_plan.bytes >= kernels::packed_values_least(kDType, set.size()));
    Packed expected(expected_plan.bytes);
    kernels::reference::pack_values(kDType, expected_plan, bytes_of(set), expected);
    std::vector<V> back(set.size());
    EXPECT(kernels::reference::unpack_values(kDType, expected, std::as_writable_bytes(std::span(back))));
    EXPECT_EQ(samples::bits(back), samples::bits(set));
    for (const std::size_t shift : {0, 1, 12}) {
      samples::at_every_level([&] {
        Guarded<V> values(set, sizeof(V) * (shift % 4));
        const kernels::ValuePlan plan = kernels::plan_values(kDType, values.bytes());
        EXPECT_EQ(plan.bytes, expected_plan.bytes);
        Guarded<std::byte> exact(plan.bytes, shift);
        kernels::pack_values(kDType, plan, values.bytes(), exact.bytes());
        EXPECT(exact.copy() == expected && exact.intact());
        Guarded<V> out(set.size(), sizeof(V) * (shift % 4));
        EXPECT(kernels::unpack_values(kDType, exact.bytes(), out.bytes()));
        EXPECT(samples::bits(out.copy()) == samples::bits(set) && out.intact());
      });
    }
  }
}

TEST("every level packs the reference's bytes into just their room, and unpacks every bit") {
  std::mt19937 random(61);
  for (const bool half : {false, true}) {
    std::set<unsigned> widths;
    half ? expect_alike<bf16>(random, widths) : expect_alike<float>(random, widths);
    EXPECT(widths == (std::set<unsigned>{0, 1, 2, 3, 4, 5, kernels::kRawWidth}));
  }
}

template <class V>
double bits_each(const std::vector<V>& values) {
  const kernels::ValuePlan plan = kernels::plan_values(dtype_of<V>, bytes_of(values));
  return 8.0 * static_cast<double>(plan.bytes) / static_cast<double>(values.size());
}

TEST("exponents of gradients take about 2 to 3.5 bits, those that are alike none, and noise nothing to speak of") {
  std::mt19937 random(62);
  constexpr std::size_t kCount = 200'000;
  samples::at_every_level([&] {
    EXPECT(bits_each(gradients<float>(random, kCount)) < 24 + 3.6);
    EXPECT(bits_each(gradients<bf16>(random, kCount)) < 8 + 3.6);
    EXPECT(bits_each(std::vector<float>(kCount, 0.75F)) < 24.1);
    EXPECT(bits_each(std::vector<bf16>(kCount, bf16(-3.0F))) < 8.1);
    EXPECT(bits_each(around<float>(random, kCount, 0, 256, 0)) < 32.05);
    EXPECT(bits_each(around<bf16>(random, kCount, 0, 256, 0)) < 16.05);
  });
  const auto selected = gradients<float>(random, 50'000, 5.0);
  const auto expected = static_cast<double>(kernels::packed_values_expected(DType::f32, selected.size()));
  EXPECT(std::abs(expected * 8 / 50'000 / bits_each(selected) - 1) < 0.02);
}

TEST("blocks are planned by themselves: layers of different scales, one outlier in each") {
  std::mt19937 random(63);
  std::vector<float> values;
  for (unsigned layer = 0; layer < 32; ++layer) {
    for (const float one : gradients<float>(random, kernels::kValueBlock)) {
      values.push_back(std::ldexp(one, static_cast<int>(layer) * 7 - 110));
    }
    values.back() = layer % 2 == 0 ? std::numeric_limits<float>::infinity() : 0.0F;
  }
  EXPECT(bits_each(values) < 24 + 3.8);
}

// Every level says the same of these bytes, and reads the same of them.
template <class V>
bool read_alike(const Packed& packed, std::size_t count) {
  std::vector<V> expected(count);
  const bool accepted = kernels::reference::unpack_values(dtype_of<V>, packed, std::as_writable_bytes(std::span(expected)));
  samples::at_every_level([&] {
    Guarded<std::byte> exact(packed);
    Guarded<V> out(count);
    EXPECT_EQ(kernels::unpack_values(dtype_of<V>, exact.bytes(), out.bytes()), accepted);
    EXPECT(out.intact());
    if (accepted) EXPECT_EQ(samples::bits(out.copy()), samples::bits(expected));
  });
  return accepted;
}

template <class V>
void expect_refusals(std::mt19937& random) {
  constexpr std::size_t kCount = 1024 + 100;
  const auto values = around<V>(random, kCount, 100, 3, 20);
  const kernels::ValuePlan plan = kernels::plan_values(dtype_of<V>, bytes_of(values));
  REQUIRE(plan.blocks[0].width == 2 && plan.blocks[0].escapes > 1 && plan.blocks[1].width == 2);
  Packed packed(plan.bytes);
  kernels::pack_values(dtype_of<V>, plan, bytes_of(values), packed);
  EXPECT(read_alike<V>(packed, kCount));
  const auto refused = [&](const std::function<void(Packed&)>& damage) {
    Packed damaged = packed;
    damage(damaged);
    EXPECT(!read_alike<V>(damaged, kCount));
  };
  for (const unsigned width : {0U, 1U, 3U, 5U, 6U, 7U, 8U, 9U, 64U, 255U}) {
    refused([&](Packed& bytes) { bytes[1] = static_cast<std::byte>(width); });
  }
  for (const int change : {-1, 1, 100, 0x7fff}) {
    refused([&](Packed& bytes) {
      const auto escapes = static_cast<std::uint16_t>(plan.blocks[0].escapes + change);
      std::memcpy(bytes.data() + 2, &escapes, sizeof escapes);
    });
  }
  refused([](Packed& bytes) { bytes.resize(bytes.size() - 8); });
  refused([](Packed& bytes) { bytes.resize(bytes.size() + 8); });
  refused([](Packed& bytes) { bytes.clear(); });
  refused([](Packed& bytes) { bytes.resize(3); });
  // A code that becomes an escape for which there is no exponent, and the other way.
  const std::byte* const codes = packed.data() + 4;
  for (std::size_t bit = 0; bit < 8; ++bit) {
    const auto mask = static_cast<std::byte>(1U << bit);
    const bool low = (codes[0] & mask) != std::byte{0};
    const bool high = (codes[8] & mask) != std::byte{0};
    if (low != high) refused([&](Packed& bytes) { bytes[low ? 4 + 8 : 4] |= mask; });
    if (low && high) refused([&](Packed& bytes) { bytes[4] ^= mask; });
  }
  // A code behind the last value.
  const std::size_t second = kernels::block_bytes(dtype_of<V>, plan.blocks[0], kernels::kValueBlock);
  refused([&](Packed& bytes) { bytes[second + 4 + 2 * 8 + 7] |= std::byte{0x80}; });
  // Padding.
  const std::size_t used = second + kernels::block_bytes(dtype_of<V>, plan.blocks[1], 100);
  if (used < packed.size()) refused([&](Packed& bytes) { bytes.back() = std::byte{1}; });
}

TEST("planted damage is refused: widths, numbers of escapes, lengths, codes and padding") {
  std::mt19937 random(64);
  for (int round = 0; round < 50; ++round) {
    expect_refusals<float>(random);
    expect_refusals<bf16>(random);
  }
  EXPECT(!read_alike<float>({std::byte{1}, std::byte{8}, {}, {}, {}, {}, {}, {}}, 1));  // a raw block has no top,
  EXPECT(!read_alike<float>({{}, std::byte{8}, std::byte{1}, {}, {}, {}, {}, {}}, 1));  // nor escapes
  EXPECT(read_alike<float>({{}, std::byte{8}, {}, {}, {}, {}, {}, {}}, 1));
  EXPECT(read_alike<bf16>({}, 0));
}

TEST("damaged bytes are refused, or read alike at every level and within their memory") {
  std::mt19937 random(65);
  std::size_t accepted = 0;
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    const std::size_t count = random() % 1500;
    const auto values = around<float>(random, count, 100, 1 + random() % 8, 40);
    const kernels::ValuePlan plan = kernels::plan_values(DType::f32, bytes_of(values));
    Packed packed(plan.bytes);
    kernels::pack_values(DType::f32, plan, bytes_of(values), packed);
    for (std::size_t change = random() % 4; change > 0 && !packed.empty(); --change) {
      const std::size_t within = random() % 2 == 0 ? std::min<std::size_t>(packed.size(), 64) : packed.size();
      packed[random() % within] ^= static_cast<std::byte>(1U << random() % 8);
    }
    if (random() % 8 == 0) packed.resize(random() % (packed.size() + 1));
    accepted += read_alike<float>(packed, count) ? 1 : 0;
    read_alike<bf16>(packed, count);
  }
  EXPECT(accepted > kRounds / 8 && accepted < kRounds);
}

TEST("values that change once they are planned spoil what is sent, and nothing else") {
  std::mt19937 random(66);
  const auto before = around<float>(random, 3000, 100, 3, 0);
  const auto after = around<float>(random, 3000, 0, 256, 0);
  const kernels::ValuePlan plan = kernels::plan_values(DType::f32, bytes_of(before));
  samples::at_every_level([&] {
    Guarded<std::byte> exact(plan.bytes);
    kernels::pack_values(DType::f32, plan, bytes_of(after), exact.bytes());
    EXPECT(exact.intact());
  });
}

}  // namespace
