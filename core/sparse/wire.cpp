#include "sparse/wire.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/scan.hpp"

namespace telegrad {
namespace {

constexpr std::uint64_t kBlock = 65536;

constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }
constexpr std::uint64_t blocks_of(std::uint64_t range_size) { return (range_size + kBlock - 1) / kBlock; }

// Where the sections of a message begin. Sizes are those of counts below 2^32: no sum here overflows.
struct Layout {
  std::uint64_t counts = sizeof(StreamHeader);  // of blocked16; empty otherwise
  std::uint64_t indices = 0;
  std::uint64_t values = 0;
  std::uint64_t end = 0;

  explicit Layout(const StreamHeader& header) {
    const bool blocked = header.index_format == IndexFormat::blocked16;
    indices = counts + (blocked ? padded(4 * blocks_of(header.end - header.begin)) : 0);
    const std::uint64_t index_bytes = blocked ? 2 : header.index_format == IndexFormat::raw32 ? 4 : 0;
    values = indices + padded(index_bytes * header.nnz);
    end = values + padded(size_of(header.dtype) * header.nnz);
  }
};

template <class V>
StreamHeader header_of(const StreamView<V>& view) {
  return stream_header(view.range, view.dense, view.nnz(), dtype_of<V>);
}

// Writes a section and zeroes its padding.
void put(Bytes out, std::uint64_t begin, std::uint64_t end, ConstBytes section) {
  if (!section.empty()) std::memcpy(out.data() + begin, section.data(), section.size());
  if (begin + section.size() < end) std::memset(out.data() + begin + section.size(), 0, end - begin - section.size());
}

template <class V>
void put_blocked(const StreamView<V>& view, const Layout& layout, Bytes out) {
  auto* const counts = reinterpret_cast<std::uint32_t*>(out.data() + layout.counts);
  auto* const lows = reinterpret_cast<std::uint16_t*>(out.data() + layout.indices);
  const std::uint64_t blocks = blocks_of(view.range.size());
  const auto first = static_cast<std::uint32_t>(view.range.begin);
  auto at = view.indices.begin();
  for (std::uint64_t block = 0; block < blocks; ++block) {
    const auto next = std::lower_bound(at, view.indices.end(), view.range.begin + (block + 1) * kBlock);
    counts[block] = static_cast<std::uint32_t>(next - at);
    at = next;
  }
  for (std::size_t i = 0; i < view.nnz(); ++i) lows[i] = static_cast<std::uint16_t>(view.indices[i] - first);
  put(out, layout.counts + 4 * blocks, layout.indices, {});
  put(out, layout.indices + 2 * view.nnz(), layout.values, {});
}

std::string text(std::uint64_t number) { return std::to_string(number); }

// What is wrong with a header, or nothing.
std::string header_error(const StreamHeader& header, DType dtype, IndexRange expected) {
  if (header.magic != kStreamMagic) return "magic is " + text(header.magic) + ", not that of a stream";
  if (header.kind != StreamKind::sparse && header.kind != StreamKind::dense) {
    return "kind is " + text(static_cast<std::uint64_t>(header.kind)) + ", neither sparse nor dense";
  }
  if (header.dtype != dtype) {
    return "dtype is " + text(static_cast<std::uint64_t>(header.dtype)) + ", expected " +
           text(static_cast<std::uint64_t>(dtype));
  }
  if (IndexRange{header.begin, header.end} != expected) {
    return "range is " + text(header.begin) + " to " + text(header.end) + ", expected " + text(expected.begin) +
           " to " + text(expected.end);
  }
  const bool sparse = header.kind == StreamKind::sparse;
  const IndexFormat format = header.index_format;
  const bool known = sparse ? format == IndexFormat::raw32 || format == IndexFormat::blocked16
                            : format == IndexFormat::none;
  if (!known) return "index format is " + text(static_cast<std::uint64_t>(format)) + ", unknown for its kind";
  if (sparse ? header.nnz > expected.size() : header.nnz != expected.size()) {
    return "nnz is " + text(header.nnz) + " in a range of " + text(expected.size());
  }
  return {};
}

// Indices from block counts and low halves. Returns false where the counts do not add up to the entries.
bool widen(std::span<const std::uint32_t> counts, std::span<const std::uint16_t> lows, std::uint64_t range_begin,
           std::span<std::uint32_t> indices) {
  std::size_t at = 0;
  for (std::size_t block = 0; block < counts.size(); ++block) {
    if (counts[block] > lows.size() - at) return false;
    const auto first = static_cast<std::uint32_t>(range_begin + block * kBlock);
    const std::size_t end = at + counts[block];
    for (; at < end; ++at) indices[at] = first + lows[at];
  }
  return at == lows.size();
}

}  // namespace

