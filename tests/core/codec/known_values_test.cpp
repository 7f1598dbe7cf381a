#include "codec/known_values.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernel_samples.hpp"
#include "codec/slices.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr IndexRange kRange{1000, 60'000};

template <class V>
struct Ranks {
  Ranks(std::mt19937& random, std::size_t ranks, double density) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      indices.push_back(samples::random_indices(random, kRange.begin, kRange.end, density));
      values.emplace_back();
      for (std::size_t i = 0; i < indices.back().size(); ++i) {
        values.back().push_back(V(static_cast<float>(random() % 2000) / 16.0F - 60.0F));
      }
    }
  }
  SparseView<V> share(std::size_t rank) const { return {kRange, false, indices[rank], values[rank]}; }
  OwnedSlice<V> sum(Reduction reduction) const {
    std::vector<SparseView<V>> all;
    for (std::size_t rank = 0; rank < indices.size(); ++rank) all.push_back(share(rank));
    OwnedSlice<V> result = reduce_slices<V>(all, reduction, 1e9);
    if (reduction == Reduction::avg) scale(result, 1.0 / static_cast<double>(indices.size()));
    return result;
  }

  // Who gave each entry of it.
  Array<std::uint8_t> givers(const OwnedSlice<V>& sum) const {
    Array<std::uint8_t> all(sum.indices.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = 0;
      for (std::size_t rank = 0; rank < indices.size(); ++rank) {
        if (std::ranges::binary_search(indices[rank], sum.indices[i])) all[i] |= static_cast<std::uint8_t>(1U << rank);
      }
    }
    return all;
  }

  std::vector<std::vector<std::uint32_t>> indices;
  std::vector<std::vector<V>> values;
};

constexpr WireFormat kRaw{.indices = IndexFormat::raw32};
constexpr WireFormat kPacked{.indices = IndexFormat::packed, .packs_values = true};

template <class V>
void expect_same(const SparseView<V>& got, const SparseView<V>& expected) {
  EXPECT(std::ranges::equal(got.indices, expected.indices));
  EXPECT(std::ranges::equal(std::as_bytes(got.values), std::as_bytes(expected.values)));
}

template <class V>
void expect_everybody_reads(SumMessages<V> messages, const Ranks<V>& all, const OwnedSlice<V>& sum, double factor) {
  for (std::size_t rank = 0; rank < all.indices.size(); ++rank) {
    const GivenEntries<V> given{all.share(rank), factor};
    Buffer own;
    const ConstBytes message = messages.to(static_cast<Rank>(rank), given, own);
    EXPECT(message.size() <= messages.whole().size());
    if (!leaves_values_out(message)) {
      const auto decoded = decode<V>(message, kRange);
      expect_same(decoded.view(), sum.view());
      continue;
    }
    const auto decoded = decode_beside<V>(message, kRange, given);
    EXPECT_EQ(decoded.error(), std::string());
    expect_same(decoded.view(), sum.view());
    const Array<std::uint32_t> indices(sum.indices.size());
    const Array<V> values(sum.values.size());
    EXPECT_EQ(decode_beside_into<V>(message, kRange, given, indices.span(), values.span()), std::string());
    expect_same(SparseView<V>{kRange, false, indices.span(), values.span()}, sum.view());
  }
}

template <class V>
void expect_everybody_reads_the_sum(std::size_t ranks, double density, Reduction reduction, const WireFormat& format) {
  std::mt19937 random(7);
  Ranks<V> all(random, ranks, density);
  for (auto& values : all.values) {
    if (!values.empty()) values.front() = V(std::numeric_limits<float>::quiet_NaN());
  }
  const OwnedSlice<V> sum = all.sum(reduction);
  const double factor = reduction == Reduction::avg ? 1.0 / static_cast<double>(ranks) : 1.0;
  expect_everybody_reads(SumMessages<V>(sum.view(), format), all, sum, factor);
  expect_everybody_reads(SumMessages<V>(sum.view(), format, all.givers(sum)), all, sum, factor);
}

TEST("everybody reads the sum, bit by bit, in every format and for every reduction") {
  for (const Reduction reduction : samples::kReductions) {
    for (const double density : {0.0, 0.002, 0.05, 0.4}) {
      for (const WireFormat& format : {kRaw, kPacked, WireFormat{}}) {
        for (const std::size_t ranks : {1, 2, 3, 8}) {
          expect_everybody_reads_the_sum<float>(ranks, density, reduction, format);
          expect_everybody_reads_the_sum<double>(ranks, density, reduction, format);
          expect_everybody_reads_the_sum<bf16>(ranks, density, reduction, format);
          if (reduction != Reduction::avg) expect_everybody_reads_the_sum<f16>(ranks, density, reduction, format);
        }
      }
    }
  }
}

