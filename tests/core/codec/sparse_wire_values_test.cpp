// Packed values in messages: which messages have them, and what is refused.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "kernel_samples.hpp"
#include "codec/pack_values.hpp"
#include "codec/wire.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

constexpr WireFormat kUnpacked{.indices = IndexFormat::packed};
constexpr WireFormat kPacked{.indices = IndexFormat::packed, .packs_values = true};
constexpr WireFormat kRounded{.indices = IndexFormat::packed, .values = ValueEncoding::bf16};
constexpr WireFormat kRoundedPacked{.indices = IndexFormat::packed, .values = ValueEncoding::bf16, .packs_values = true};

// Of the magnitudes that are left once the largest are selected: three octaves.
template <class V>
std::vector<V> selected(std::mt19937& random, std::size_t count) {
  std::vector<V> values;
  for (std::size_t i = 0; i < count; ++i) {
    const auto share = static_cast<float>(random() % 100'000) * 1e-5F;
    values.push_back(V((random() % 2 == 0 ? 1e-3F : -1e-3F) * std::exp2(3 * share * share)));
  }
  return values;
}

template <class V>
SparseVector<V> selected_vector(std::mt19937& random, std::uint64_t n, double density) {
  const auto indices = samples::random_indices(random, 0, n, density);
  return SparseVector<V>::sparse(n, indices, selected<V>(random, indices.size()));
}

template <class V>
VectorHeader header_of(const SparseView<V>& view, WireFormat format) {
  return claimed_header(encode(view, format).bytes());
}

template <class V>
bool packs(const SparseView<V>& view, WireFormat format = kPacked) {
  return header_of(view, format).packed_value_words != 0;
}

template <class V>
std::vector<V> values_of(const SparseView<V>& view) {
  return {view.values.begin(), view.values.end()};
}

// Sent and read in both ways.
template <class V>
void expect_same(const SparseView<V>& sent, const std::vector<V>& expected, WireFormat format) {
  const Buffer message = encode(sent, format);
  EXPECT_EQ(message.size(), encoded_size(sent, format));
  const auto read = decode<V>(message.bytes(), sent.range);
  EXPECT_EQ(read.error(), "");
  EXPECT_EQ(read.view().dense, sent.dense);
  EXPECT(std::ranges::equal(read.view().indices, sent.indices));
  EXPECT_EQ(samples::bits(values_of(read.view())), samples::bits(expected));
  if (sent.dense) return;
  std::vector<std::uint32_t> indices(sent.nnz());
  std::vector<V> values(sent.nnz());
  EXPECT_EQ(decode_into<V>(message.bytes(), sent.range, indices, values), "");
  EXPECT(std::ranges::equal(indices, sent.indices));
  EXPECT_EQ(samples::bits(values), samples::bits(expected));
}

template <class V>
double bytes_each(const SparseView<V>& view, WireFormat format) {
  return static_cast<double>(encoded_size(view, format)) / static_cast<double>(view.nnz());
}

TEST("values of selected gradients take a fifth less as f32, a third less as bf16, and come back bit by bit") {
  std::mt19937 random(71);
  samples::at_every_level([&] {
    const auto f32 = selected_vector<float>(random, 4'000'000, 0.0078);
    expect_same(f32.view(), values_of(f32.view()), kPacked);
    EXPECT(bytes_each(f32.view(), kUnpacked) - bytes_each(f32.view(), kPacked) > 0.7);
    const auto two = selected_vector<bf16>(random, 4'000'000, 0.0078);
    expect_same(two.view(), values_of(two.view()), kPacked);
    EXPECT(bytes_each(two.view(), kUnpacked) - bytes_each(two.view(), kPacked) > 0.65);
  });
}

TEST("f32 that is rounded to bf16 is packed after that: the same values, the same errors") {
  std::mt19937 random(72);
  samples::at_every_level([&] {
    for (const std::size_t count : {5, 128, 3000}) {
      const auto indices = samples::random_indices(random, 0, count * 10, 0.1);
      const auto vector = SparseVector<float>::sparse(count * 10, indices, selected<float>(random, indices.size()));
      std::vector<float> error(vector.nnz(), 7.0F), packed_error(vector.nnz(), 9.0F);
      const Buffer rounded = encode(vector.view(), kRounded, std::span(error));
      const Buffer packed = encode(vector.view(), kRoundedPacked, std::span(packed_error));
      EXPECT_EQ(packs(vector.view(), kRoundedPacked), indices.size() >= 128);
      EXPECT_EQ(samples::bits(error), samples::bits(packed_error));
      expect_same(vector.view(), values_of(decode<float>(rounded.bytes(), vector.view().range).view()), kRoundedPacked);
      EXPECT(packed.size() <= rounded.size());
      auto noise = vector.clone();  // of which the exponents are all over the place
      for (float& one : noise.own_values()) {
        one = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0xff7fffffU);
      }
      EXPECT(!packs(noise.view(), kRoundedPacked));
      const Buffer same = encode(noise.view(), kRounded);
      expect_same(noise.view(), values_of(decode<float>(same.bytes(), noise.view().range).view()), kRoundedPacked);
    }
  });
}

