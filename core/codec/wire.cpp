#include "codec/wire.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/copy.hpp"
#include "codec/encode_values.hpp"
#include "codec/pack_indices.hpp"
#include "codec/value_section.hpp"
#include "kernels/scan.hpp"

namespace telegrad {
namespace {

constexpr std::uint64_t kBlock = 65536;

constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }
constexpr std::uint64_t blocks_of(std::uint64_t range_size) { return (range_size + kBlock - 1) / kBlock; }

// Bytes of an index section whose length follows from the counts.
std::uint64_t fixed_index_bytes(IndexFormat format, std::uint64_t range_size, std::uint64_t nnz) {
  switch (format) {
    case IndexFormat::raw32: return 4 * nnz;
    case IndexFormat::blocked16: return padded(4 * blocks_of(range_size)) + 2 * nnz;
    case IndexFormat::none:
    case IndexFormat::packed: break;
  }
  return 0;
}

// Where the sections of a message begin. Sizes are those of counts below 2^32: no sum here overflows.
struct Layout {
  std::uint64_t indices = sizeof(VectorHeader);
  std::uint64_t values = 0;
  std::uint64_t end = 0;

  explicit Layout(const VectorHeader& header)
      : values(indices + padded(header.index_bytes)),
        end(values + padded(value_bytes(header))) {}
};

// A message before it is written.
template <class V>
struct Draft {
  VectorHeader header;
  kernels::IndexPlan indices;  // if they may be packed
  ValueDraft<V> values;
};

template <class V>
Draft<V> draft_of(const SparseView<V>& view, WireFormat format, std::span<V> error) {
  TELEGRAD_CHECK(error.empty() || error.size() == view.nnz());
  if constexpr (std::is_same_v<V, float>) {
    if (!view.dense && !kernels::encodes(format.values, view.values)) format.values = ValueEncoding::native;
  }
  kernels::IndexPlan indices;
  if (!view.dense && format.indices == IndexFormat::packed) indices = kernels::plan_indices(view.indices);
  VectorHeader header =
      vector_header(view.range, view.dense, view.nnz(), dtype_of<V>, format, {.indices = indices.bytes});
  ValueDraft<V> values(view.values, header, format.packs_values, error);
  choose_packing(header, values.packed_bytes());
  return {header, std::move(indices), std::move(values)};
}

// Writes a section and zeroes its padding.
void put(Bytes out, std::uint64_t begin, std::uint64_t end, ConstBytes section) {
  copy_bytes(out.data() + begin, section.data(), section.size());
  if (begin + section.size() < end) std::memset(out.data() + begin + section.size(), 0, end - begin - section.size());
}

template <class V>
void put_blocked(const SparseView<V>& view, Bytes section) {
  const std::uint64_t blocks = blocks_of(view.range.size());
  const std::uint64_t counts_end = padded(4 * blocks);
  auto* const counts = reinterpret_cast<std::uint32_t*>(section.data());
  auto* const lows = reinterpret_cast<std::uint16_t*>(section.data() + counts_end);
  const auto first = static_cast<std::uint32_t>(view.range.begin);
  auto at = view.indices.begin();
  for (std::uint64_t block = 0; block < blocks; ++block) {
    const auto next = std::lower_bound(at, view.indices.end(), view.range.begin + (block + 1) * kBlock);
    counts[block] = static_cast<std::uint32_t>(next - at);
    at = next;
  }
  for (std::size_t i = 0; i < view.nnz(); ++i) lows[i] = static_cast<std::uint16_t>(view.indices[i] - first);
  put(section, 4 * blocks, counts_end, {});
}

std::string text(std::uint64_t number) { return std::to_string(number); }

// Nobody makes room for indices that so many bytes cannot hold, or reads more bytes than their raw form has.
std::string index_bytes_error(const VectorHeader& header, std::uint64_t range_size) {
  const std::uint64_t bytes = header.index_bytes;
  const bool packed = header.index_format == IndexFormat::packed;
  const std::uint64_t raw = fixed_index_bytes(IndexFormat::raw32, range_size, header.nnz);
  const std::uint64_t fixed = fixed_index_bytes(header.index_format, range_size, header.nnz);
  const bool right = packed ? bytes <= raw && bytes >= kernels::packed_size_least(header.nnz) : bytes == fixed;
  return right ? "" : text(header.nnz) + " indices cannot take " + text(bytes) + " bytes";
}

// What is wrong with a header, or nothing. `alone`: no values follow the indices.
std::string header_error(const VectorHeader& header, DType dtype, IndexRange expected, bool alone = false) {
  constexpr std::uint32_t kMagicMask = 0xffffffU;
  if ((header.magic & kMagicMask) != kVectorMagic) return "magic is " + text(header.magic) + ", not that of a sparse vector";
  if (header.magic >> 24 != kVectorVersion) {
    return "version is " + text(header.magic >> 24) + ", expected " + text(kVectorVersion);
  }
  if (alone ? header.kind != VectorKind::indices
            : header.kind != VectorKind::sparse && header.kind != VectorKind::dense) {
    return "kind is " + text(static_cast<std::uint64_t>(header.kind)) + ", " +
           (alone ? "not that of indices alone" : "neither sparse nor dense");
  }
  if (header.dtype != dtype) {
    return "dtype is " + text(static_cast<std::uint64_t>(header.dtype)) + ", expected " +
           text(static_cast<std::uint64_t>(dtype));
  }
  if (IndexRange{header.begin, header.end} != expected) {
    return "range is " + text(header.begin) + " to " + text(header.end) + ", expected " + text(expected.begin) +
           " to " + text(expected.end);
  }
  const bool sparse = header.kind != VectorKind::dense;
  const IndexFormat format = header.index_format;
  const bool known = sparse ? format >= IndexFormat::raw32 && format <= IndexFormat::packed
                            : format == IndexFormat::none;
  if (!known) return "index format is " + text(static_cast<std::uint64_t>(format)) + ", unknown for its kind";
  if (sparse ? header.nnz > expected.size() : header.nnz != expected.size()) {
    return "nnz is " + text(header.nnz) + " in a range of " + text(expected.size());
  }
  if (alone && (header.value_encoding != ValueEncoding::native || header.packed_value_words != 0)) {
    return "it says how its values are encoded, but has none";
  }
  if (header.value_encoding > (dtype == DType::f32 ? kLastValueEncoding : ValueEncoding::native) ||
      (!sparse && header.value_encoding == ValueEncoding::mean)) {
    return "value encoding is " + text(static_cast<std::uint64_t>(header.value_encoding)) + ", unknown for its dtype";
  }
  if (std::string error = value_bytes_error(header); !error.empty()) return error;
  return index_bytes_error(header, expected.size());
}

std::string begins_with_header(ConstBytes message, DType dtype, IndexRange expected, bool alone, VectorHeader& header) {
  if (reinterpret_cast<std::uintptr_t>(message.data()) % 8 != 0) return "it starts at no multiple of 8 bytes";
  if (message.size() < sizeof header) return "it has " + text(message.size()) + " bytes, fewer than its header";
  std::memcpy(&header, message.data(), sizeof header);
  return header_error(header, dtype, expected, alone);
}

// Indices from a section of block counts and low halves. Returns false where the counts do not add up to the entries.
bool widen(ConstBytes section, IndexRange range, std::span<std::uint32_t> indices) {
  const auto blocks = static_cast<std::size_t>(blocks_of(range.size()));
  const auto* const counts = reinterpret_cast<const std::uint32_t*>(section.data());
  const auto* const lows = reinterpret_cast<const std::uint16_t*>(section.data() + padded(4 * blocks));
  std::size_t at = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    if (counts[block] > indices.size() - at) return false;
    const auto first = static_cast<std::uint32_t>(range.begin + block * kBlock);
    const std::size_t end = at + counts[block];
    for (; at < end; ++at) indices[at] = first + lows[at];
  }
  return at == indices.size();
}

