#pragma once
// Passes that read an array once and look at the keys of its entries.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/key.hpp"

namespace telegrad::kernels {

/// How many entries have a key of at least `bound`.
std::size_t count_at_least(std::span<const float> x, std::int32_t bound, Side side);

/// A collecting pass stores whole registers: its output needs this much more than the keys it may keep.
inline constexpr std::size_t kCollectSlack = 32;

/// The keys with 0 <= first <= key <= last, in order of their entries. Stops early and returns more than `most` where
/// there are more; `out` holds `most` + kCollectSlack (CHECKed).
std::size_t collect_keys(std::span<const float> x, std::int32_t first, std::int32_t last, Side side,
                         std::span<std::int32_t> out, std::size_t most);

namespace reference {
std::size_t count_at_least(std::span<const float> x, std::int32_t bound, Side side);
std::size_t collect_keys(std::span<const float> x, std::int32_t first, std::int32_t last, Side side,
                         std::span<std::int32_t> out, std::size_t most);
}  // namespace reference

}  // namespace telegrad::kernels
