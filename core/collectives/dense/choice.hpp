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

/// Whether Algorithm::mpi may do that: MPI has the type and the reduction, and telegrad's bits or equal ones on all ranks.
/// MPI's float min and max have neither telegrad's NaN nor its order of zeros.
bool mpi_reduces(DType dtype, Reduction reduction);

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
  /// Throws std::invalid_argument unless `choices` begin at 0 bytes, ascend, and name algorithms of kAllreduceAlgorithms,
  /// Algorithm::two_level or Algorithm::mpi.
  AllreduceTable(Rank size, std::vector<AllreduceChoice> choices);

  /// The same table for ranks that live on two levels, or do not: then two_level is chosen nowhere, and where `choices` name
  /// it stands what is chosen where nothing is known.
  AllreduceTable on_two_levels(bool two_levels) const {
    AllreduceTable table = *this;
    table.two_levels_ = two_levels;
    return table;
  }

  /// The same table on a network that has such sums, or has not: then, and of what MPI cannot reduce, something else
  /// stands for Algorithm::mpi.
  AllreduceTable with_network_sums(bool has_them) const {
    AllreduceTable table = *this;
    table.network_sums_ = has_them;
    return table;
  }
  bool has_network_sums() const { return network_sums_; }

  Rank size() const { return size_; }
  /// Empty: the built-in ones.
  const std::vector<AllreduceChoice>& choices() const { return choices_; }
  Algorithm choose(std::size_t bytes, bool by_network = false) const;
  /// As if no ranks lived on two levels.
  Algorithm choose_flat(std::size_t bytes, bool by_network = false) const;

 private:
  Rank size_;
  bool two_levels_ = false;
  bool network_sums_ = false;
  std::vector<AllreduceChoice> choices_;
};

}  // namespace telegrad
