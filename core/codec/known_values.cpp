#include "codec/known_values.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.hpp"
#include "base/copy.hpp"
#include "codec/left_out.hpp"
#include "codec/pack_values.hpp"
#include "codec/value_section.hpp"
#include "kernels/marks.hpp"
#include "kernels/scale.hpp"

namespace telegrad {
namespace {

constexpr std::size_t kWordBytes = sizeof(std::uint64_t);

// What one value takes of a message, at least: packed, its exponent may take next to nothing.
template <class V>
constexpr std::size_t kValueBytes = sizeof(V) - (kernels::packs_values(dtype_of<V>) ? 1 : 0);

// What a message has besides one that leaves nothing out: marks, and the header of the values.
std::size_t added_bytes(std::size_t given) { return kernels::mark_words(given) * kWordBytes + sizeof(VectorHeader); }

// The given entries as they are in the sum if nobody has added to them.
template <class V>
class Scaled {
 public:
  explicit Scaled(const GivenEntries<V>& given) : entries_(given.entries.entries()) {
    if (given.factor == 1.0) return;
    values_ = Array<V>(entries_.size());
    std::ranges::copy(entries_.values, values_.begin());
    kernels::scale(dtype_of<V>, std::as_writable_bytes(values_.span()), given.factor);
    entries_.values = values_.span();
  }
  const kernels::Entries<V>& entries() const { return entries_; }