ConstBytes values_of(ConstBytes message, const VectorHeader& header) {
  return message.subspan(Layout(header).values, value_bytes(header));
}

// Like read_values(): what is wrong with the indices, or nothing; does not look at their order.
std::string read_index_section(ConstBytes message, const VectorHeader& header, IndexRange range,
                               std::span<std::uint32_t> indices) {
  const ConstBytes section = message.subspan(Layout(header).indices, header.index_bytes);
  switch (header.index_format) {
    case IndexFormat::none: break;
    case IndexFormat::raw32:
      copy_bytes(indices.data(), section.data(), section.size());
      break;
    case IndexFormat::blocked16:
      if (widen(section, range, indices)) break;
      return "its block counts do not add up to its " + text(header.nnz) + " entries";
    case IndexFormat::packed:
      if (kernels::unpack_indices(section, indices)) break;
      return "its packed indices are none";
  }
  return {};
}

std::string ends_error(IndexRange expected, std::span<const std::uint32_t> indices) {
  if (indices.empty() || (indices.front() >= expected.begin && indices.back() < expected.end)) return {};
  return "its indices go from " + text(indices.front()) + " to " + text(indices.back()) + ", outside its range";
}

std::string index_error(const VectorHeader& header, IndexRange expected, std::span<const std::uint32_t> indices) {
  // Unpacking has looked at the order.
  return header.index_format == IndexFormat::packed ? ends_error(expected, indices) : indices_error(expected, indices);
}

