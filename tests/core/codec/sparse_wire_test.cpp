#include "codec/wire.hpp"

#include <algorithm>
#include <cstring>

#include "kernel_samples.hpp"
#include "codec/pack_indices.hpp"
#include "testing.hpp"

namespace {

using namespace telegrad;

template <class V>
SparseVector<V> random_vector(std::mt19937& random, std::uint64_t n, std::uint64_t begin, std::uint64_t end,
                              double density) {
  const auto indices = samples::random_indices(random, begin, end, density);
  return SparseVector<V>::sparse(n, indices, samples::awkward_values<V>(random, indices.size()));
}

template <class V>
std::vector<std::uint64_t> bits_of(const SparseView<V>& view) {
  const auto values = samples::bits(std::vector<V>(view.values.begin(), view.values.end()));
  std::vector<std::uint64_t> out(values.begin(), values.end());
  out.insert(out.end(), view.indices.begin(), view.indices.end());
  return out;
}

VectorHeader header_of(ConstBytes bytes) {
  VectorHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  return header;
}

constexpr WireFormat kPacked{.indices = IndexFormat::packed};
constexpr WireFormat kAllPacked{.indices = IndexFormat::packed, .packs_values = true};
constexpr WireFormat kRaw{.indices = IndexFormat::raw32};

template <class V>
void expect_round_trip(const SparseView<V>& view, WireFormat format) {
  const Buffer bytes = encode(view, format);
  EXPECT_EQ(bytes.size(), encoded_size(view, format));
  EXPECT(bytes.size() <= encoded_size(view, kRaw));
  EXPECT_EQ(bytes.size() % 8, 0);
  auto read = decode<V>(bytes.bytes(), view.range);
  EXPECT_EQ(read.error(), "");
  if (!read.ok()) return;
  const Decoded<V> decoded = std::move(read);  // moving keeps the view valid
  EXPECT_EQ(decoded.view().dense, view.dense);
  EXPECT_EQ(decoded.view().range, view.range);
  EXPECT_EQ(bits_of(decoded.view()), bits_of(view));
}

template <class V>
void expect_round_trip(const SparseView<V>& view) {
  for (const WireFormat format : {WireFormat{}, kRaw, kPacked, kAllPacked}) expect_round_trip(view, format);
}

TEST("a vector comes back bit by bit, whole and in slices, at every level") {
  std::mt19937 random(18);
  const auto check = [&]<class V>(V, std::uint64_t n, double density, bool dense) {
    auto vector = random_vector<V>(random, n, 0, n, density);
    if (dense) vector.to_dense();
    for (const auto& [from, to] : std::vector<std::pair<double, double>>{{0, 1}, {0, 0}, {0.3, 0.31}, {0.1, 0.9}}) {
      const auto at = [&](double share) { return static_cast<std::uint64_t>(share * static_cast<double>(n)); };
      expect_round_trip(vector.slice(at(from), at(to)));
    }
  };
  samples::at_every_level([&] {
    for (const std::uint64_t n : {0, 1, 5, 1000, 65'536, 65'537, 200'000}) {
      for (const double density : {0.0, 0.0001, 0.01, 0.4}) {
        for (const bool dense : {false, true}) {
          check(float{}, n, density, dense);
          check(bf16{}, n, density, dense);
          check(std::int32_t{}, n, density, dense);
          check(std::int64_t{}, n, density, dense);
        }
      }
    }
  });
}

TEST("indices up to the largest there is come back") {
  std::mt19937 random(19);
  const std::uint64_t n = kDimensionMost;
  for (const std::uint64_t range : {1, 70'000, 300'000}) {
    const auto vector = random_vector<float>(random, n, n - range, n, 0.5);
    expect_round_trip(vector.slice(n - range, n));
    expect_round_trip(vector.slice(n - range - 12'345, n));
  }
  const auto last = SparseVector<float>::sparse(n, std::vector<std::uint32_t>{0xfffffffeU}, std::vector<float>{1.0F});
  expect_round_trip(last.view());
}

TEST("the smaller index format is chosen: two bytes for an index wherever there are many") {
  std::mt19937 random(20);
  const auto many = random_vector<float>(random, 1'000'000, 0, 1'000'000, 0.01);
  const Buffer bytes = encode(many.view());
  EXPECT(header_of(bytes.bytes()).index_format == IndexFormat::blocked16);
  EXPECT(bytes.size() <= 32 + 16 * 4 + 6 * many.nnz() + 16);
  const auto few = random_vector<float>(random, 1'000'000, 0, 1'000'000, 0.00001);
  EXPECT(header_of(encode(few.view()).bytes()).index_format == IndexFormat::raw32);
  for (const std::uint64_t nnz : {0, 1, 10, 30, 33, 40, 1000}) {
    const bool blocked = 32 * 4 + (2 * nnz + 7) / 8 * 8 < (4 * nnz + 7) / 8 * 8;
    EXPECT_EQ(smaller_index_format(32 * 65'536, nnz) == IndexFormat::blocked16, blocked);
  }
}

TEST("the wish for an index format is met, but where another is as small") {
  std::mt19937 random(24);
  const auto format_of = [](const auto& view, WireFormat wish) {
    return header_of(encode(view, wish).bytes()).index_format;
  };
  const auto many = random_vector<float>(random, 1'000'000, 0, 1'000'000, 0.01);
  EXPECT(format_of(many.view(), kRaw) == IndexFormat::raw32);
  EXPECT(format_of(many.view(), kPacked) == IndexFormat::packed);
  EXPECT(format_of(many.view(), {.indices = IndexFormat::blocked16}) == IndexFormat::blocked16);
  EXPECT(format_of(many.slice(0, 0), kPacked) == IndexFormat::raw32);
  const std::vector<std::uint32_t> far{5, 4'000'000'000U};
  const auto few = SparseVector<float>::sparse(kDimensionMost, far, std::vector<float>{1, 2});
  EXPECT(format_of(few.view(), kPacked) == IndexFormat::raw32);
  auto dense = random_vector<float>(random, 1000, 0, 1000, 0.5);
  dense.to_dense();
  EXPECT(format_of(dense.view(), kPacked) == IndexFormat::none);
}

TEST("packed indices make the message of 1 % as short as they are") {
  std::mt19937 random(25);
  const auto vector = random_vector<float>(random, 4'000'000, 0, 4'000'000, 0.01);
  const auto nnz = static_cast<double>(vector.nnz());
  const double index_bits = 8 * (static_cast<double>(encoded_size(vector.view(), kPacked)) - 32 - 4 * nnz) / nnz;
  EXPECT(index_bits < 1.15 * 8.08);  // H(0.01) / 0.01 = 8.08
  EXPECT(index_bits > 8.0);
}

TEST("messages laid one behind the other are read in place") {
  std::mt19937 random(21);
  const auto vector = random_vector<bf16>(random, 10'001, 0, 10'001, 0.1);
  const auto low = vector.slice(0, 3333), high = vector.slice(3333, 10'001);
  const std::size_t split = encoded_size(low);
  const Buffer both(split + encoded_size(high));
  encode_into(low, both.bytes().first(split));
  encode_into(high, both.bytes().subspan(split));
  const auto read = decode<bf16>(both.bytes().subspan(split), high.range);
  EXPECT(read.ok());
  EXPECT_EQ(bits_of(read.view()), bits_of(high));
}

// Encodes, lets `damage` change header and bytes, and expects the error to contain `part`.
template <class V = float, class Damage>
void expect_error(const SparseView<V>& view, std::string_view part, Damage damage, WireFormat format = {}) {
  const Buffer bytes = encode(view, format);
  VectorHeader header = header_of(bytes.bytes());
  damage(header, bytes.bytes().subspan(sizeof header));
  std::memcpy(bytes.data(), &header, sizeof header);
  const auto read = decode<V>(bytes.bytes(), view.range);
  EXPECT(!read.ok());
  if (read.error().find(part) == std::string::npos) EXPECT_EQ(read.error(), part);
}

TEST("each kind of damage has its own error") {
  const auto raw = SparseVector<float>::sparse(100'000, std::vector<std::uint32_t>{10, 20, 30, 70'000},
                                               std::vector<float>{1, 2, 3, 4});
  const auto blocked = SparseVector<float>::sparse(100, std::vector<std::uint32_t>{10, 20, 30, 40, 50, 60, 70},
                                                   std::vector<float>{1, 2, 3, 4, 5, 6, 7});
  auto dense = blocked.clone();
  dense.to_dense();
  EXPECT(header_of(encode(raw.view()).bytes()).index_format == IndexFormat::raw32);
  EXPECT(header_of(encode(blocked.view()).bytes()).index_format == IndexFormat::blocked16);
  expect_error(raw.view(), "magic is 1", [&](VectorHeader& h, Bytes) { h.magic = 1; });
  expect_error(raw.view(), "kind is 9", [&](VectorHeader& h, Bytes) { h.kind = static_cast<VectorKind>(9); });
  expect_error(raw.view(), "dtype is 2, expected 1", [&](VectorHeader& h, Bytes) { h.dtype = DType::bf16; });
  expect_error(raw.view(), "range is 1 to 100000, expected 0 to 100000", [&](VectorHeader& h, Bytes) { h.begin = 1; });
  expect_error(raw.view(), "range is 0 to 5", [&](VectorHeader& h, Bytes) { h.end = 5; });
  expect_error(raw.view(), "index format is 7",
               [&](VectorHeader& h, Bytes) { h.index_format = static_cast<IndexFormat>(7); });
  expect_error(dense.view(), "index format is 1", [&](VectorHeader& h, Bytes) { h.index_format = IndexFormat::raw32; });
  expect_error(raw.view(), "nnz is 100001", [&](VectorHeader& h, Bytes) { h.nnz = 100'001; });
  expect_error(raw.view(), "nnz is 4294967295", [&](VectorHeader& h, Bytes) { h.nnz = ~std::uint32_t{0}; });
  expect_error(dense.view(), "nnz is 99", [&](VectorHeader& h, Bytes) { h.nnz = 99; });
  expect_error(raw.view(), "version is 4, expected 5", [&](VectorHeader& h, Bytes) { h.magic ^= 1U << 24; });
  expect_error(raw.view(), "value encoding is 10", [&](VectorHeader& h, Bytes) { h.value_encoding = ValueEncoding{10}; });
  expect_error(raw.view(), "5 indices cannot take 16 bytes", [&](VectorHeader& h, Bytes) { h.nnz = 5; });
  expect_error(raw.view(), "4 indices cannot take 20 bytes", [&](VectorHeader& h, Bytes) { h.index_bytes = 20; });
  expect_error(blocked.view(), "7 indices cannot take 21 bytes", [&](VectorHeader& h, Bytes) { --h.index_bytes; });
  expect_error(dense.view(), "cannot take 8 bytes", [&](VectorHeader& h, Bytes) { h.index_bytes = 8; });
  for (const std::uint32_t nnz : {2U, 5U}) {
    expect_error(raw.view(), "bytes, its header says", [&](VectorHeader& h, Bytes) {
      h.nnz = nnz;
      h.index_bytes = 4 * nnz;
    });
  }
  expect_error(blocked.view(), "block counts do not add up", [&](VectorHeader&, Bytes b) { b[0] = std::byte{4}; });
  expect_error(blocked.view(), "block counts do not add up", [&](VectorHeader&, Bytes b) { b[3] = std::byte{255}; });
  expect_error(blocked.view(), "not strictly increasing", [&](VectorHeader&, Bytes b) { b[8] = std::byte{20}; });
  expect_error(blocked.view(), "outside its range", [&](VectorHeader&, Bytes b) { b[20] = std::byte{100}; });
  expect_error(raw.view(), "not strictly increasing", [&](VectorHeader&, Bytes b) { b[0] = std::byte{21}; });
  expect_error(raw.view(), "outside its range", [&](VectorHeader&, Bytes b) { b[14] = std::byte{2}; });

  const auto packed = SparseVector<float>::sparse(1000, std::vector<std::uint32_t>{10, 20, 30, 40, 50, 60, 70},
                                                  std::vector<float>{1, 2, 3, 4, 5, 6, 7});
  const std::size_t packed_bytes = kernels::plan_indices(packed.indices()).bytes;
  EXPECT(header_of(encode(packed.view(), kPacked).bytes()).index_format == IndexFormat::packed);
  expect_error(packed.view(), "packed indices", [&](VectorHeader&, Bytes b) { b[7] = std::byte{255}; }, kPacked);
  expect_error(packed.view(), "packed indices", [&](VectorHeader&, Bytes b) { b[packed_bytes - 1] = {}; }, kPacked);
  expect_error(packed.view(), "outside its range", [&](VectorHeader&, Bytes b) { b[1] = std::byte{4}; }, kPacked);
  expect_error(packed.view(), "cannot take 7", [&](VectorHeader& h, Bytes) { h.index_bytes = 7; }, kPacked);
  expect_error(packed.view(), "cannot take 29", [&](VectorHeader& h, Bytes) { h.index_bytes = 29; }, kPacked);
  expect_error(packed.view(), "cannot take 18446744073709551615",
               [&](VectorHeader& h, Bytes) { h.index_bytes = ~std::uint64_t{0}; }, kPacked);

  const Buffer bytes = encode(raw.view());
  EXPECT(decode<float>(bytes.bytes().first(31), raw.view().range).error().find("31 bytes") != std::string::npos);
  EXPECT(decode<float>({}, raw.view().range).error().find("0 bytes") != std::string::npos);
  EXPECT(decode<float>(bytes.bytes().subspan(4), raw.view().range).error().find("multiple of 8") != std::string::npos);
}

TEST("entries of one sign are sent as their mean, with what that loses; others, and dense ones, as they are") {
  const WireFormat as_mean{.indices = IndexFormat::packed, .values = ValueEncoding::mean};
  const std::vector<std::uint32_t> indices{3, 5, 6, 90};
  const auto sent = [&](const SparseVector<float>& vector, std::span<float> error) {
    const Buffer message = encode(vector.view(), as_mean, error);
    EXPECT_EQ(message.size(), encoded_size(vector.view(), as_mean));
    const auto read = decode<float>(message.bytes(), vector.view().range);
    EXPECT_EQ(read.error(), "");
    EXPECT(std::ranges::equal(read.view().indices, vector.indices()));
    return std::vector<float>(read.view().values.begin(), read.view().values.end());
  };
  std::vector<float> error(4, 77.0F);
  const auto down = SparseVector<float>::sparse(100, indices, std::vector<float>{-1, -2, 0, -5});
  EXPECT(sent(down, error) == std::vector<float>(4, -2.0F));
  EXPECT(error == (std::vector<float>{1, 0, 2, -3}));
  EXPECT_EQ(encoded_size(down.view(), as_mean), encoded_size(down.view(), kPacked) - 8);

  const auto mixed = SparseVector<float>::sparse(100, indices, std::vector<float>{-1, 2, 0, -5});
  EXPECT(sent(mixed, error) == (std::vector<float>{-1, 2, 0, -5}));
  EXPECT(error == std::vector<float>(4, 0.0F));
  EXPECT_EQ(encoded_size(mixed.view(), as_mean), encoded_size(mixed.view(), kPacked));

  EXPECT(sent(SparseVector<float>(100), {}).empty());
  auto dense = down.clone();
  dense.to_dense();
  EXPECT(std::ranges::equal(sent(dense, {}), dense.values()));
  expect_error(dense.view(), "value encoding is 7",
               [&](VectorHeader& h, Bytes) { h.value_encoding = ValueEncoding::mean; });
  expect_error(down.view(), "its values are not encoded",
               [&](VectorHeader&, Bytes b) { std::ranges::fill(b.last(8).first(4), std::byte{0xff}); }, as_mean);
}

// An exact-size copy on the heap, so that a sanitizer sees any read outside it.
template <class V>
void expect_safe(ConstBytes bytes, IndexRange range) {
  std::vector<std::uint64_t> words(bytes.size() / 8);
  const std::size_t size = words.size() * 8;
  if (size != 0) std::memcpy(words.data(), bytes.data(), size);
  const auto read = decode<V>(std::as_bytes(std::span(words)), range);
  if (!read.ok()) return;
  // What is accepted is sound: a scatter of it stays inside.
  std::vector<V> out(range.size());
  write_dense(read.view(), std::span<V>(out));
  if (!read.view().dense) validate_entries(range.end, read.view().indices, read.view().nnz());
}

TEST("damaged and truncated messages are refused or sound, never worse") {
  std::mt19937 random(22);
  std::size_t accepted_shapes = 0;
  for (int round = 0; round < 4000; ++round) {
    const std::uint64_t begin = random() % 3 == 0 ? 0 : random() % 100'000;
    const std::uint64_t end = begin + random() % 70'000;
    auto vector = random_vector<float>(random, end, begin, end, random() % 2 == 0 ? 0.0005 : 0.01);
    if (random() % 8 == 0) vector.to_dense();
    constexpr WireFormat kFormats[] = {{}, kPacked, kAllPacked};
    const Buffer bytes = encode(vector.slice(begin, end), kFormats[random() % 3]);
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int change = 0; change < changes; ++change) {
      // Half of the damage goes into header and counts, where it matters most.
      const std::size_t at = random() % (random() % 2 == 0 ? std::min<std::size_t>(bytes.size(), 48) : bytes.size());
      bytes.data()[at] = random() % 2 == 0 ? static_cast<std::byte>(random()) : bytes.data()[at] ^ std::byte{1};
    }
    const std::size_t kept = random() % 4 == 0 ? random() % (bytes.size() + 1) : bytes.size();
    accepted_shapes += decode<float>(bytes.bytes().first(kept), {begin, end}).ok() ? 1 : 0;
    expect_safe<float>(bytes.bytes().first(kept), {begin, end});
    expect_safe<bf16>(bytes.bytes().first(kept), {begin, end});
  }
  EXPECT(accepted_shapes > 0 && accepted_shapes < 4000);  // damage to values alone is not this format's business
}

TEST("random bytes behind a right header are refused or sound") {
  std::mt19937 random(23);
  for (int round = 0; round < 4000; ++round) {
    VectorHeader header;
    header.kind = random() % 4 == 0 ? VectorKind::dense : VectorKind::sparse;
    header.index_format = static_cast<IndexFormat>(random() % 4);
    header.begin = static_cast<std::uint32_t>(random() % 1000);
    header.end = header.begin + static_cast<std::uint32_t>(random() % 200'000);
    header.nnz = static_cast<std::uint32_t>(random() % 64);
    header.index_bytes = random() % 256;
    header.packed_value_words = random() % 2 == 0 ? 0 : static_cast<std::uint32_t>(random() % 64);
    std::vector<std::byte> bytes(sizeof header + 8 * (random() % 80));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    std::memcpy(bytes.data(), &header, sizeof header);
    expect_safe<float>(bytes, {header.begin, header.end});
    expect_safe<float>(bytes, {0, kDimensionMost / 1000});
  }
}

}  // namespace