 private:
  kernels::Entries<V> entries_;
  Array<V> values_;
};

// What follows the indices.
struct Rest {
  ConstBytes marks;
  ConstBytes values;
};

std::string split_rest(ConstBytes message, const VectorHeader& header, std::size_t given, Rest& rest) {
  const ConstBytes behind = message.subspan(encoded_size(header));
  const std::size_t marks = kernels::mark_words(given) * kWordBytes;
  if (behind.size() < marks) return "it has no room for the marks of " + std::to_string(given) + " entries";
  rest = {behind.first(marks), behind.subspan(marks)};
  return {};
}

// What is wrong behind a header that is checked, or nothing.
template <class V>
std::string read_sum(ConstBytes message, const VectorHeader& header, IndexRange expected, const GivenEntries<V>& given,
                     std::span<std::uint32_t> indices, std::span<V> values) {
  if (std::string error = read_indices(message, header, expected, indices); !error.empty()) return error;
  if (given.entries.dense) return "it leaves values out that this rank gave densely";
  const Scaled<V> scaled(given);
  Rest rest;
  if (std::string error = split_rest(message, header, scaled.entries().size(), rest); !error.empty()) return error;
  const std::span known(reinterpret_cast<const std::uint64_t*>(rest.marks.data()), rest.marks.size() / kWordBytes);
  const std::size_t left_out = kernels::count_known(known, scaled.entries().size());
  if (left_out > indices.size()) return "it leaves out more values than there are";
  const Decoded<V> others = decode<V>(rest.values, {0, indices.size() - left_out});
  if (!others.ok()) return others.error();
  if (!others.view().dense) return "the values that it does not leave out are sparse";
  if (kernels::put_back(indices, scaled.entries(), known, others.view().values, values)) return {};
  return "its indices are not those of a sum of this rank's entries";
}

std::string damaged(const std::string& error) { return error.empty() ? error : kDamagedVector + error; }

}  // namespace

bool leaves_values_out(ConstBytes message) { return claimed_header(message).kind == VectorKind::indices; }

template <class V>
SumMessages<V>::SumMessages(const SparseView<V>& sum, const WireFormat& format, Array<std::uint8_t> givers)
    : sum_(sum), format_(format), givers_(std::move(givers)) {
  TELEGRAD_CHECK(!sum.dense && format.values == ValueEncoding::native);
}

template <class V>
ConstBytes SumMessages<V>::whole() {
  if (whole_.empty()) whole_ = encode(sum_, format_);
  return whole_.bytes();
}

template <class V>
std::size_t SumMessages<V>::leave_out(Rank receiver, const GivenEntries<V>& given, std::span<std::uint64_t> known,
                                      std::span<V> rest) const {
  if (!givers_.empty()) {
    return kernels::leave_out_of(sum_.values, std::span<const std::uint8_t>(givers_.span()), receiver, given.entries.nnz(),
                                 known, rest);
  }
  const Scaled<V> scaled(given);
  return kernels::leave_out(sum_.entries(), scaled.entries(), known, rest);
}

template <class V>
ConstBytes SumMessages<V>::to(Rank receiver, const GivenEntries<V>& given, Buffer& own) {
  const std::size_t entries = given.entries.nnz();
  if (given.entries.dense || entries * kValueBytes<V> <= added_bytes(entries)) return whole();
  const Array<std::uint64_t> known(kernels::mark_words(entries));
  const Array<V> rest(sum_.nnz());
  const std::size_t left = leave_out(receiver, given, known.span(), rest.span());
  if ((sum_.nnz() - left) * kValueBytes<V> <= added_bytes(entries)) return whole();
  if (indices_.empty()) indices_ = encode_indices(sum_, format_);
  const SparseView<V> values{.range = {0, left}, .dense = true, .indices = {}, .values = rest.span().first(left)};
  own = encode_behind(indices_.size() + known.span().size_bytes(), values, format_);
  copy_bytes(own.data(), indices_.data(), indices_.size());
  copy_bytes(own.data() + indices_.size(), known.data(), known.span().size_bytes());
  return own.bytes();
}

template <class V>
Decoded<V> decode_beside(ConstBytes message, IndexRange expected, const GivenEntries<V>& given) {
  VectorHeader header;
  std::string error = read_indices_header(message, dtype_of<V>, expected, header);
  if (!error.empty()) return Decoded<V>(damaged(error));
  Array<std::uint32_t> indices(header.nnz);
  Array<V> values(header.nnz);
  error = read_sum<V>(message, header, expected, given, indices.span(), values.span());
  if (!error.empty()) return Decoded<V>(damaged(error));
  const SparseView<V> view{.range = expected, .dense = false, .indices = indices.span(), .values = values.span()};
  return Decoded<V>(view, std::move(indices), std::move(values));
}

template <class V>
std::string decode_beside_into(ConstBytes message, IndexRange expected, const GivenEntries<V>& given,
                               std::span<std::uint32_t> indices, std::span<V> values) {
  VectorHeader header;
  std::string error = read_indices_header(message, dtype_of<V>, expected, header);
  if (error.empty() && header.nnz != indices.size()) {
    error = "it does not hold the " + std::to_string(indices.size()) + " entries that were announced";
  }
  if (error.empty()) error = read_sum<V>(message, header, expected, given, indices, values);
  return damaged(error);
}

#define TELEGRAD_INSTANTIATE(V)                                                                  \
  template class SumMessages<V>;                                                                 \
  template Decoded<V> decode_beside(ConstBytes, IndexRange, const GivenEntries<V>&);             \
  template std::string decode_beside_into(ConstBytes, IndexRange, const GivenEntries<V>&,        \
                                          std::span<std::uint32_t>, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

namespace {

// How many of the given entries no other rank has, to be expected: independent ones are missing in a sum with the product
// of the probabilities.
std::uint64_t alone(const SparseView<CountedF32>& sum, const SparseView<CountedF32>& given) {
  const auto places = static_cast<double>(sum.range.size() - std::min(sum.range.size(), sum.entries.common));
  const auto own = static_cast<double>(given.entries.own);
  if (own >= places) return 0;
  const double missing = std::max(0.0, 1.0 - static_cast<double>(sum.entries.own) / places);
  return static_cast<std::uint64_t>(std::min(own, own * missing / (1.0 - own / places)));
}

std::size_t counted_values_bytes(std::uint64_t count, const WireFormat& format) {
  const IndexRange range{0, count};
  const VectorHeader plain = vector_header(range, true, count, DType::f32);
  return encoded_size(vector_header(range, true, count, DType::f32, {.packs_values = format.packs_values},
                                    {.values = packed_value_bytes_expected(plain)}));
}

}  // namespace

ConstBytes SumMessages<CountedF32>::whole() {
  if (whole_.empty()) whole_ = encode(sum_, format_);
  return whole_.bytes();
}

ConstBytes SumMessages<CountedF32>::to(Rank, const GivenEntries<CountedF32>& given, Buffer& own) {
  if (given.entries.dense) return whole();
  const std::uint64_t nnz = sum_.nnz();
  const std::uint64_t left_out = std::min(alone(sum_, given.entries), nnz);
  if (left_out * sizeof(float) <= added_bytes(given.entries.nnz())) return whole();
  VectorHeader header = expected_header(sum_.range, false, nnz, DType::f32, {.indices = format_.indices});
  header.kind = VectorKind::indices;
  own = Buffer(encoded_size(header) + kernels::mark_words(given.entries.nnz()) * kWordBytes +
               counted_values_bytes(nnz - left_out, format_));
  const std::uint64_t common = std::min<std::uint64_t>(sum_.entries.common, nnz);
  // Of the first of several pieces, so many bytes of the head are the message's length.
  static_assert(sizeof header + 2 * sizeof common <= Buffer::kHeadBytes);
  std::memcpy(own.data(), &header, sizeof header);
  std::memcpy(own.data() + sizeof header, &common, sizeof common);
  return own.bytes();
}

template <>
Decoded<CountedF32> decode_beside(ConstBytes message, IndexRange expected, const GivenEntries<CountedF32>&) {
  VectorHeader header;
  if (const std::string error = read_indices_header(message, DType::f32, expected, header); !error.empty()) {
    return Decoded<CountedF32>(damaged(error));
  }
  std::uint64_t common = 0;
  if (message.size() < sizeof header + sizeof common) return Decoded<CountedF32>(damaged("it has no count"));
  std::memcpy(&common, message.data() + sizeof header, sizeof common);
  if (common > header.nnz) {
    return Decoded<CountedF32>(damaged(std::to_string(common) + " of its " + std::to_string(header.nnz) +
                                       " entries are common ones"));
  }
  return {SparseView<CountedF32>{expected, false, {.common = common, .own = header.nnz - common}}, {}};
}

}  // namespace telegrad
