#pragma once
// The value section of a message: values as they are, encoded (codec/encode_values.hpp) or packed
// (codec/pack_values.hpp). Where in the message it lies, this must not know.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/buffer.hpp"
#include "base/types.hpp"
#include "codec/pack_values.hpp"
#include "codec/wire.hpp"
#include "kernels/quantise.hpp"

namespace telegrad {

/// Its length, without padding.
std::uint64_t value_bytes(const VectorHeader& header);
/// Leaves the header saying that values are packed, if that saves enough; `bytes`: what they take then, 0 if it is not
/// known.
void choose_packing(VectorHeader& header, std::uint64_t bytes);
/// What packed values may be expected to take, those of gradients that were selected for their magnitude; 0 where they
/// cannot be packed.
std::uint64_t packed_value_bytes_expected(const VectorHeader& header);
/// What is wrong with what a header says of it, or nothing.
std::string value_bytes_error(const VectorHeader& header);

/// Reads a section of value_bytes() into an array of header.nnz values. Returns what is wrong with it, or nothing.
template <class V>
std::string read_values(ConstBytes section, const VectorHeader& header, std::span<V> values);

/// Values on their way into a message: looked at once for how long they get packed, before there is a message.
template <class V>
class ValueDraft {
 public:
  /// Of values that are to be sent as the header says, but for the packing. `error`: as encode_into() has it.
  ValueDraft(std::span<const V> values, const VectorHeader& header, bool packs, std::span<V> error);

  /// What the values take packed; 0: they are not to be.
  std::uint64_t packed_bytes() const { return plan_.bytes; }
  /// Fills a section of value_bytes(), and its padding. `first`: the first value's index in the whole vector, so that values
  /// of one rank's messages are rounded independently of each other, also where one call sends several.
  void write(const VectorHeader& header, const kernels::QuantisationKey& key, std::uint64_t first, Bytes section) const;

 private:
  // What is sent if it is not encoded.
  ConstBytes sent() const;

  std::span<const V> values_;
  std::span<V> error_;
  kernels::ValuePlan plan_;
  Array<bf16> rounded_;  // f32 that is to be packed as bf16
};

}  // namespace telegrad
