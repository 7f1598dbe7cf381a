#include "codec/value_section.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/copy.hpp"
#include "codec/encode_values.hpp"
#include "kernels/entries.hpp"
#include "kernels/narrow.hpp"

namespace telegrad {
namespace {

constexpr std::uint64_t kWordBytes = 8;
constexpr std::uint64_t kGroup = 64;  // random choices begin at a multiple
constexpr std::uint64_t kPackedFewest = 128;   // fewer values save less than the look at them costs
constexpr std::uint64_t kLeastSavedShare = 16;  // of their bytes: what less would save, unpacking would cost

// The type of the values that are in the message, if they can be packed; else another one.
DType sent_dtype(const VectorHeader& header) {
  if (header.value_encoding == ValueEncoding::native) return header.dtype;
  return header.value_encoding == ValueEncoding::bf16 ? DType::bf16 : DType::u8;
}

bool can_pack(const VectorHeader& header) {
  return kernels::packs_values(sent_dtype(header)) && header.nnz >= kPackedFewest;
}

std::uint64_t unpacked_bytes(const VectorHeader& header) {
  if (header.value_encoding == ValueEncoding::native) return std::uint64_t{size_of(header.dtype)} * header.nnz;
  return kernels::encoded_bytes(header.value_encoding, header.nnz);
}

template <class V>
bool unpack(ConstBytes section, DType sent, std::span<V> values) {
  if constexpr (std::is_same_v<V, float>) {
    if (sent == DType::bf16) {
      const Array<bf16> rounded(values.size());
      const Bytes halves = std::as_writable_bytes(rounded.span());
      if (!kernels::unpack_values(sent, section, halves)) return false;
      kernels::widen(sent, halves, values);
      return true;
    }
  }
  return kernels::unpack_values(sent, section, std::as_writable_bytes(values));
}

}  // namespace

std::uint64_t value_bytes(const VectorHeader& header) {
  if (header.kind == VectorKind::indices) return 0;
  return header.packed_value_words == 0 ? unpacked_bytes(header) : kWordBytes * header.packed_value_words;
}

void choose_packing(VectorHeader& header, std::uint64_t bytes) {
  const std::uint64_t unpacked = unpacked_bytes(header);
  if (bytes == 0 || bytes > unpacked - unpacked / kLeastSavedShare) return;
  header.packed_value_words = static_cast<std::uint32_t>(bytes / kWordBytes);
}

std::uint64_t packed_value_bytes_expected(const VectorHeader& header) {
  return can_pack(header) ? kernels::packed_values_expected(sent_dtype(header), header.nnz) : 0;
}

std::string value_bytes_error(const VectorHeader& header) {
  if (header.packed_value_words == 0) return {};
  const DType sent = sent_dtype(header);
  if (!kernels::packs_values(sent)) return "its values are packed, which these cannot be";
  // Nobody makes room for values that so many bytes cannot hold, or packs what that makes longer.
  const std::uint64_t bytes = value_bytes(header);
  if (bytes < unpacked_bytes(header) && bytes >= kernels::packed_values_least(sent, header.nnz)) return {};
  return std::to_string(header.nnz) + " values cannot take " + std::to_string(bytes) + " bytes";
}

template <class V>
std::string read_values(ConstBytes section, const VectorHeader& header, std::span<V> values) {
  if (header.packed_value_words != 0) {
    return unpack(section, sent_dtype(header), values) ? "" : "its packed values are none";
  }
  if constexpr (std::is_same_v<V, float>) {
    if (kernels::decode_values(header.value_encoding, section, values)) return {};
    return "its values are not encoded as they should be";
  } else {
    copy_bytes(values.data(), section.data(), section.size());
    return {};
  }
}

template <class V>
ValueDraft<V>::ValueDraft(std::span<const V> values, const VectorHeader& header, bool packs, std::span<V> error)
    : values_(values), error_(error) {
  if (!packs || !can_pack(header)) return;
  const DType sent_as = sent_dtype(header);
  if constexpr (std::is_same_v<V, float>) {
    if (sent_as == DType::bf16) {
      rounded_ = Array<bf16>(values.size());
      kernels::narrow(sent_as, values, std::as_writable_bytes(rounded_.span()), error);
    }
  }
  plan_ = kernels::plan_values(sent_as, sent());
}

template <class V>
ConstBytes ValueDraft<V>::sent() const {
  return rounded_.empty() ? std::as_bytes(values_) : std::as_bytes(std::span<const bf16>(rounded_.span()));
}

template <class V>
void ValueDraft<V>::write(const VectorHeader& header, const kernels::QuantisationKey& key, std::uint64_t first,
                          Bytes section) const {
  const Bytes bytes = section.first(value_bytes(header));
  const Bytes padding = section.subspan(bytes.size());
  const bool lossless = header.value_encoding == ValueEncoding::native;
  if (header.packed_value_words != 0) {
    kernels::pack_values(sent_dtype(header), plan_, sent(), bytes);
  } else if (lossless || !rounded_.empty()) {
    copy_bytes(bytes.data(), sent().data(), bytes.size());
  } else if constexpr (std::is_same_v<V, float>) {
    kernels::encode_values(header.value_encoding, key, first / kGroup * kGroup, values_, bytes, error_);
  }
  if (!padding.empty()) std::memset(padding.data(), 0, padding.size());
  if (lossless) std::ranges::fill(error_, V(0.0F));
}

#define TELEGRAD_INSTANTIATE(V)                                                      \
  template std::string read_values(ConstBytes, const VectorHeader&, std::span<V>); \
  template class ValueDraft<V>;
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
