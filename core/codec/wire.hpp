#pragma once
// A vector, or a slice of one, as bytes: a header of 32 bytes, the indices, the values. Each section starts at a
// multiple of 8 bytes, and the end is one. Multi-byte numbers are in the machine's order: joining ranks make sure that
// it is the same.
//
//   raw32      each index as u32
//   blocked16  the range in blocks of 65,536 indices from its beginning: one u32 count per block, padded to 8 bytes,
//              then the low 16 bits of every index counted from the range's beginning
//   packed     as codec/pack_indices.hpp says: near the entropy
//
// Values as they are, or, of f32, encoded as codec/encode_values.hpp says; as they are or as bf16 they can be packed on top
// of that, as codec/pack_values.hpp says.
//
// raw32 and blocked16 cost next to nothing to make and read, packed about a nanosecond an entry each way, packed values as
// much. Whatever is wished for, no message is longer than with raw32 and values that are not packed.
//
// Decoding trusts nothing: it checks everything before use, reads nothing outside the bytes, and never throws on them.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/buffer.hpp"
#include "base/check.hpp"
#include "base/types.hpp"
#include "codec/sparse_vector.hpp"
#include "kernels/quantise.hpp"

namespace telegrad {

// Values are part of the wire format: append, never renumber.
enum class VectorKind : std::uint8_t { sparse = 1, dense = 2, indices = 3 };  // indices: their values come by themselves
enum class IndexFormat : std::uint8_t { none = 0, raw32 = 1, blocked16 = 2, packed = 3 };
const char* name_of(IndexFormat format);

/// What a sender wishes. For indices: none (or blocked16), the smaller of raw32 and blocked16; raw32, just that; packed,
/// but for indices of which one of the two others takes as few bytes.
/// Values of f32 can be sent in fewer bytes, with a rounding error; `key` is of those that are rounded at random. A mean is
/// one of entries that are all of one sign: where they are not, or densely, values are sent as they are.
/// `packs_values`: f32 and bf16, also f32 sent as bf16, are packed, which loses nothing, where that saves a sixteenth of
/// their bytes. Others are left as they are.
struct WireFormat {
  IndexFormat indices = IndexFormat::none;
  ValueEncoding values = ValueEncoding::native;
  kernels::QuantisationKey key{};
  bool packs_values = false;
};

inline constexpr std::uint32_t kVectorMagic = 0x534754U;  // "TGS"; the fourth byte is the version
inline constexpr std::uint32_t kVectorVersion = 5;

/// With which every error of a message begins.
inline constexpr const char* kDamagedVector = "damaged sparse message: ";

struct VectorHeader {
  std::uint32_t magic = kVectorMagic | kVectorVersion << 24;
  VectorKind kind = VectorKind::sparse;
  DType dtype = DType::f32;  // of the values once decoded
  IndexFormat index_format = IndexFormat::none;
  ValueEncoding value_encoding = ValueEncoding::native;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint64_t index_bytes = 0;  // of the index section, without padding
  std::uint32_t nnz = 0;
  std::uint32_t packed_value_words = 0;  // of the value section, in 8 bytes; 0: values are not packed
};
static_assert(sizeof(VectorHeader) == 32);

/// The smaller of raw32 and blocked16 for `nnz` entries in a range of `range_size` indices.
IndexFormat smaller_index_format(std::uint64_t range_size, std::uint64_t nnz);

/// What indices and values take packed; 0: they are not.
struct PackedBytes {
  std::uint64_t indices = 0;
  std::uint64_t values = 0;
};

/// How `nnz` entries in `range`, or the whole range densely, are encoded; encoded_size() of it is the whole message's.
/// Nobody looks at `packed` unless `format` wishes that.
VectorHeader vector_header(IndexRange range, bool dense, std::uint64_t nnz, DType dtype, WireFormat format = {},
                           PackedBytes packed = {});
/// The same where only their number is known: packed indices are taken to be evenly spread, packed values to be the largest
/// of gradients; densely values are taken not to be packed.
VectorHeader expected_header(IndexRange range, bool dense, std::uint64_t nnz, DType dtype, WireFormat format = {});
std::size_t encoded_size(const VectorHeader& header);

/// What a message says of itself, unchecked; what is too short for a header says that it is an empty vector.
VectorHeader claimed_header(ConstBytes message);

/// Reads the header of a message that must be of `dtype` and `expected`; returns what is wrong with it, with the
/// message's address or its length, or nothing. Looks at no section.
std::string read_header(ConstBytes message, DType dtype, IndexRange expected, VectorHeader& header);

/// Of a message in the plain format: indices as raw32, values as they are. Its sections may then travel by themselves.
template <class V>
VectorHeader plain_header(const SparseView<V>& view);
/// Reads a header that comes without its sections, which are to be plain; returns what is wrong with it, or nothing.
std::string section_header_error(ConstBytes header, DType dtype, IndexRange expected);
/// What is wrong with a sparse message's indices, or nothing.
std::string indices_error(IndexRange expected, std::span<const std::uint32_t> indices);
struct MessageSections {
  Bytes indices;
  Bytes values;
};
/// Writes the header and the padding of a plain message of encoded_size(header) bytes (CHECKed), and says where its
/// sections go.
MessageSections sections_of(const VectorHeader& header, Bytes message);

/// The header and the indices of a sparse view, without its values: a multiple of 8 bytes, the same for views of the same
/// indices. Of `format`, only the indices' part counts.
template <class V>
Buffer encode_indices(const SparseView<V>& view, WireFormat format);
/// Reads the header of what encode_indices() wrote, with which a message must begin, as read_header() does; what follows in
/// the message is not looked at. encoded_size(header) is how much encode_indices() wrote.
std::string read_indices_header(ConstBytes message, DType dtype, IndexRange expected, VectorHeader& header);
/// Reads the indices behind a header that is checked, into header.nnz elements. Returns what is wrong with them, or nothing.
std::string read_indices(ConstBytes message, const VectorHeader& header, IndexRange expected,
                         std::span<std::uint32_t> indices);

/// The bytes that encode() makes of this view; always a multiple of 8. O(1), but for packed indices and values: reads them
/// once.
template <class V>
std::size_t encoded_size(const SparseView<V>& view, WireFormat format = {});

/// Writes exactly encoded_size(view, format) bytes, which `out` must hold (CHECKed), at an address that is a multiple
/// of 8.
/// `error`, unless empty, has as many elements as the view has values: each is left the value minus what it decodes to.
template <class V>
void encode_into(const SparseView<V>& view, Bytes out, WireFormat format = {}, std::span<V> error = {});

template <class V>
Buffer encode(const SparseView<V>& view, WireFormat format = {}, std::span<V> error = {});
/// The same behind `room` bytes, a multiple of 8, that are left to the caller.
template <class V>
Buffer encode_behind(std::size_t room, const SparseView<V>& view, WireFormat format = {}, std::span<V> error = {});

/// A view into received bytes, or what was wrong with them.
template <class V>
class Decoded {
 public:
  Decoded(SparseView<V> view, Array<std::uint32_t> widened, Array<V> values = {})
      : view_(view), widened_(std::move(widened)), values_(std::move(values)) {}
  explicit Decoded(std::string error) : error_(std::move(error)) {}

  bool ok() const { return error_.empty(); }
  explicit operator bool() const { return ok(); }
  /// Why the bytes are no vector of that range; empty if they are.
  const std::string& error() const { return error_; }
  /// CHECKs ok(). Native values that are not packed (and raw32 indices) lie in the received bytes, others in this object:
  /// the view is valid while both live. Moving this object keeps it valid.
  const SparseView<V>& view() const {
    TELEGRAD_CHECK(ok());
    return view_;
  }

 private:
  SparseView<V> view_;
  Array<std::uint32_t> widened_;
  Array<V> values_;
  std::string error_;
};

/// Reads what encode() wrote, in whichever format, for `expected`, the range that the receiver knows it must get.
/// `bytes` must be the whole message and start at a multiple of 8.
template <class V>
Decoded<V> decode(ConstBytes bytes, IndexRange expected);

/// The same into arrays of as many elements as the message is known to hold entries. Returns what is wrong with it, or
/// nothing; it is wrong also where it holds another number of entries, or a dense range.
template <class V>
std::string decode_into(ConstBytes bytes, IndexRange expected, std::span<std::uint32_t> indices, std::span<V> values);

}  // namespace telegrad
