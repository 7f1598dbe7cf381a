#pragma once

#include <span>

#include "base/types.hpp"
#include "collectives/support/partition.hpp"
#include "kernels/quantise.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What allreduce_quantised needs to know beside its vectors. All ranks pass the same, but for the key's rank.
struct QuantisedSum {
  ValueEncoding encoding = ValueEncoding::native;  // but mean
  kernels::QuantisationKey key{};  // its rank is this one's, whatever it says
  Reduction reduction = Reduction::sum;  // or avg
};

/// output = the sum (or mean) of all ranks' inputs, the same bits on every rank, in messages that hold values as
/// `how.encoding`. All vectors have the same length on all ranks; `output` may be `input`. `error`, unless empty, has that
/// length too, and memory of its own: it receives what rounding lost on this rank, such that the sum over ranks of
/// error + sum, or error + size() · mean, is the sum of all inputs, but for f32's own rounding; zeros where values that
/// are NaN or infinite left nothing to keep. `output` is written only once this rank has heard from every other; `error`
/// as values are encoded, so after a failure it is of no use.
Task<void> allreduce_quantised(Transport& net, const QuantisedSum& how, std::span<const float> input,
                               std::span<float> output, std::span<float> error = {});

/// What the owner adds up and encodes of a vector of `count` elements, by more than two ranks: whole encoding units.
Range quantised_slice(std::size_t count, Rank size, Rank owner);

/// Memory that a GPU shares, of a rank whose GPU encodes and decodes.
struct EncodedVectors {
  std::size_t count = 0;         // elements of the vector
  ConstBytes input{};            // all of it, encoded as allreduce_quantised would: `key` and, with an error, to the nearest
  std::span<const float> own{};  // of more than two ranks this one's slice of the vector, not encoded
  Bytes output{};                // as long as `input`: the sum, encoded; of two ranks the other one's input
  std::span<float> error{};      // empty, or as long as `own`: of that slice what allreduce_quantised says
};

/// The same call, which other ranks may make with host vectors, and the same bits once `output` is decoded; of two ranks
/// once both inputs are, added, and for a mean halved. Nothing of `output` is of use before this has succeeded.
Task<void> allreduce_encoded(Transport& net, const QuantisedSum& how, const EncodedVectors& vectors);

}  // namespace telegrad
