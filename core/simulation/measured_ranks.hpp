#pragma once
// The ranks of a measured operation: their memory, their requests, and whether what came out is right.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/support/traffic.hpp"
#include "session/request.hpp"
#include "simulation/measure.hpp"

namespace telegrad {

class MeasuredRanks {
 public:
  virtual ~MeasuredRanks() = default;
  /// The rank's next call. Where calls follow each other with a state, only once its last one is over.
  virtual RequestPtr request(Rank rank) = 0;
  /// Of rank 0, from its last call.
  virtual std::uint64_t result_nnz() const { return 0; }
  /// By rank, of the last call; empty where nobody counts words.
  virtual std::vector<SparseTraffic> traffic() const { return {}; }
  /// The first rank whose result is wrong.
  virtual std::optional<Rank> wrong() const { return std::nullopt; }
};

/// With real entries: of a sparse_allgather, a sparse_reduce_scatter in slices of equal lengths, an allreduce_topk.
/// `workload` is looked at as long as they live.
std::unique_ptr<MeasuredRanks> measured_vectors(const Workload& workload);
bool measures_vectors(Operation operation);

}  // namespace telegrad
