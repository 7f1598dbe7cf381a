#pragma once
// What the files that begin operations share. Not installed.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "api/joined.hpp"
#include "progress/communicator.hpp"

namespace telegrad::api::detail {

inline constexpr std::array kDenseAlgorithms{Algorithm::automatic, Algorithm::ring, Algorithm::recursive_doubling,
                                             Algorithm::rabenseifner, Algorithm::mpi};
inline constexpr std::array kSparseAlgorithms{Algorithm::automatic, Algorithm::split_allgather,
                                              Algorithm::split_dense_allgather, Algorithm::recursive_doubling,
                                              Algorithm::ring};

/// The one of `allowed` that has this name; automatic is called auto here. Throws std::invalid_argument.
inline Algorithm algorithm_named(std::string_view name, std::span<const Algorithm> allowed) {
  std::string names;
  for (const Algorithm one : allowed) {
    const std::string_view known = one == Algorithm::automatic ? "auto" : name_of(one);
    if (name == known) return one;
    names += std::string(names.empty() ? "" : ", ") + std::string(known);
  }
  throw std::invalid_argument("algorithm=" + std::string(name) + " does not exist for this operation: use one of " + names);
}

/// Throws std::invalid_argument for what reduces nothing, or is none of its names.
inline void check_reduction(Reduction reduction) {
  if (reduction == Reduction::none) throw std::invalid_argument("reduction=none reduces nothing: use sum, avg, …");
  if (reduction <= kLastReduction) return;
  throw std::invalid_argument("reduction=" + std::to_string(static_cast<int>(reduction)) +
                              " is no Reduction: use sum, avg, …");
}

/// Whether they have a byte in common.
inline bool overlap(std::span<const std::byte> one, std::span<const std::byte> other) {
  if (one.empty() || other.empty()) return false;
  const std::less<const std::byte*> before;
  return before(one.data(), other.data() + other.size()) && before(other.data(), one.data() + one.size());
}

/// Throws std::invalid_argument in a child that the process with the communicator has forked.
inline void check_process(const telegrad::Communicator& core) {
  if (!core.forked()) return;
  throw std::invalid_argument("this communicator belongs to the process that forked this one: use it there");
}

/// Throws std::invalid_argument unless `counts` is empty or has one number for each rank, which together, times `item`,
/// are a length that memory can have.
inline void check_counts(const char* name, Counts counts, Rank size, std::size_t item = 1) {
  if (counts.empty()) return;
  if (counts.size() != size) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(counts.size()) + " numbers for " +
                                std::to_string(size) + " ranks: give one for each");
  }
  std::uint64_t left = static_cast<std::uint64_t>(std::numeric_limits<std::ptrdiff_t>::max()) / item;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > left) {
      throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "]=" + std::to_string(counts[i]) +
                                  " is more than memory can hold: was it a negative number?");
    }
    left -= counts[i];
  }
}

/// Submits `request`, and `sent` unless that is null, and gives what a Work holds.
inline std::shared_ptr<Begun> begun(const std::shared_ptr<Joined>& joined, RequestPtr request,
                                    RequestPtr sent = nullptr) {
  check_process(*joined->core);
  joined->core->submit(request, false);
  if (sent) joined->core->submit(sent, false);
  return std::make_shared<Begun>(joined, std::move(request), std::move(sent));
}

}  // namespace telegrad::api::detail
