// Counts and keys in few bytes; and entries without a header.
#include "testing.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codec/short_numbers.hpp"
#include "codec/short_share.hpp"
#include "sparse_samples.hpp"

namespace {

using namespace telegrad;
using Counts = std::vector<std::uint64_t>;

constexpr std::uint64_t kLargest = (std::uint64_t{1} << 56) - 1;

Buffer bytes_of(std::initializer_list<int> bytes) {
  Buffer message(bytes.size());
  std::size_t at = 0;
  for (const int byte : bytes) message.data()[at++] = static_cast<std::byte>(byte);
  return message;
}

TEST("counts come back, and small ones take a byte each") {
  const Counts kSamples[] = {{}, {0}, {0, 0}, {0, 0, 0}, {1, 0, 0, 0, 0}, {126, 127, 16382, 16383, kLargest}, Counts(1000, 5)};
  const std::size_t kBytes[] = {0, 1, 2, 2, 3, 1 + 2 + 2 + 3 + 9, 1000};
  for (std::size_t i = 0; i < std::size(kSamples); ++i) {
    const Buffer message = encode_counts(kSamples[i]);
    EXPECT_EQ(message.size(), kBytes[i]);
    Counts found(kSamples[i].size(), 77);
    EXPECT(decode_counts(message.bytes(), found));
    EXPECT(found == kSamples[i]);
  }
  Random random(3);
  for (int time = 0; time < 300; ++time) {
    Counts counts(random.below(200));
    for (auto& count : counts) count = random.below(4) == 0 ? random.below(std::uint64_t{1} << random.below(50)) : 0;
    const Buffer message = encode_counts(counts);
    EXPECT(message.size() <= most_count_bytes(counts.size()));
    Counts found(counts.size());
    EXPECT(decode_counts(message.bytes(), found));
    EXPECT(found == counts);
  }
}

TEST("bytes that are not so many counts are refused") {
  Counts five(5);
  EXPECT(!decode_counts({}, five));
  EXPECT(!decode_counts(bytes_of({2, 2, 2, 2}).bytes(), five));            // too few
  EXPECT(!decode_counts(bytes_of({2, 2, 2, 2, 2, 2}).bytes(), five));      // too many
  EXPECT(!decode_counts(bytes_of({2, 0, 2}).bytes(), five));               // more zeros than there are counts
  EXPECT(!decode_counts(bytes_of({0}).bytes(), five));                     // no number of zeros
  EXPECT(!decode_counts(bytes_of({2, 2, 2, 2, 0x80}).bytes(), five));      // ends within a number
  EXPECT(!decode_counts(bytes_of({0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}).bytes(), five));
  EXPECT(!decode_counts(bytes_of({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}).bytes(), five));
  EXPECT(decode_counts(bytes_of({0, 2}).bytes(), five));
}

TEST("sorted keys come back, and other bytes are refused") {
  for (const Counts& keys : {Counts{}, Counts{0}, Counts{0, 0, 5, 5, 300}, Counts{~std::uint64_t{0}}}) {
    Counts found{9};
    EXPECT(decode_keys(encode_keys(keys).bytes(), keys.size(), found));
    EXPECT(std::equal(keys.begin(), keys.end(), found.begin() + 1, found.end()));
  }
  Counts found;
  EXPECT(!decode_keys(encode_keys(Counts{1, 2}).bytes(), 1, found));
  EXPECT(!decode_keys(bytes_of({0x80}).bytes(), 5, found));
  EXPECT(!decode_keys(bytes_of({1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}).bytes(), 5, found));  // beyond 64 bits
}

TEST("short shares come back, of every dtype and range") {
  const auto run = [&]<class V>(V) {
    Random random(4);
    for (const std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{1000}, std::uint64_t{0xfffff000}}) {
      for (const double density : {0.0, 0.02, 1.0}) {
        Input<V> input = uniform<V>(0xe00, density, random);
        for (auto& index : input.indices) index += static_cast<std::uint32_t>(begin);
        const IndexRange range{begin, begin + 0xe00};
        const SparseView<V> view{range, false, input.indices, input.values};
        const Buffer message = encode_short(view);
        EXPECT(message.size() <= most_short_bytes<V>(view.nnz()));
        std::vector<std::uint32_t> indices(view.nnz());
        std::vector<V> values(view.nnz());
        EXPECT(read_short<V>(message.bytes(), range, indices, values));
        EXPECT(indices == input.indices);
        EXPECT(std::memcmp(values.data(), input.values.data(), values.size() * sizeof(V)) == 0);
      }
    }
  };
  run(float{});
  run(double{});
  run(bf16{});
  run(f16{});
}

TEST("a damaged short share is refused, and nothing is read outside of it") {
  const std::uint32_t indices[] = {10, 11, 500};
  const float values[] = {1.0F, 2.0F, 3.0F};
  const IndexRange range{10, 501};
  const Buffer message = encode_short(SparseView<float>{range, false, indices, values});
  std::vector<std::uint32_t> found(3);
  std::vector<float> sums(3);
  EXPECT(read_short<float>(message.bytes(), range, found, sums));
  for (std::size_t bytes = 0; bytes < message.size(); ++bytes) {
    EXPECT(!read_short<float>(message.bytes().first(bytes), range, found, sums));
  }
  EXPECT(!read_short<float>(message.bytes(), {10, 500}, found, sums));  // the last index is outside of it
  found.resize(2);
  sums.resize(2);
  EXPECT(!read_short<float>(message.bytes(), range, found, sums));  // more than there should be
}

}  // namespace
