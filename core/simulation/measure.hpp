#pragma once
// An operation of all ranks in virtual time, with nothing else running: how long it takes and what it sends. What runs
// is the collective that runs on a real network, with values or, in little memory, only with sizes.

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/types.hpp"
#include "codec/wire.hpp"
#include "collectives/sparse/cost.hpp"
#include "drivers/sim/sim_costs.hpp"
#include "drivers/sim/sim_record.hpp"
#include "transport/envelope.hpp"

namespace telegrad {

struct Workload {
  Operation operation = Operation::allreduce;
  Algorithm algorithm = Algorithm::automatic;  // automatic: the one that the core takes
  Rank ranks = 1;
  /// Dense: of one rank's input, in f32; of an allgather, gather, scatter or all_to_all of one block. Sparse: 4 times the
  /// dimension.
  std::uint64_t bytes = 0;
  std::uint64_t nnz = 0;  // sparse: entries of each rank
  double overlap = 0.0;   // sparse: their share at indices common to all; the rest is independent, uniform
  std::uint64_t keep = 0;  // allreduce_topk: how many entries the sum is to keep; 0: as many as a rank has
  double switch_factor = 1.0;
  /// Sparse: of messages. With values that are rounded, and payloads, results must be right within what rounding may do.
  WireFormat wire{};
  Rank root = 0;
  /// Real values: small integers by seed (of an allreduce_topk numbers of many magnitudes), and every rank's result is
  /// checked.
  bool payloads = false;
  std::uint64_t seed = 0;
  std::uint32_t calls = 1;  // a rank begins the next one as its last one ends; more than one without payloads, or of allreduce_topk
  SimCosts costs{};
  bool links = false;
  bool timeline = false;
};

/// By rank, where it is a vector.
struct Measurement {
  double finish_s = 0.0;  // of the last call
  std::vector<double> finish_by_rank_s;
  std::vector<std::uint64_t> messages_sent;
  std::vector<std::uint64_t> messages_received;
  std::vector<std::uint64_t> bytes_sent;
  std::vector<std::uint64_t> bytes_received;
  std::uint64_t events = 0;
  std::uint64_t result_nnz = 0;       // sparse: entries of rank 0's result, the dimension where that is dense
  std::vector<std::uint64_t> words_sent;      // allreduce_topk, its last call: an index and a value are a word each
  std::vector<std::uint64_t> words_received;
  std::vector<SimLinkCounts> links;   // if asked for
  std::vector<SimActivity> timeline;  // if asked for
};

/// Throws std::invalid_argument for a workload that makes no sense, and std::runtime_error where ranks wait for each
/// other for ever, or a result is wrong.
Measurement measure(const Workload& workload);

/// What Algorithm::automatic is told of a network that costs so much.
NetworkCosts costs_of(const SimCosts& costs);

/// As Python names them, e.g. "sparse_allreduce"; "" is Algorithm::automatic. They throw std::invalid_argument.
Operation operation_named(std::string_view name);
Algorithm algorithm_named(std::string_view name);
/// Sets the field of that name; throws std::invalid_argument for an unknown one.
void set_cost(SimCosts& costs, std::string_view name, double value);

}  // namespace telegrad