// The header and the indices. `plan`: of these, where they are packed.
template <class V>
void write_indices(const SparseView<V>& view, const VectorHeader& header, const kernels::IndexPlan& plan, Bytes out) {
  const Layout layout(header);
  TELEGRAD_CHECK(out.size() == layout.end && reinterpret_cast<std::uintptr_t>(out.data()) % 8 == 0);
  TELEGRAD_CHECK(view.dense ? view.nnz() == view.range.size() : view.indices.size() == view.nnz());
  put(out, 0, layout.indices, std::as_bytes(std::span(&header, 1)));
  const Bytes section = out.subspan(layout.indices, layout.values - layout.indices);
  switch (header.index_format) {
    case IndexFormat::none: break;
    case IndexFormat::raw32: put(section, 0, 0, std::as_bytes(view.indices)); break;
    case IndexFormat::blocked16: put_blocked(view, section); break;
    case IndexFormat::packed:
      TELEGRAD_CHECK(plan.bytes == header.index_bytes);
      kernels::pack_indices(plan, view.indices, section.first(header.index_bytes));
      break;
  }
  put(section, header.index_bytes, section.size(), {});
}

template <class V>
void write_message(const SparseView<V>& view, const Draft<V>& draft, Bytes out, const WireFormat& format) {
  write_indices(view, draft.header, draft.indices, out);
  const std::uint64_t first = view.dense || view.indices.empty() ? view.range.begin : view.indices.front();
  draft.values.write(draft.header, format.key, first, out.subspan(Layout(draft.header).values));
}

}  // namespace

const char* name_of(IndexFormat format) {
  switch (format) {
    case IndexFormat::none: return "none";
    case IndexFormat::raw32: return "raw32";
    case IndexFormat::blocked16: return "blocked16";
    case IndexFormat::packed: return "packed";
  }
  return "unknown";
}

IndexFormat smaller_index_format(std::uint64_t range_size, std::uint64_t nnz) {
  const auto section = [&](IndexFormat format) { return padded(fixed_index_bytes(format, range_size, nnz)); };
  return section(IndexFormat::blocked16) < section(IndexFormat::raw32) ? IndexFormat::blocked16 : IndexFormat::raw32;
}

VectorHeader vector_header(IndexRange range, bool dense, std::uint64_t nnz, DType dtype, WireFormat format,
                           PackedBytes packed) {
  VectorHeader header{.kind = dense ? VectorKind::dense : VectorKind::sparse,
                      .dtype = dtype,
                      .value_encoding = format.values,
                      .begin = static_cast<std::uint32_t>(range.begin),
                      .end = static_cast<std::uint32_t>(range.end),
                      .nnz = static_cast<std::uint32_t>(nnz)};
  if (dense && format.values == ValueEncoding::mean) header.value_encoding = ValueEncoding::native;
  if (format.packs_values) choose_packing(header, packed.values);
  if (dense) return header;
  const bool raw = format.indices == IndexFormat::raw32;
  header.index_format = raw ? IndexFormat::raw32 : smaller_index_format(range.size(), nnz);
  header.index_bytes = fixed_index_bytes(header.index_format, range.size(), nnz);
  if (format.indices == IndexFormat::packed && padded(packed.indices) < padded(header.index_bytes)) {
    header.index_format = IndexFormat::packed;
    header.index_bytes = packed.indices;
  }
  return header;
}