TEST("without loss there is no error to tell") {
  std::mt19937 random(73);
  const auto vector = selected_vector<float>(random, 100'000, 0.01);
  std::vector<float> error(vector.nnz(), 7.0F);
  encode(vector.view(), kPacked, std::span(error));
  EXPECT(error == std::vector<float>(vector.nnz(), 0.0F));
}

TEST("messages that a rank sends in one call are rounded independently, by where their entries lie") {
  constexpr std::uint32_t kSlice = 4096, kEach = 1000;
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
  for (std::uint32_t slice = 0; slice < 3; ++slice) {  // three slices with the same values
    for (std::uint32_t i = 0; i < kEach; ++i) {
      indices.push_back(slice * kSlice + 2 * i);
      values.push_back(static_cast<float>(i) / kEach - 0.5F);
    }
  }
  const auto vector = SparseVector<float>::sparse(3 * kSlice, indices, values);
  for (const ValueEncoding encoding : {ValueEncoding::qsgd2, ValueEncoding::qsgd4, ValueEncoding::qsgd8}) {
    const WireFormat format{.values = encoding, .key = {.seed = 3, .call = 1, .rank = 2}};
    const auto rounded = [&](std::uint64_t begin, std::uint64_t end) {
      const Buffer message = encode(vector.slice(begin, end), format);
      return values_of(decode<float>(message.bytes(), {begin, end}).view());
    };
    const auto first = rounded(0, kSlice), second = rounded(kSlice, 2 * kSlice), third = rounded(2 * kSlice, 3 * kSlice);
    EXPECT(first != second && second != third && first != third);
    EXPECT(first == rounded(0, kSlice));
    // A piece of a slice, whose range begins where another's does.
    EXPECT(std::vector<float>(second.begin(), second.begin() + 100) != rounded(kSlice + 200, kSlice + 400));
  }
}

TEST("values are packed only where that saves a sixteenth, and where they can be") {
  std::mt19937 random(74);
  const auto vector = selected_vector<float>(random, 100'000, 0.01);
  EXPECT(packs(vector.view()));
  EXPECT(!packs(vector.view(), kUnpacked));
  EXPECT(packs(vector.view(), {.indices = IndexFormat::raw32, .packs_values = true}));
  EXPECT(!packs(vector.slice(0, 5000)));
  EXPECT(!packs(vector.slice(0, 0)));
  for (const ValueEncoding encoding : {ValueEncoding::f16, ValueEncoding::int8, ValueEncoding::qsgd4, ValueEncoding::codebook2}) {
    EXPECT(!packs(vector.view(), {.values = encoding, .packs_values = true}));
  }
  EXPECT(!packs(selected_vector<double>(random, 100'000, 0.01).view()));
  EXPECT(!packs(selected_vector<f16>(random, 100'000, 0.01).view()));
  auto noise = vector.clone();
  for (float& one : noise.own_values()) one = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  EXPECT(!packs(noise.view()));
  EXPECT_EQ(encoded_size(noise.view(), kPacked), encoded_size(noise.view(), kUnpacked));
  expect_same(noise.view(), values_of(noise.view()), kPacked);
  // A mean that there is not is values as they are, and these can be packed.
  EXPECT(packs(vector.view(), {.values = ValueEncoding::mean, .packs_values = true}));
  expect_same(vector.view(), values_of(vector.view()), {.values = ValueEncoding::mean, .packs_values = true});

  const auto dense = SparseVector<float>::adopt_dense([&] {
    const auto values = selected<float>(random, 5000);
    Array<float> held(values.size());
    std::ranges::copy(values, held.begin());
    return held;
  }());
  EXPECT(packs(dense.view()));
  expect_same(dense.view(), values_of(dense.view()), kPacked);
  expect_same(dense.slice(100, 1300), values_of(dense.slice(100, 1300)), kPacked);
}

TEST("what a message is expected to take is what selected gradients take") {
  std::mt19937 random(75);
  const auto vector = selected_vector<float>(random, 4'000'000, 0.0078);
  for (const WireFormat format : {kUnpacked, kPacked, kRounded, kRoundedPacked}) {
    const auto expected = static_cast<double>(
        encoded_size(expected_header(vector.view().range, false, vector.nnz(), DType::f32, format)));
    EXPECT(std::abs(expected / static_cast<double>(encoded_size(vector.view(), format)) - 1) < 0.02);
  }
  const IndexRange range{0, 1000};
  const auto size = [&](bool dense, std::uint64_t nnz, WireFormat format) {
    return encoded_size(expected_header(range, dense, nnz, DType::f32, format));
  };
  EXPECT_EQ(size(true, 1000, kPacked), size(true, 1000, kUnpacked));
  EXPECT_EQ(size(false, 100, kPacked), size(false, 100, kUnpacked));
  EXPECT(size(false, 400, kPacked) < size(false, 400, kUnpacked));
}

TEST("packed values that are none, or say that they take what they cannot, are refused") {
  std::mt19937 random(76);
  const auto vector = selected_vector<float>(random, 50'000, 0.01);
  const std::size_t nnz = vector.nnz();
  const auto refused = [&](std::string_view part, WireFormat format,
                           const std::function<void(VectorHeader&, Bytes values)>& damage) {
    const Buffer message = encode(vector.view(), format);
    VectorHeader header = claimed_header(message.bytes());
    const std::size_t values = sizeof header + (header.index_bytes + 7) / 8 * 8;
    damage(header, message.bytes().subspan(values));
    std::memcpy(message.data(), &header, sizeof header);
    const auto read = decode<float>(message.bytes(), vector.view().range);
    EXPECT(!read.ok());
    if (read.error().find(part) == std::string::npos) EXPECT_EQ(read.error(), part);
    std::vector<std::uint32_t> indices(nnz);
    std::vector<float> room(nnz);
    EXPECT_EQ(decode_into<float>(message.bytes(), vector.view().range, indices, room), read.error());
  };
  for (const WireFormat format : {kPacked, kRoundedPacked}) {
    refused("packed values are none", format, [](VectorHeader&, Bytes values) { values[1] = std::byte{7}; });
    refused("packed values are none", format, [](VectorHeader&, Bytes values) { values[2] ^= std::byte{1}; });
    refused("values cannot take", format, [&](VectorHeader& h, Bytes) { h.packed_value_words = 1; });
    refused("values cannot take", format, [&](VectorHeader& h, Bytes) { h.packed_value_words = ~std::uint32_t{0}; });
    refused("bytes, its header says", format, [&](VectorHeader& h, Bytes) { --h.packed_value_words; });
    refused("bytes, its header says", format, [&](VectorHeader& h, Bytes) { h.packed_value_words = 0; });
    refused("these cannot be", format, [&](VectorHeader& h, Bytes) { h.value_encoding = ValueEncoding::int8; });
  }
  refused("values cannot take", kUnpacked,
          [&](VectorHeader& h, Bytes) { h.packed_value_words = static_cast<std::uint32_t>(nnz * 4 / 8 + 1); });
  const auto doubles = selected_vector<double>(random, 50'000, 0.01);
  const Buffer message = encode(doubles.view(), kPacked);
  VectorHeader header = claimed_header(message.bytes());
  header.packed_value_words = static_cast<std::uint32_t>(doubles.nnz());
  std::memcpy(message.data(), &header, sizeof header);
  EXPECT(decode<double>(message.bytes(), doubles.view().range).error().find("these cannot be") != std::string::npos);
}

}  // namespace
