// What reads bytes from other ranks, on bytes of anybody's making: libFuzzer's entry point, which the core's tests call
// too.
//
// The first 16 bytes say what is done with the rest: a whole message as it is, one that leaves out values which the reader
// gave, or one whose header is right and leads straight to the decoder of one index format, of packed values or of values
// that are rounded.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "fuzz/sparse_wire.hpp"
#include "base/check.hpp"
#include "codec/known_values.hpp"
#include "codec/wire.hpp"
#include "kernels/dispatch.hpp"

namespace telegrad::fuzz {
namespace {

// Aligned memory of just that size, so that a sanitizer sees every read outside.
class Message {
 public:
  explicit Message(std::size_t size) : words_(std::make_unique<std::uint64_t[]>((size + 7) / 8)), size_(size) {}

  Bytes bytes() { return std::as_writable_bytes(std::span(words_.get(), (size_ + 7) / 8)).first(size_); }

 private:
  std::unique_ptr<std::uint64_t[]> words_;
  std::size_t size_;
};

template <class V>
bool same(const SparseView<V>& a, const SparseView<V>& b) {
  return a.range == b.range && a.dense == b.dense && std::ranges::equal(a.indices, b.indices) &&
         a.values.size() == b.values.size() &&
         (a.values.empty() || std::memcmp(a.values.data(), b.values.data(), a.values.size_bytes()) == 0);
}

// What has been accepted lies in its range in order, and is the same vector in every format.
template <class V>
void check_sound(const SparseView<V>& view) {
  for (std::size_t i = 0; i < view.indices.size(); ++i) {
    TELEGRAD_CHECK(view.indices[i] >= (i == 0 ? view.range.begin : std::uint64_t{view.indices[i - 1]} + 1));
    TELEGRAD_CHECK(view.indices[i] < view.range.end);
  }
  for (const IndexFormat indices : {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed}) {
    for (const bool packs_values : {false, true}) {
      const Buffer again = encode(view, {.indices = indices, .packs_values = packs_values});
      const auto read = decode<V>(again.bytes(), view.range);
      TELEGRAD_CHECK(read.ok() && same(read.view(), view));
    }
  }
}

// Entries that may be in the message's sum: every so many-th index, with a value of its own.
template <class V>
struct Given {
  Given(ConstBytes message, IndexRange range, std::size_t every) {
    VectorHeader header;
    if (!read_indices_header(message, dtype_of<V>, range, header).empty()) return;
    const Array<std::uint32_t> all(header.nnz);
    if (!read_indices(message, header, range, all.span()).empty()) return;
    for (std::size_t i = 0; i < all.size(); i += every) {
      indices.push_back(all[i]);
      values.push_back(V(static_cast<float>(i)));
    }
  }
  GivenEntries<V> entries(IndexRange range) const { return {{range, false, indices, values}}; }

