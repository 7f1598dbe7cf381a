#pragma once
// Passes that read an array once and answer a question about it.

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/types.hpp"

namespace telegrad::kernels {

/// How many elements are NaN or infinite. `dtype` is f32 or bf16 (CHECKed); bytes may lie at any alignment.
std::size_t count_nonfinite(DType dtype, ConstBytes values);

/// Whether every index is greater than the one before. True for fewer than two.
bool strictly_increasing(std::span<const std::uint32_t> indices);

namespace reference {
std::size_t count_nonfinite(DType dtype, ConstBytes values);
bool strictly_increasing(std::span<const std::uint32_t> indices);
}  // namespace reference

}  // namespace telegrad::kernels
