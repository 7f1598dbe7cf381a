#pragma once
// Where a selection ends: the exact rank of a key, ties included, by radix selection.

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entries.hpp"
#include "kernels/key.hpp"

namespace telegrad::kernels {

/// Every entry whose key is greater than `key`, and the first `ties` of those that equal it.
struct Cut {
  std::int32_t key;
  std::size_t ties;

  friend bool operator==(const Cut&, const Cut&) = default;
};

/// The k entries with the largest keys, those with the lowest indices where some are equal; of one sign, all that there
/// are where that is fewer than k. k <= x.size() (CHECKed).
Cut topk_cut(std::span<const float> x, std::size_t k, Side side);

/// The same of keys, none of them negative; they are overwritten.
Cut topk_cut(std::span<std::int32_t> keys, std::size_t k, Side side);

/// Moves what `cut` selects out of `x`, as accumulate_select() does. Returns how many those are; `out` must hold them
/// (CHECKed).
std::size_t move_cut(std::span<float> x, const Cut& cut, Side side, std::uint32_t index_offset, EntriesOut<float> out);

namespace reference {
Cut topk_cut(std::span<const float> x, std::size_t k, Side side);
std::size_t move_cut(std::span<float> x, const Cut& cut, Side side, std::uint32_t index_offset, EntriesOut<float> out);
}  // namespace reference

}  // namespace telegrad::kernels