  std::vector<std::uint32_t> indices;
  std::vector<V> values;
};

template <class V>
bool read_at_every_level(const Recipe& recipe, ConstBytes message, IndexRange range) {
  using kernels::SimdLevel;
  const bool leaves_out = recipe.mode % kModes == kLeavesOutMode;
  const Given<V> given(leaves_out ? message : ConstBytes(), range, recipe.nnz % 16 + std::size_t{1});
  bool accepted = false;
  for (const SimdLevel level : kernels::kSimdLevels) {
    if (level > kernels::best_simd_level()) continue;
    const kernels::ScopedSimdLevel forced(level);
    const auto read = leaves_out ? decode_beside<V>(message, range, given.entries(range)) : decode<V>(message, range);
    TELEGRAD_CHECK(level == SimdLevel::portable || read.ok() == accepted);
    accepted = read.ok();
    if (accepted) check_sound(read.view());
  }
  return accepted;
}

bool read_as(DType dtype, const Recipe& recipe, ConstBytes message, IndexRange range) {
  switch (dtype) {
    case DType::f64: return read_at_every_level<double>(recipe, message, range);
    case DType::bf16: return read_at_every_level<bf16>(recipe, message, range);
    case DType::f16: return read_at_every_level<f16>(recipe, message, range);
    case DType::i32: return read_at_every_level<std::int32_t>(recipe, message, range);
    case DType::i64: return read_at_every_level<std::int64_t>(recipe, message, range);
    default: return read_at_every_level<float>(recipe, message, range);
  }
}

// Values of indices that follow one another, or densely; the section is as long as they need, whatever `rest` is.
bool read_encoded(const Recipe& recipe, ConstBytes rest, IndexRange range) {
  constexpr unsigned kEncodings = static_cast<unsigned>(kLastValueEncoding) + 1;
  const bool dense = recipe.dense % 2 == 1;
  const auto most = std::min<std::uint64_t>(range.size(), 8192);
  const IndexRange own{range.begin, range.begin + (dense ? most : range.size())};
  const auto nnz = static_cast<std::uint32_t>(dense ? most : std::min<std::uint64_t>(recipe.nnz, most));
  const VectorHeader header{.kind = dense ? VectorKind::dense : VectorKind::sparse,
                            .index_format = dense ? IndexFormat::none : IndexFormat::raw32,
                            .value_encoding = static_cast<ValueEncoding>(recipe.encoding % kEncodings),
                            .begin = static_cast<std::uint32_t>(own.begin),
                            .end = static_cast<std::uint32_t>(own.end),
                            .index_bytes = dense ? 0 : std::uint64_t{4} * nnz,
                            .nnz = nnz};
  Message message(encoded_size(header));
  const Bytes bytes = message.bytes();
  std::memcpy(bytes.data(), &header, sizeof header);
  for (std::uint32_t i = 0; !dense && i < nnz; ++i) {
    const auto index = static_cast<std::uint32_t>(own.begin + i);
    std::memcpy(bytes.data() + sizeof header + std::size_t{4} * i, &index, sizeof index);
  }
  const std::size_t at = sizeof header + (static_cast<std::size_t>(header.index_bytes) + 7) / 8 * 8;
  if (!rest.empty() && at < bytes.size()) std::memcpy(bytes.data() + at, rest.data(), std::min(rest.size(), bytes.size() - at));
  return read_at_every_level<float>(recipe, bytes, own);
}

}  // namespace

bool read_sparse_message(ConstBytes input) {
  Recipe recipe;
  if (input.size() < sizeof recipe) return false;
  std::memcpy(&recipe, input.data(), sizeof recipe);
  const ConstBytes rest = input.subspan(sizeof recipe);
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{recipe.begin} + recipe.range_size, kDimensionMost);
  const IndexRange range{std::min<std::uint64_t>(recipe.begin, end), end};
  constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i32, DType::i64};
  const DType dtype = kDTypes[recipe.dtype % 6];

  const unsigned mode = recipe.mode % kModes;
  if (mode == 0 || mode == kLeavesOutMode) {
    Message message(rest.size());
    if (!rest.empty()) std::memcpy(message.bytes().data(), rest.data(), rest.size());
    return read_as(dtype, recipe, message.bytes(), range);
  }
  if (mode == kEncodedMode) return read_encoded(recipe, rest, range);
  const auto padded = [](std::size_t bytes) { return (bytes + 7) / 8 * 8; };
  const auto nnz = std::min<std::uint64_t>(recipe.nnz, std::min<std::uint64_t>(range.size(), 8192));
  const bool of_values = mode == 4;
  VectorHeader header{.dtype = dtype,
                      .index_format = of_values ? IndexFormat::raw32 : static_cast<IndexFormat>(mode),
                      .begin = static_cast<std::uint32_t>(range.begin),
                      .end = static_cast<std::uint32_t>(range.end),
                      .index_bytes = of_values ? 4 * nnz : rest.size(),
                      .nnz = static_cast<std::uint32_t>(nnz)};
  if (of_values) header.packed_value_words = static_cast<std::uint32_t>(padded(rest.size()) / 8);
  const std::size_t values = sizeof header + padded(static_cast<std::size_t>(header.index_bytes));
  Message message(values + padded(of_values ? rest.size() : size_of(dtype) * static_cast<std::size_t>(nnz)));
  const Bytes bytes = message.bytes();
  std::memcpy(bytes.data(), &header, sizeof header);
  for (std::uint32_t i = 0; of_values && i < nnz; ++i) {
    const auto index = static_cast<std::uint32_t>(range.begin + i);
    std::memcpy(bytes.data() + sizeof header + 4 * i, &index, sizeof index);
  }
  const std::size_t at = of_values ? values : sizeof header;
  if (!rest.empty()) std::memcpy(bytes.data() + at, rest.data(), rest.size());
  return read_as(dtype, recipe, bytes, range);
}

}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::read_sparse_message(std::as_bytes(std::span(data, size)));
  return 0;
}