VectorHeader expected_header(IndexRange range, bool dense, std::uint64_t nnz, DType dtype, WireFormat format) {
  PackedBytes packed;
  if (!dense) {
    if (format.indices == IndexFormat::packed) packed.indices = kernels::packed_size_expected(range.size(), nnz);
    packed.values = packed_value_bytes_expected(vector_header(range, dense, nnz, dtype, {.values = format.values}));
  }
  return vector_header(range, dense, nnz, dtype, format, packed);
}

std::size_t encoded_size(const VectorHeader& header) { return static_cast<std::size_t>(Layout(header).end); }

VectorHeader claimed_header(ConstBytes message) {
  VectorHeader header{};
  if (message.size() < sizeof header) return header;
  std::memcpy(&header, message.data(), sizeof header);
  return header;
}

std::string read_header(ConstBytes message, DType dtype, IndexRange expected, VectorHeader& header) {
  if (std::string error = begins_with_header(message, dtype, expected, false, header); !error.empty()) return error;
  if (message.size() == encoded_size(header)) return {};
  return "it has " + text(message.size()) + " bytes, its header says " + text(encoded_size(header));
}

std::string read_indices_header(ConstBytes message, DType dtype, IndexRange expected, VectorHeader& header) {
  if (std::string error = begins_with_header(message, dtype, expected, true, header); !error.empty()) return error;
  if (message.size() >= encoded_size(header)) return {};
  return "it has " + text(message.size()) + " bytes, its indices alone " + text(encoded_size(header));
}

std::string read_indices(ConstBytes message, const VectorHeader& header, IndexRange expected,
                         std::span<std::uint32_t> indices) {
  TELEGRAD_CHECK(indices.size() == header.nnz);
  const std::string error = read_index_section(message, header, expected, indices);
  return error.empty() ? index_error(header, expected, indices) : error;
}

template <class V>
VectorHeader plain_header(const SparseView<V>& view) {
  return vector_header(view.range, view.dense, view.nnz(), dtype_of<V>, {.indices = IndexFormat::raw32});
}

std::string section_header_error(ConstBytes message, DType dtype, IndexRange expected) {
  if (message.size() != sizeof(VectorHeader)) return "it has " + text(message.size()) + " bytes, not those of a header";
  const VectorHeader header = claimed_header(message);
  if (std::string error = header_error(header, dtype, expected); !error.empty()) return error;
  const bool sparse = header.kind == VectorKind::sparse;
  const bool plain = header.index_format == (sparse ? IndexFormat::raw32 : IndexFormat::none) &&
                     header.value_encoding == ValueEncoding::native && header.packed_value_words == 0;
  return plain ? "" : "its sections come by themselves, but are not plain";
}

std::string indices_error(IndexRange expected, std::span<const std::uint32_t> indices) {
  if (!kernels::strictly_increasing(indices)) return "its indices are not strictly increasing";
  return ends_error(expected, indices);
}

MessageSections sections_of(const VectorHeader& header, Bytes message) {
  const Layout layout(header);
  TELEGRAD_CHECK(message.size() == layout.end);
  put(message, 0, layout.indices, std::as_bytes(std::span(&header, 1)));
  put(message, layout.indices + header.index_bytes, layout.values, {});
  put(message, layout.values + value_bytes(header), layout.end, {});
  return {message.subspan(layout.indices, header.index_bytes), message.subspan(layout.values, value_bytes(header))};
}

template <class V>
Buffer encode_indices(const SparseView<V>& view, WireFormat format) {
  TELEGRAD_CHECK(!view.dense);
  kernels::IndexPlan plan;
  if (format.indices == IndexFormat::packed) plan = kernels::plan_indices(view.indices);
  VectorHeader header = vector_header(view.range, false, view.nnz(), dtype_of<V>, {.indices = format.indices},
                                      {.indices = plan.bytes});
  header.kind = VectorKind::indices;
  Buffer out(encoded_size(header));
  write_indices(view, header, plan, out.bytes());
  return out;
}

