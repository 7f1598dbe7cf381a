#pragma once
// What the files that begin operations share. Not installed.

#include <array>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "progress/communicator.hpp"
#include "telegrad/joined.hpp"

namespace telegrad::api::detail {

inline constexpr std::array kDenseAlgorithms{Algorithm::automatic, Algorithm::ring, Algorithm::recursive_doubling,
                                             Algorithm::rabenseifner};
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

/// Submits `request`, and `sent` unless that is null, and gives what a Work holds.
inline std::shared_ptr<Begun> begun(const std::shared_ptr<Joined>& joined, RequestPtr request,
                                    RequestPtr sent = nullptr) {
  if (joined->core->forked()) {
    throw std::invalid_argument("this communicator belongs to the process that forked this one: use it there");
  }
  joined->core->submit(request, false);
  if (sent) joined->core->submit(sent, false);
  return std::make_shared<Begun>(joined, std::move(request), std::move(sent));
}

}  // namespace telegrad::api::detail
