#pragma once
// Which of some sorted indices are among others.

#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad::kernels {

/// Marks of `indices` those that are among `members`; both are strictly increasing, and those of `members` that lie between
/// the first and the last index are among `indices` (of others, marks say nothing, and nothing is read outside). Returns how many it has marked.
/// `marks` has mark_words(indices.size()) words (CHECKed), as marks.hpp has them.
std::size_t mark_members(std::span<const std::uint32_t> indices, std::span<const std::uint32_t> members,
                         std::span<std::uint64_t> marks);

namespace reference {
std::size_t mark_members(std::span<const std::uint32_t> indices, std::span<const std::uint32_t> members,
                         std::span<std::uint64_t> marks);
}  // namespace reference

}  // namespace telegrad::kernels
