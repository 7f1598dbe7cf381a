#pragma once
// The largest of every bucket of consecutive entries: SparCML §8.3 sends k of every 512.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/ranked.hpp"

namespace telegrad::kernels {

/// Adds `gradient` to `residual` (nothing, if it is empty), then moves the `per_bucket` entries of largest magnitude of
/// every `bucket` consecutive ones, and the `of_last` of what remains at the end, ties to the lowest index. `out` holds
/// all these; no bucket has fewer entries than are to be moved (CHECKed).
Chosen accumulate_buckets(std::span<float> residual, std::span<const float> gradient, std::size_t bucket,
                          std::size_t per_bucket, std::size_t of_last, std::uint32_t index_offset,
                          EntriesOut<float> out);

namespace reference {
Chosen accumulate_buckets(std::span<float> residual, std::span<const float> gradient, std::size_t bucket,
                          std::size_t per_bucket, std::size_t of_last, std::uint32_t index_offset,
                          EntriesOut<float> out);
}  // namespace reference

}  // namespace telegrad::kernels
