#pragma once
// Which of some sorted indices are among others.

#include <cstddef>
#include <cstdint>
#include <span>

namespace telegrad::kernels {

/// Words of marks of so many: bit i % 64 of word i / 64 is that of the i-th; what is beyond the last one is zero.
constexpr std::size_t member_words(std::size_t count) { return (count + 63) / 64; }

/// Marks of `indices` those that are among `members`; both are strictly increasing, and those of `members` that lie between
/// the first and the last index are among `indices` (of others, marks say nothing). Returns how many it has marked.
/// `marks` has member_words(indices.size()) words (CHECKed).
std::size_t mark_members(std::span<const std::uint32_t> indices, std::span<const std::uint32_t> members,
                         std::span<std::uint64_t> marks);

namespace reference {
std::size_t mark_members(std::span<const std::uint32_t> indices, std::span<const std::uint32_t> members,
                         std::span<std::uint64_t> marks);
}  // namespace reference

}  // namespace telegrad::kernels
