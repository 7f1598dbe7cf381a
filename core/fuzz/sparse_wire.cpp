// What reads bytes from other ranks, on bytes of anybody's making: libFuzzer's entry point, which the core's tests call
// too.
//
// The first 16 bytes say what is done with the rest: a whole message as it is, or one whose header is right and leads
// straight to the decoder of one index format.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/check.hpp"
#include "fuzz/sparse_wire.hpp"
#include "kernels/dispatch.hpp"
#include "sparse/wire.hpp"

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
bool same(const StreamView<V>& a, const StreamView<V>& b) {
  return a.range == b.range && a.dense == b.dense && std::ranges::equal(a.indices, b.indices) &&
         a.values.size() == b.values.size() &&
         (a.values.empty() || std::memcmp(a.values.data(), b.values.data(), a.values.size_bytes()) == 0);
}

// What has been accepted lies in its range in order, and is the same stream in every format.
template <class V>
void check_sound(const StreamView<V>& view) {
  for (std::size_t i = 0; i < view.indices.size(); ++i) {
    TELEGRAD_CHECK(view.indices[i] >= (i == 0 ? view.range.begin : std::uint64_t{view.indices[i - 1]} + 1));
    TELEGRAD_CHECK(view.indices[i] < view.range.end);
  }
  for (const IndexFormat indices : {IndexFormat::none, IndexFormat::raw32, IndexFormat::packed}) {
    const Buffer again = encode(view, {.indices = indices});
    const auto read = decode<V>(again.bytes(), view.range);
    TELEGRAD_CHECK(read.ok() && same(read.view(), view));
  }
}

template <class V>
bool read_at_every_level(ConstBytes message, IndexRange range) {
  using kernels::SimdLevel;
  bool accepted = false;
  for (const SimdLevel level : {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512}) {
    if (level > kernels::best_simd_level()) continue;
    const kernels::ScopedSimdLevel forced(level);
    const auto read = decode<V>(message, range);
    TELEGRAD_CHECK(level == SimdLevel::portable || read.ok() == accepted);
    accepted = read.ok();
    if (accepted) check_sound(read.view());
  }
  return accepted;
}

}  // namespace

bool read_sparse_message(ConstBytes input) {
  Recipe recipe;
  if (input.size() < sizeof recipe) return false;
  std::memcpy(&recipe, input.data(), sizeof recipe);
  const ConstBytes rest = input.subspan(sizeof recipe);
  const std::uint64_t end = std::min<std::uint64_t>(std::uint64_t{recipe.begin} + recipe.range_size, kDimensionMost);
  const IndexRange range{std::min<std::uint64_t>(recipe.begin, end), end};
  constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
  const DType dtype = kDTypes[recipe.dtype % 4];

  std::size_t size = rest.size();
  StreamHeader header;
  if (recipe.mode % 4 != 0) {
    const auto nnz = std::min<std::uint64_t>(recipe.nnz, std::min<std::uint64_t>(range.size(), 8192));
    header = {.dtype = dtype,
              .index_format = static_cast<IndexFormat>(recipe.mode % 4),
              .begin = static_cast<std::uint32_t>(range.begin),
              .end = static_cast<std::uint32_t>(range.end),
              .index_bytes = rest.size(),
              .nnz = static_cast<std::uint32_t>(nnz)};
    size = sizeof header + (rest.size() + 7) / 8 * 8 + (size_of(dtype) * static_cast<std::size_t>(nnz) + 7) / 8 * 8;
  }
  Message message(size);
  const Bytes bytes = message.bytes();
  const std::size_t skipped = size == rest.size() ? 0 : sizeof header;
  if (skipped != 0) std::memcpy(bytes.data(), &header, sizeof header);
  if (!rest.empty()) std::memcpy(bytes.data() + skipped, rest.data(), rest.size());
  switch (recipe.dtype % 4) {
    case 0: return read_at_every_level<float>(bytes, range);
    case 1: return read_at_every_level<double>(bytes, range);
    case 2: return read_at_every_level<bf16>(bytes, range);
    default: return read_at_every_level<f16>(bytes, range);
  }
}

}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::read_sparse_message(std::as_bytes(std::span(data, size)));
  return 0;
}
