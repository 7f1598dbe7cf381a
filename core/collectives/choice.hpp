#pragma once
// Which algorithm, if the caller names none: a table, which all ranks hold alike. The answer depends only on what all ranks
// know alike.

#include <array>
#include <cstddef>
#include <vector>

#include "base/types.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

/// What sums dense vectors.
inline constexpr std::array kAllreduceAlgorithms{Algorithm::recursive_doubling, Algorithm::ring, Algorithm::rabenseifner};

/// For a dense vector of `bytes` bytes among `size` ranks, on a network of which nothing is known.
Algorithm choose_allreduce(Rank size, std::size_t bytes);

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
  /// Throws std::invalid_argument unless `choices` begin at 0 bytes, ascend, and name algorithms of kAllreduceAlgorithms.
  AllreduceTable(Rank size, std::vector<AllreduceChoice> choices);

  Rank size() const { return size_; }
  /// Empty: the built-in ones.
  const std::vector<AllreduceChoice>& choices() const { return choices_; }
  Algorithm choose(std::size_t bytes) const;

 private:
  Rank size_;
  std::vector<AllreduceChoice> choices_;
};

}  // namespace telegrad