TEST("values that only their receiver gave do not travel: of two ranks with nothing in common, half of them") {
  std::mt19937 random(9);
  Ranks<float> two(random, 2, 0.02);
  for (auto& index : two.indices[0]) index &= ~1U;
  for (auto& index : two.indices[1]) index |= 1U;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    auto& indices = two.indices[rank];
    indices.erase(std::ranges::unique(indices).begin(), indices.end());
    two.values[rank].resize(indices.size());
  }
  const OwnedSlice<float> sum = two.sum(Reduction::sum);
  SumMessages<float> messages(sum.view(), kRaw);
  Buffer own;
  const std::size_t bytes = messages.to(0, {two.share(0)}, own).size();
  const std::size_t marks = (two.indices[0].size() + 63) / 64 * 8;
  const std::size_t expected = 2 * sizeof(VectorHeader) + 4 * sum.indices.size() + marks + 4 * two.indices[1].size();
  EXPECT(bytes >= expected && bytes < expected + 24);
}

TEST("damaged messages are refused, or say something that has as many entries, and nothing is read outside") {
  std::mt19937 random(10);
  const Ranks<float> all(random, 4, 0.01);
  const OwnedSlice<float> sum = all.sum(Reduction::sum);
  for (const WireFormat& format : {kRaw, kPacked}) {
    SumMessages<float> messages(sum.view(), format);
    Buffer own;
    const GivenEntries<float> given{all.share(1)};
    const ConstBytes right = messages.to(1, given, own);
    EXPECT(leaves_values_out(right));
    int refused = 0;
    for (int trial = 0; trial < 4000; ++trial) {
      const std::size_t size = trial % 4 == 0 ? random() % (right.size() / 8) * 8 : right.size();
      Buffer message(size);  // exactly as long: whoever reads beyond it is seen by the sanitizers
      std::ranges::copy(right.first(size), message.data());
      for (int i = 0; size > 0 && i < 1 + trial % 3; ++i) {
        const std::size_t at = trial % 2 == 0 ? random() % size : random() % std::min<std::size_t>(size, 64);
        message.data()[at] ^= static_cast<std::byte>(1U << random() % 8);
      }
      const auto decoded = decode_beside<float>(message.bytes(), kRange, given);
      refused += decoded.ok() ? 0 : 1;
      if (decoded.ok()) EXPECT(indices_error(kRange, decoded.view().indices).empty());
    }
    EXPECT(refused > 1500);
  }
}

TEST("a message that leaves out what this rank never gave, or gave densely, is refused by name") {
  std::mt19937 random(15);
  const Ranks<float> all(random, 4, 0.01);
  const OwnedSlice<float> sum = all.sum(Reduction::sum);
  SumMessages<float> messages(sum.view(), kPacked);
  Buffer own;
  const ConstBytes message = messages.to(1, {all.share(1)}, own);
  const Ranks<float> others(random, 1, 0.01);
  EXPECT(!decode_beside<float>(message, kRange, {others.share(0)}).ok());
  GivenEntries<float> dense;
  dense.entries.dense = true;
  EXPECT(decode_beside<float>(message, kRange, dense).error().find("gave densely") != std::string::npos);
  EXPECT(!decode<float>(message, kRange).ok());  // nor is it a vector
  const auto whole = messages.whole();
  EXPECT(decode_beside<float>(whole, kRange, {all.share(1)}).error().find("not that of indices alone") !=
         std::string::npos);
}

TEST("messages of sizes are as long as real ones") {
  std::mt19937 random(16);
  for (const std::size_t ranks : {2, 4, 8}) {
    for (const double density : {0.005, 0.05, 0.2}) {
      for (const WireFormat& format : {kRaw, WireFormat{.indices = IndexFormat::packed}}) {
        const Ranks<float> all(random, ranks, density);
        const OwnedSlice<float> sum = all.sum(Reduction::sum);
        SumMessages<float> real(sum.view(), format);
        Buffer own;
        const auto bytes = static_cast<double>(real.to(0, {all.share(0)}, own).size());
        std::vector<SparseView<CountedF32>> counted;
        for (std::size_t rank = 0; rank < ranks; ++rank) counted.push_back({kRange, false, {.own = all.indices[rank].size()}});
        const OwnedSlice<CountedF32> counted_sum = reduce_slices<CountedF32>(counted, Reduction::sum, 1e9);
        SumMessages<CountedF32> sizes(counted_sum.view(), format);
        Buffer own_sizes;
        const ConstBytes message = sizes.to(0, {counted[0]}, own_sizes);
        EXPECT(std::abs(static_cast<double>(message.size()) / bytes - 1.0) < 0.02);
        const auto decoded = leaves_values_out(message) ? decode_beside<CountedF32>(message, kRange, {counted[0]})
                                                        : decode<CountedF32>(message, kRange);
        EXPECT_EQ(decoded.error(), std::string());
        EXPECT_EQ(decoded.view().nnz(), counted_sum.view().nnz());
      }
    }
  }
}

}  // namespace
