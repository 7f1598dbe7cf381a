#pragma once
// Which algorithm, if the caller names none: a table, which all ranks hold alike. The answer depends only on what all ranks
// know alike.

#include <array>
#include <cstddef>
#include <vector>

#include "base/types.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

/// What sums dense vectors among ranks that are all alike.
inline constexpr std::array kAllreduceAlgorithms{Algorithm::recursive_doubling, Algorithm::ring, Algorithm::rabenseifner};

/// For a dense vector of `bytes` bytes among `size` ranks, on a network of which nothing is known.
Algorithm choose_allreduce(Rank size, std::size_t bytes);
/// The same among owners of a slice of `bytes` bytes, one in each of `size` nodes.
Algorithm choose_between(Rank size, std::size_t bytes);

/// `algorithm` from `from_bytes` bytes up to the next choice.
struct AllreduceChoice {
  std::size_t from_bytes = 0;
  Algorithm algorithm = Algorithm::automatic;

  friend bool operator==(const AllreduceChoice&, const AllreduceChoice&) = default;
};

/// The choices for one number of ranks. A plain number of ranks serves as well: the built-in table for so many.
class AllreduceTable {
 public:
  AllreduceTable(Rank size) : size_(size) {}  // NOLINT: implicit, see above
  /// Throws std::invalid_argument unless `choices` begin at 0 bytes, ascend, and name algorithms of kAllreduceAlgorithms or
  /// Algorithm::two_level.
  AllreduceTable(Rank size, std::vector<AllreduceChoice> choices);

  /// The same table for ranks that live on two levels, or do not: then two_level is chosen nowhere, and where `choices` name
  /// it stands what is chosen where nothing is known.
  AllreduceTable on_two_levels(bool two_levels) const {
    AllreduceTable table = *this;
    table.two_levels_ = two_levels;
    return table;
  }

  Rank size() const { return size_; }
  /// Empty: the built-in ones.
  const std::vector<AllreduceChoice>& choices() const { return choices_; }
  Algorithm choose(std::size_t bytes) const;
  /// As if no ranks lived on two levels.
  Algorithm choose_flat(std::size_t bytes) const;

 private:
  Rank size_;
  bool two_levels_ = false;
  std::vector<AllreduceChoice> choices_;
};

}  // namespace telegrad
