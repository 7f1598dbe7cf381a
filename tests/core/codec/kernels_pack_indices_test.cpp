#include "codec/pack_indices.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "kernel_samples.hpp"
#include "codec/elias_fano.hpp"
#include "codec/gap_code.hpp"
#include "codec/pack_plan.hpp"
#include "kernels/scan.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;
using samples::Guarded;
using Indices = std::vector<std::uint32_t>;

// Runs of `length` indices, with `gap` numbers between two of them on average.
Indices runs(std::mt19937& random, std::size_t count, std::uint32_t length, std::uint32_t gap) {
  Indices indices;
  for (std::uint32_t next = 5; indices.size() < count; next += 1 + static_cast<std::uint32_t>(random() % (2 * gap))) {
    for (std::uint32_t i = 0; i < length && indices.size() < count; ++i) indices.push_back(next++);
  }
  return indices;
}

std::vector<Indices> awkward_sets(std::mt19937& random) {
  std::vector<Indices> sets{{}, {0}, {0xfffffffeU}, {0, 0xfffffffeU}, {7, 8}, {0, 2, 0x80000000U}};
  for (const double density : {0.00001, 0.0003, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0}) {
    for (const std::uint64_t count : {2, 63, 64, 65, 127, 1023, 1024, 1025, 3000}) {
      const auto range = static_cast<std::uint64_t>(static_cast<double>(count) / density);
      sets.push_back(samples::random_indices(random, 1000, 1000 + range, density));
      sets.push_back(samples::random_indices(random, 0xffffffffU - range, 0xffffffffU, density));
    }
  }
  for (const std::uint32_t length : {2, 3, 5, 8, 64, 100, 700, 5000}) {
    for (const std::uint32_t gap : {1, 10, 100'000}) sets.push_back(runs(random, 4096 + random() % 64, length, gap));
  }
  Indices mixed = samples::random_indices(random, 0, 100'000, 0.02);  // deserts, crowds and runs in one block
  for (const std::uint32_t begin : {200'000U, 900'000U, 4'000'000'000U}) {
    for (const std::uint32_t index : samples::random_indices(random, begin, begin + 300, 0.6)) mixed.push_back(index);
    for (std::uint32_t i = 0; i < 70; ++i) mixed.push_back(begin + 1000 + i);
  }
  sets.push_back(mixed);
  Indices halves;  // runs in one half of a block, no two neighbours in the other
  for (std::uint32_t i = 0, next = 0; i < 4096; ++i) {
    const bool in_runs = i / 512 % 2 == 0;
    next += in_runs ? (i % 40 == 0 ? 100 : 1) : 2 + static_cast<std::uint32_t>(random() % 1000);
    halves.push_back(next);
  }
  sets.push_back(halves);
  return sets;
}

std::vector<std::byte> packed_by_reference(const Indices& indices) {
  const kernels::IndexPlan plan = kernels::plan_indices(indices);
  std::vector<std::byte> packed(plan.bytes);
  kernels::reference::pack_indices(plan, indices, packed);
  return packed;
}

TEST("every level packs the reference's bytes into just their room, and unpacks them") {
  std::mt19937 random(31);
  for (const Indices& set : awkward_sets(random)) {
    const std::vector<std::byte> expected = packed_by_reference(set);
    EXPECT(expected.size() <= kernels::packed_size_most(set.size()));
    Indices back(set.size());
    EXPECT(kernels::reference::unpack_indices(expected, back));
    EXPECT_EQ(back, set);
    for (const std::size_t shift : {0, 1, 12}) {
      samples::at_every_level([&] {
        Guarded<std::uint32_t> indices(set, 4 * (shift % 4));
        Guarded<std::byte> exact(expected.size(), shift);
        const kernels::IndexPlan plan = kernels::plan_indices(indices.span());
        EXPECT_EQ(plan.bytes, expected.size());
        kernels::pack_indices(plan, indices.span(), exact.bytes());
        EXPECT(exact.copy() == expected && exact.intact());
        Guarded<std::uint32_t> out(set.size(), 4 * (shift % 4));
        EXPECT(kernels::unpack_indices(exact.bytes(), out.span()));
        EXPECT(out.copy() == set && out.intact());
      });
    }
  }
}

// Checks a plan; adds up how often it cuts, and how many of its blocks are in runs.
void expect_sound_plan(std::span<const std::uint32_t> chunk, std::size_t& cuts, std::size_t& in_runs) {
  const kernels::PackPlan plan(chunk);
  std::size_t begin = 0, bytes = 0;
  for (const kernels::PackedBlock& block : plan.blocks()) {
    REQUIRE(block.count >= 1 && block.count <= chunk.size() - begin);
    const auto part = chunk.subspan(begin, block.count);
    std::uint32_t breaks = 0;
    for (std::size_t i = 1; i < part.size(); ++i) breaks += part[i] - part[i - 1] != 1 ? 1U : 0U;
    const auto alone = kernels::packed_block(part.front(), part.back(), block.count, breaks);
    EXPECT_EQ(block.first, part.front());
    EXPECT_EQ(block.runs, alone.runs);
    std::size_t payload = alone.payload_bytes;
    if (!block.runs && payload > 0) {
      std::size_t unary = part.size() - 1;
      for (std::size_t i = 1; i < part.size(); ++i) unary += (part[i] - part[i - 1] - 1) >> block.width;
      payload = kernels::elias_fano_low_bytes(block.count - 1, block.width) + (unary + 7) / 8;
      EXPECT(payload <= alone.payload_bytes);
    }
    EXPECT_EQ(block.payload_bytes, payload);
    begin += block.count;
    bytes += block.bytes();
    cuts += begin < chunk.size() ? 1 : 0;
    in_runs += block.runs ? 1 : 0;
  }
  EXPECT_EQ(begin, chunk.size());
  EXPECT(bytes <= 4 * chunk.size() + kernels::kPackedHeaderBytes);
}

TEST("a plan's blocks cover the indices, each as long as its own gaps and runs make it") {
  std::mt19937 random(37);
  std::size_t cuts = 0, in_runs = 0;
  for (const Indices& set : awkward_sets(random)) {
    samples::at_every_level([&] {
      for (std::size_t begin = 0; begin < set.size(); begin += kernels::kPackedBlockMost) {
        const std::size_t count = std::min(set.size() - begin, kernels::kPackedBlockMost);
        expect_sound_plan(std::span(set).subspan(begin, count), cuts, in_runs);
      }
    });
  }
  EXPECT(cuts > 20 && in_runs > 100);
}

TEST("gaps become numbers and come back, of every width, with and without whole groups") {
  std::mt19937 random(38);
  for (const std::size_t count : {1, 2, 16, 17, 18, 33, 500, 1024}) {
    for (const unsigned width : {0U, 1U, 4U, 13U, 31U}) {
      Indices indices{static_cast<std::uint32_t>(random() % 1000)};
      while (indices.size() < count) {
        indices.push_back(indices.back() + 1 + static_cast<std::uint32_t>(random()) % (0xf0000000U / static_cast<std::uint32_t>(count)));
      }
      Indices expected(count - 1);
      kernels::reference::gap_numbers(indices, width, expected);
      Indices back{indices.front()};
      back.insert(back.end(), expected.begin(), expected.end());
      kernels::reference::gap_indices(back, width);
      EXPECT_EQ(back, indices);
      samples::at_every_level([&] {
        Guarded<std::uint32_t> read(indices, 4);
        Guarded<std::uint32_t> numbers(count - 1, 8);
        kernels::gap_numbers(read.span(), width, numbers.span());
        EXPECT(numbers.copy() == expected && numbers.intact());
        EXPECT_EQ(kernels::last_gap_number(read.span(), width), count == 1 ? indices[0] : expected.back());
        Indices mixed{indices.front()};
        mixed.insert(mixed.end(), expected.begin(), expected.end());
        Guarded<std::uint32_t> there(mixed, 12);
        kernels::gap_indices(there.span(), width);
        EXPECT(there.copy() == indices && there.intact());
      });
    }
  }
}

TEST("a room larger than needed is written within its slack only") {
  std::mt19937 random(32);
  const Indices set = samples::random_indices(random, 0, 200'000, 0.02);
  const std::vector<std::byte> expected = packed_by_reference(set);
  samples::at_every_level([&] {
    Guarded<std::byte> roomy(expected.size() + 1000);
    kernels::pack_indices(kernels::plan_indices(set), set, roomy.bytes());
    EXPECT(roomy.intact(expected.size() + kernels::kEliasFanoSlackBytes));
    EXPECT(std::equal(expected.begin(), expected.end(), roomy.bytes().begin()));
  });
}

TEST("sequences of every width and length come back") {
  std::mt19937 random(33);
  for (unsigned width = 0; width <= 31; ++width) {
    for (const std::size_t count : {1, 7, 8, 9, 15, 16, 17, 31, 33, 255, 1023, 1024}) {
      const std::uint64_t most = 0xffffffffU / count - 1;
      const std::uint64_t step = std::clamp<std::uint64_t>(std::uint64_t{3} << width, 1, most);
      Indices numbers;
      std::uint32_t last = 3;
      for (std::size_t i = 0; i < count; ++i) {
        numbers.push_back(last += 1 + static_cast<std::uint32_t>(random() % step));
      }
      const auto spread = static_cast<std::uint32_t>(numbers.back() - 3 - count);
      const std::size_t low_bytes = kernels::elias_fano_low_bytes(static_cast<std::uint32_t>(count), width);
      const std::size_t bytes =
          low_bytes + kernels::elias_fano_high_bytes(static_cast<std::uint32_t>(count), spread, width);
      std::vector<std::byte> expected(bytes);
      kernels::reference::elias_fano_encode(numbers, 3, width, expected.data(), expected.data() + low_bytes,
                                            bytes - low_bytes);
      samples::at_every_level([&] {
        std::vector<std::byte> code(bytes + kernels::kEliasFanoSlackBytes, std::byte{0xff});
        kernels::elias_fano_encode(numbers, 3, width, code.data(), code.data() + low_bytes, bytes - low_bytes);
        EXPECT(std::equal(expected.begin(), expected.end(), code.begin()));
        Guarded<std::uint32_t> back(count);
        EXPECT(kernels::elias_fano_decode(code.data(), code.data() + low_bytes, bytes - low_bytes, 3, width,
                                          back.span()));
        EXPECT(back.copy() == numbers && back.intact());
      });
    }
  }
}

// Bits of an index in a uniform set, at least: H(d)/d.
double entropy_bits(double density) {
  return -std::log2(density) - (1 - density) / density * std::log2(1 - density);
}
double packed_bits(const Indices& indices) {
  return 8.0 * static_cast<double>(kernels::plan_indices(indices).bytes) / static_cast<double>(indices.size());
}

TEST("uniform indices take at most 5 % more than their entropy, and evenly spread ones predict how much") {
  std::mt19937 random(34);
  for (const double density : {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.004, 0.00781, 0.015, 0.03, 0.05, 0.07, 0.1}) {
    const std::uint64_t range = static_cast<std::uint64_t>(50'000 / density);
    const Indices indices = samples::random_indices(random, 0, range, density);
    const double count = static_cast<double>(indices.size());
    EXPECT(packed_bits(indices) <= 1.05 * entropy_bits(count / static_cast<double>(range)));
    const auto expected = static_cast<double>(kernels::packed_size_expected(range, indices.size()));
    EXPECT(std::abs(expected * 8 / count / packed_bits(indices) - 1) < 0.01);
  }
}

TEST("the fewer bits the more the indices cluster") {
  std::mt19937 random(35);
  // 1 % of the range each: uniform, in crowds of half density, in runs of 16, of 256, and all in one.
  const double uniform = packed_bits(samples::random_indices(random, 0, 5'000'000, 0.01));
  Indices crowds;
  for (std::uint32_t begin = 0; begin < 5'000'000; begin += 50'000) {
    for (const std::uint32_t index : samples::random_indices(random, begin, begin + 1000, 0.5)) crowds.push_back(index);
  }
  const double short_runs = packed_bits(runs(random, 50'000, 16, 16 * 99));
  const double long_runs = packed_bits(runs(random, 50'000, 256, 256 * 99));
  Indices all(50'000);
  std::iota(all.begin(), all.end(), 77U);
  EXPECT(packed_bits(crowds) < 0.5 * uniform);
  EXPECT(short_runs < 0.25 * uniform);
  EXPECT(long_runs < 0.25 * short_runs);
  EXPECT(packed_bits(all) < 0.07);
}

// Exact-size copies on the heap, so that a sanitizer sees any read or write outside.
void expect_safe(const std::vector<std::byte>& bytes, std::size_t count) {
  const auto packed = std::make_unique<std::byte[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), packed.get());
  std::vector<Indices> found;
  samples::at_every_level([&] {
    Indices indices(count);
    const bool ok = kernels::unpack_indices({packed.get(), bytes.size()}, indices);
    if (ok) EXPECT(kernels::reference::strictly_increasing(indices));
    found.push_back(ok ? indices : Indices{});
  });
  Indices expected(count);
  if (!kernels::reference::unpack_indices({packed.get(), bytes.size()}, expected)) expected.clear();
  for (const Indices& one : found) EXPECT(one == expected);
}

TEST("damaged bytes are refused or sound, and every level agrees on which") {
  std::mt19937 random(36);
  std::size_t refused = 0;
  std::vector<Indices> sets = awkward_sets(random);
  for (int round = 0; round < 3000; ++round) {
    const Indices& set = sets[random() % sets.size()];
    std::vector<std::byte> packed = packed_by_reference(set);
    if (packed.empty()) continue;
    for (std::size_t change = 1 + random() % 3; change > 0; --change) {
      // Half of the damage goes into the first block's header and counts.
      const std::size_t at = random() % (random() % 2 == 0 ? std::min<std::size_t>(packed.size(), 12) : packed.size());
      packed[at] = random() % 2 == 0 ? static_cast<std::byte>(random()) : packed[at] ^ std::byte{1};
    }
    if (random() % 4 == 0) packed.resize(random() % (packed.size() + 1));
    const std::size_t count = random() % 4 == 0 ? random() % 2000 : set.size();
    Indices indices(count);
    refused += kernels::unpack_indices(packed, indices) ? 0 : 1;
    expect_safe(packed, count);
  }
  EXPECT(refused > 1000);
  EXPECT(refused < 3000);
}

TEST("bytes that no packing wrote are refused") {
  const Indices set{10, 20, 30, 1000};
  const std::vector<std::byte> packed = packed_by_reference(set);
  Indices out(set.size());
  const auto refuses = [&](std::vector<std::byte> bytes, std::size_t count = 4) {
    bool refused = true;
    samples::at_every_level([&] { refused = refused && !kernels::unpack_indices(bytes, {out.data(), count}); });
    return refused;
  };
  const auto changed = [&](std::size_t at, std::byte bits) {
    auto bytes = packed;
    bytes[at] ^= bits;
    return bytes;
  };
  auto longer = packed;
  longer.push_back(std::byte{0});
  EXPECT(!refuses(packed));
  EXPECT(refuses(packed, 3) && refuses(packed, 0));            // more indices than asked for
  EXPECT(refuses({packed.begin(), packed.end() - 1}));        // cut
  EXPECT(refuses({packed.begin(), packed.begin() + 7}));      // not even a header
  EXPECT(refuses(longer));
  EXPECT(refuses(changed(7, std::byte{0x80})));  // a bit that no version has set
  EXPECT(refuses(changed(4, std::byte{1})));     // another count
  EXPECT(refuses(changed(packed.size() - 1, packed.back())));  // a set bit less
}

}  // namespace
