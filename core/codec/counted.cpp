#include "codec/counted.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "base/random.hpp"

namespace telegrad {
namespace {

using View = SparseView<CountedF32>;

double unit(std::uint64_t word) { return static_cast<double>(mix(word) >> 11) * 0x1p-53; }

// How many of `count` entries in a range of `size` indices lie below its `place`-th one. Each entry has a part of the
// range for itself, in which its place depends on the seed: so counts of slices vary from rank to rank as they do for
// real entries, and still add up. Products fit: a range has fewer than 2^32 indices.
std::uint64_t below(std::uint64_t place, std::uint64_t size, std::uint64_t count, std::uint64_t seed) {
  if (size == 0) return 0;
  const std::uint64_t whole = count * place / size;
  const double rest = static_cast<double>(count * place % size) / static_cast<double>(size);
  const double entry = seed == 0 ? 0.5 : unit(seed + whole);
  return whole + (entry < rest ? 1 : 0);
}

// `expected` to one of the integers beside it, so that many slices together have as many as expected.
std::uint64_t rounded(double expected, std::uint64_t place) {
  return static_cast<std::uint64_t>(expected + unit(place + 1));
}

// The entries of a sum: own ones are independent, so an index is missing in all with the product of the probabilities.
EntryCounts united(std::span<const View> pieces) {
  const IndexRange range = pieces[0].range;
  EntryCounts sum;
  for (const View& piece : pieces) sum.common = std::max(sum.common, piece.entries.common);
  const auto places = static_cast<double>(range.size() - std::min(range.size(), sum.common));
  double missing = 1.0;
  std::size_t with_own = 0;
  for (const View& piece : pieces) {
    if (piece.entries.own == 0) continue;
    missing *= 1.0 - std::min(1.0, static_cast<double>(piece.entries.own) / places);
    ++with_own;
    sum.own += piece.entries.own;
  }
  if (with_own > 1) sum.own = rounded(places * (1.0 - missing), range.begin);
  return sum;
}

VectorHeader counted_header(const View& view, WireFormat format) {
  return expected_header(view.range, view.dense, view.nnz(), DType::f32, format);
}

}  // namespace

View View::slice(IndexRange within) const {
  TELEGRAD_CHECK(range.begin <= within.begin && within.begin <= within.end && within.end <= range.end);
  if (dense) return {within, true, {}};
  const auto between = [&](std::uint64_t count, std::uint64_t seed) {
    return below(within.end - range.begin, range.size(), count, seed) -
           below(within.begin - range.begin, range.size(), count, seed);
  };
  return {within, false, {.common = between(entries.common, 0), .own = between(entries.own, entries.seed)}};
}

SparseVector<CountedF32>::SparseVector(std::uint64_t dimension, bool dense, EntryCounts entries)
    : dimension_(dimension), dense_(dense), entries_(entries) {
  validate_entries(dimension, {}, 0);
  if (entries.common <= dimension && entries.own <= dimension - entries.common) return;
  throw std::invalid_argument("there are " + std::to_string(entries.common) + " common and " +
                              std::to_string(entries.own) + " own entries in a vector of " +
                              std::to_string(dimension) + " elements: an element has one entry at most");
}

template <>
std::size_t bytes_of(const View& view) {
  return view.nnz() * (view.dense ? sizeof(float) : sizeof(std::uint32_t) + sizeof(float));
}

template <>
OwnedSlice<CountedF32> dense_slice(const View& view, Reduction) {
  return {view.range, true, {}};
}

template <>
void scale(OwnedSlice<CountedF32>&, double) {}

template <>
OwnedSlice<CountedF32> reduce_slices(std::span<const View> pieces, Reduction reduction, double delta) {
  TELEGRAD_CHECK(!pieces.empty());
  bool dense = false;
  for (const View& piece : pieces) {
    TELEGRAD_CHECK(piece.range == pieces[0].range);
    dense = dense || piece.dense || static_cast<double>(piece.nnz()) > delta;
  }
  if (dense) return dense_slice(pieces[0], reduction);
  OwnedSlice<CountedF32> sum{pieces[0].range, false, united(pieces)};
  return static_cast<double>(sum.view().nnz()) > delta ? dense_slice(sum.view(), reduction) : sum;
}

template <>
SparseVector<CountedF32> whole_vector(OwnedSlice<CountedF32> slice, Reduction, double delta) {
  TELEGRAD_CHECK(slice.range.begin == 0);
  const bool dense = slice.dense || static_cast<double>(slice.view().nnz()) > delta;
  return dense ? SparseVector<CountedF32>::dense(slice.range.end)
               : SparseVector<CountedF32>::sparse(slice.range.end, slice.entries);
}

template <>
SparseVector<CountedF32> sparse_vector(std::uint64_t dimension, OwnedSlice<CountedF32> slice, Reduction) {
  TELEGRAD_CHECK(slice.range.end <= dimension);
  const EntryCounts entries = slice.dense ? EntryCounts{.own = slice.range.size()} : slice.entries;
  return SparseVector<CountedF32>::sparse(dimension, entries);
}

SliceReduction<CountedF32>::SliceReduction(std::vector<View> pieces, Reduction reduction, double delta)
    : pieces_(std::move(pieces)), reduction_(reduction), delta_(delta), done_(pieces_.at(0).range.begin) {}

std::size_t SliceReduction<CountedF32>::bytes_in(IndexRange part) const {
  std::size_t bytes = 0;
  for (const View& piece : pieces_) bytes += bytes_of(piece.slice(part));
  return bytes;
}

std::size_t SliceReduction<CountedF32>::advance(std::uint64_t end) {
  return bytes_in({std::exchange(done_, end), end});
}

template <>
std::size_t encoded_size(const View& view, WireFormat format) {
  return encoded_size(counted_header(view, format));
}

template <>
Buffer encode(const View& view, WireFormat format, std::span<CountedF32>) {
  const VectorHeader header = counted_header(view, format);
  Buffer message(encoded_size(header));
  std::memcpy(message.data(), &header, sizeof header);
  static_assert(sizeof header + sizeof(std::uint64_t) <= Buffer::kHeadBytes);
  if (!view.dense && header.nnz > 0) {  // an entry alone takes 16 bytes
    const std::uint64_t common = std::min<std::uint64_t>(view.entries.common, header.nnz);
    std::memcpy(message.data() + sizeof header, &common, sizeof common);
  }
  return message;
}

template <>
Decoded<CountedF32> decode(ConstBytes bytes, IndexRange expected) {
  TELEGRAD_CHECK(expected.begin <= expected.end && expected.end <= kDimensionMost);
  const auto damaged = [](const std::string& what) {
    return Decoded<CountedF32>(kDamagedVector + what);
  };
  VectorHeader header;
  if (const std::string error = read_header(bytes, DType::f32, expected, header); !error.empty()) return damaged(error);
  if (header.kind == VectorKind::dense) return {View{expected, true, {}}, {}};
  std::uint64_t common = 0;
  if (header.nnz > 0) std::memcpy(&common, bytes.data() + sizeof header, sizeof common);
  if (common > header.nnz) {
    return damaged(std::to_string(common) + " of its " + std::to_string(header.nnz) + " entries are common ones");
  }
  return {View{expected, false, {.common = common, .own = header.nnz - common}}, {}};
}

}  // namespace telegrad