template <class V>
std::size_t encoded_size(const SparseView<V>& view, WireFormat format) {
  return encoded_size(draft_of(view, format, std::span<V>()).header);
}

template <class V>
void encode_into(const SparseView<V>& view, Bytes out, WireFormat format, std::span<V> error) {
  write_message(view, draft_of(view, format, error), out, format);
}

template <class V>
Buffer encode(const SparseView<V>& view, WireFormat format, std::span<V> error) {
  return encode_behind(0, view, format, error);
}

template <class V>
Buffer encode_behind(std::size_t room, const SparseView<V>& view, WireFormat format, std::span<V> error) {
  const Draft<V> draft = draft_of(view, format, error);
  Buffer out(room + encoded_size(draft.header));
  write_message(view, draft, out.bytes().subspan(room), format);
  return out;
}

template <class V>
Decoded<V> decode(ConstBytes bytes, IndexRange expected) {
  TELEGRAD_CHECK(expected.begin <= expected.end && expected.end <= kDimensionMost);
  const auto damaged = [](const std::string& what) { return Decoded<V>(kDamagedVector + what); };
  VectorHeader header;
  if (const std::string error = read_header(bytes, dtype_of<V>, expected, header); !error.empty()) return damaged(error);
  const Layout layout(header);
  const auto nnz = static_cast<std::size_t>(header.nnz);
  SparseView<V> view{.range = expected, .dense = header.kind == VectorKind::dense, .indices = {}, .values = {}};

  Array<V> values;
  if (header.value_encoding == ValueEncoding::native && header.packed_value_words == 0) {
    view.values = {reinterpret_cast<const V*>(bytes.data() + layout.values), nnz};
  } else {
    values = Array<V>(nnz);
    const std::string error = read_values(values_of(bytes, header), header, values.span());
    if (!error.empty()) return damaged(error);
    view.values = values.span();
  }
  if (view.dense) return {view, {}, std::move(values)};

  Array<std::uint32_t> indices;
  if (header.index_format == IndexFormat::raw32) {
    view.indices = {reinterpret_cast<const std::uint32_t*>(bytes.data() + layout.indices), nnz};
  } else {
    indices = Array<std::uint32_t>(nnz);
    const std::string error = read_index_section(bytes, header, expected, indices.span());
    if (!error.empty()) return damaged(error);
    view.indices = indices.span();
  }
  if (const std::string error = index_error(header, expected, view.indices); !error.empty()) return damaged(error);
  return {view, std::move(indices), std::move(values)};
}

template <class V>
std::string decode_into(ConstBytes bytes, IndexRange expected, std::span<std::uint32_t> indices, std::span<V> values) {
  TELEGRAD_CHECK(expected.begin <= expected.end && expected.end <= kDimensionMost && indices.size() == values.size());
  VectorHeader header;
  std::string error = read_header(bytes, dtype_of<V>, expected, header);
  if (error.empty() && (header.kind == VectorKind::dense || header.nnz != indices.size())) {
    error = "it does not hold the " + text(indices.size()) + " entries that were announced";
  }
  if (error.empty()) error = read_values(values_of(bytes, header), header, values);
  if (error.empty()) error = read_indices(bytes, header, expected, indices);
  return error.empty() ? error : kDamagedVector + error;
}

#define TELEGRAD_INSTANTIATE(V)                                              \
  template VectorHeader plain_header(const SparseView<V>&);                  \
  template Buffer encode_indices(const SparseView<V>&, WireFormat);          \
  template std::size_t encoded_size(const SparseView<V>&, WireFormat);       \
  template void encode_into(const SparseView<V>&, Bytes, WireFormat, std::span<V>); \
  template Buffer encode(const SparseView<V>&, WireFormat, std::span<V>);           \
  template Buffer encode_behind(std::size_t, const SparseView<V>&, WireFormat, std::span<V>); \
  template Decoded<V> decode(ConstBytes, IndexRange);                               \
  template std::string decode_into(ConstBytes, IndexRange, std::span<std::uint32_t>, std::span<V>);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