IndexFormat smaller_index_format(std::uint64_t range_size, std::uint64_t nnz) {
  const std::uint64_t blocked = padded(4 * blocks_of(range_size)) + padded(2 * nnz);
  return blocked < padded(4 * nnz) ? IndexFormat::blocked16 : IndexFormat::raw32;
}

StreamHeader stream_header(IndexRange range, bool dense, std::uint64_t nnz, DType dtype) {
  return {.kind = dense ? StreamKind::dense : StreamKind::sparse,
          .dtype = dtype,
          .index_format = dense ? IndexFormat::none : smaller_index_format(range.size(), nnz),
          .begin = range.begin,
          .end = range.end,
          .nnz = nnz};
}

std::size_t encoded_size(const StreamHeader& header) { return static_cast<std::size_t>(Layout(header).end); }

std::string read_header(ConstBytes message, DType dtype, IndexRange expected, StreamHeader& header) {
  if (reinterpret_cast<std::uintptr_t>(message.data()) % 8 != 0) return "it starts at no multiple of 8 bytes";
  if (message.size() < sizeof header) return "it has " + text(message.size()) + " bytes, fewer than its header";
  std::memcpy(&header, message.data(), sizeof header);
  if (std::string error = header_error(header, dtype, expected); !error.empty()) return error;
  if (message.size() == encoded_size(header)) return {};
  return "it has " + text(message.size()) + " bytes, its header says " + text(encoded_size(header));
}

template <class V>
std::size_t encoded_size(const StreamView<V>& view) {
  return encoded_size(header_of(view));
}

template <class V>
void encode_into(const StreamView<V>& view, Bytes out) {
  const StreamHeader header = header_of(view);
  const Layout layout(header);
  TELEGRAD_CHECK(out.size() == layout.end && reinterpret_cast<std::uintptr_t>(out.data()) % 8 == 0);
  TELEGRAD_CHECK(view.dense ? view.nnz() == view.range.size() : view.indices.size() == view.nnz());
  put(out, 0, sizeof header, std::as_bytes(std::span(&header, 1)));
  if (header.index_format == IndexFormat::blocked16) {
    put_blocked(view, layout, out);
  } else {
    put(out, layout.indices, layout.values, std::as_bytes(view.indices));
  }
  put(out, layout.values, layout.end, std::as_bytes(view.values));
}

template <class V>
Buffer encode(const StreamView<V>& view) {
  Buffer out(encoded_size(view));
  encode_into(view, out.bytes());
  return out;
}

template <class V>
Decoded<V> decode(ConstBytes bytes, IndexRange expected) {
  TELEGRAD_CHECK(expected.begin <= expected.end && expected.end <= kDimensionMost);
  const auto damaged = [](const std::string& what) { return Decoded<V>("damaged sparse message: " + what); };
  StreamHeader header;
  const std::string error = read_header(bytes, dtype_of<V>, expected, header);
  if (!error.empty()) return damaged(error);
  const Layout layout(header);

  const auto nnz = static_cast<std::size_t>(header.nnz);
  StreamView<V> view{.range = expected, .dense = header.kind == StreamKind::dense, .indices = {}, .values = {}};
  view.values = {reinterpret_cast<const V*>(bytes.data() + layout.values), nnz};
  if (view.dense) return {view, {}};

  Array<std::uint32_t> widened;
  if (header.index_format == IndexFormat::raw32) {
    view.indices = {reinterpret_cast<const std::uint32_t*>(bytes.data() + layout.indices), nnz};
  } else {
    widened = Array<std::uint32_t>(nnz);
    view.indices = widened.span();
    const auto blocks = static_cast<std::size_t>(blocks_of(expected.size()));
    if (!widen({reinterpret_cast<const std::uint32_t*>(bytes.data() + layout.counts), blocks},
               {reinterpret_cast<const std::uint16_t*>(bytes.data() + layout.indices), nnz}, expected.begin,
               widened.span())) {
      return damaged("its block counts do not add up to its " + text(nnz) + " entries");
    }
  }
  if (!kernels::strictly_increasing(view.indices)) return damaged("its indices are not strictly increasing");
  if (nnz != 0 && (view.indices.front() < expected.begin || view.indices.back() >= expected.end)) {
    return damaged("its indices go from " + text(view.indices.front()) + " to " + text(view.indices.back()) +
                   ", outside its range");
  }
  return {view, std::move(widened)};
}

#define TELEGRAD_INSTANTIATE(V)                                  \
  template std::size_t encoded_size(const StreamView<V>&);       \
  template void encode_into(const StreamView<V>&, Bytes);        \
  template Buffer encode(const StreamView<V>&);                  \
  template Decoded<V> decode(ConstBytes, IndexRange);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
