#pragma once
// f32 values in fewer bytes without a choice to make: as bf16 or f16, or all of one sign as their mean. What is lost is
// told in the same pass: error[i] = values[i] - what values[i] decodes to, and 0 where that is NaN or infinite, as there
// is nothing to keep for later that would not spoil it. `error`, unless empty, has as many elements as `values`, of which
// it may be the memory. Encoded bytes lie at any alignment.

#include <cstddef>
#include <span>

#include "base/types.hpp"

namespace telegrad::kernels {

/// values[i] as bf16 or f16 (CHECKed), to nearest even, into `out` of exactly so many elements (CHECKed). What is beyond
/// f16's range becomes infinite; a NaN is canonical.
void narrow(DType dtype, std::span<const float> values, Bytes out, std::span<float> error = {});
/// The other way, exactly. A NaN is canonical here too, whatever bits have come.
void widen(DType dtype, ConstBytes encoded, std::span<float> values);

/// How many bytes a mean has.
inline constexpr std::size_t kMeanBytes = sizeof(float);
/// Writes the mean of `values` into `out` of kMeanBytes (CHECKed): NaN where a value is NaN or infinite, 0 of no values.
/// False, with nothing written, where one is above zero and another below: a mean would say little of them.
[[nodiscard]] bool mean_of_one_sign(std::span<const float> values, Bytes out, std::span<float> error = {});
/// Every value becomes the mean. False for another length, and for what is neither finite nor the canonical NaN.
[[nodiscard]] bool fill_mean(ConstBytes encoded, std::span<float> values);

namespace reference {
void narrow(DType dtype, std::span<const float> values, Bytes out, std::span<float> error = {});
void widen(DType dtype, ConstBytes encoded, std::span<float> values);
[[nodiscard]] bool mean_of_one_sign(std::span<const float> values, Bytes out, std::span<float> error = {});
}  // namespace reference

}  // namespace telegrad::kernels
