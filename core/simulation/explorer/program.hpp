#pragma once
// A random program: what the ranks of one simulation call, what their network costs, and what goes wrong. All of it
// follows from a seed and the range of sizes, so that a seed is all that is needed to see something again.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codec/wire.hpp"
#include "collectives/sparse/messages.hpp"
#include "collectives/support/partition.hpp"
#include "collectives/support/ring.hpp"
#include "collectives/topk/oktopk.hpp"
#include "drivers/sim/sim_faults.hpp"
#include "simulation/simulation.hpp"

namespace telegrad::explorer {

/// What goes wrong. One thing a program: of two at once it is nobody's promise which is named.
enum class Trouble : std::uint8_t {
  // Nobody may notice these.
  none, slow_link, slow_rank, hold, pause,
  // A rank is gone, or silent for longer than its peers have patience.
  kill, freeze, thaw,
  // A message is not what was sent (SimDamage, in its order).
  truncated, lengthened, duplicated, other_step, other_call, far_sequence, other_source, stray,
  scrambled_head,
  // Some ranks call something else than the others.
  count, dtype, reduction, root, algorithm, switch_factor, operation, order, fewer, more,
  // A rank calls nothing more, without or with closing its communicator; or its program gives up.
  stop, close, abort,
};
inline constexpr std::size_t kTroubles = static_cast<std::size_t>(Trouble::abort) + 1;

const char* name_of(Trouble trouble);
/// nullopt for a name that does not exist.
std::optional<Trouble> trouble_named(std::string_view name);
constexpr bool is_damage(Trouble trouble) { return trouble >= Trouble::truncated && trouble <= Trouble::scrambled_head; }
constexpr bool is_mismatch(Trouble trouble) { return trouble >= Trouble::count && trouble <= Trouble::stop; }

/// One collective. What only one rank has to know of it (entries, in place or not) follows from `seed` and the rank.
struct PlannedCall {
  Operation operation = Operation::barrier;
  DType dtype = DType::u8;
  Reduction reduction = Reduction::none;
  Algorithm algorithm = Algorithm::automatic;  // of an allreduce, as the caller asks for it
  IndexFormat indices = IndexFormat::none;     // of a sparse one
  ValueEncoding values = ValueEncoding::native;  // of an allreduce, and of a sum of which a part is kept
  Rank root = kNoRank;  // of messages: how many ranks ahead everybody sends, and receives from as many behind
  std::size_t count = 0;  // of one block; of all together where they are uneven
  std::size_t entries = 0;  // of a sum of which a part is kept, in training: about what most ranks have; 0: any number
  double switch_factor = 0.0;
  bool rounded = false;  // what is added up are floats of varied magnitude, so that the order of additions shows
  Slices slices = Slices::equal;  // of a sparse allreduce
  bool uneven = false;   // of a reduce_scatter and of what moves blocks: they differ in length
  std::uint32_t tag = 0;  // of messages
  std::vector<std::uint32_t> nodes{};  // of an allreduce on two levels: each rank's node; empty where none are known
  std::optional<LaneTuning> tuning{};  // of what goes in lanes: so that short vectors have several segments too
  std::uint64_t seed = 0;

  std::size_t bytes() const { return count * size_of(dtype); }
  /// In which messages hold its values: a rank that has another type by mistake has no others.
  ValueEncoding wire_values() const { return dtype == DType::f32 ? values : ValueEncoding::native; }
  bool is_encoded() const { return wire_values() != ValueEncoding::native; }
  bool is_sparse() const {
    return operation == Operation::sparse_allreduce || operation == Operation::sparse_allgather ||
           operation == Operation::sparse_reduce_scatter || operation == Operation::allreduce_topk;
  }
  /// True if what rounding loses of a sum of which a part is kept is handed back.
  bool keeps_lost() const { return operation == Operation::allreduce_topk && is_encoded() && seed % 2 == 0; }
  /// True if it moves blocks, one for each rank or pair of ranks.
  bool has_blocks() const {
    return operation == Operation::allgather || operation == Operation::gather || operation == Operation::scatter ||
           operation == Operation::all_to_all;
  }
  /// True if a rank need not hear from all others, but all from or of a root.
  bool is_rooted() const {
    return operation == Operation::broadcast || operation == Operation::gather || operation == Operation::scatter;
  }
  /// Of an allreduce: what `automatic` means here.
  Algorithm resolved(Rank size) const;
  /// True if it is a message to a neighbour and one from another: nobody else takes part, and it has no number.
  bool is_exchange() const { return operation == Operation::send; }
  /// From whom it is, in an exchange.
  Rank source(Rank rank, Rank size) const { return (rank + size - root) % size; }
  /// Elements of a reduce_scatter and of what moves blocks, by rank; in an all_to_all those that `rank` sends.
  Partition partition(Rank size, Rank rank = 0) const;
  /// The same in bytes.
  Partition blocks(Rank size, Rank rank = 0) const;
  /// Of an all_to_all, in bytes: what `rank` gets, by sender.
  Partition blocks_received(Rank size, Rank rank) const;
  /// True if two of `size` ranks may meet in these calls.
  bool agrees(const PlannedCall& other, Rank size) const;
};

struct Program {
  std::uint64_t seed = 0;
  Rank size = 0;
  SimCosts costs{};
  SessionOptions session{};
  OkTopkSettings topk{};  // of all calls that keep a part of a sum: a rank's follow each other with one state
  std::vector<std::vector<PlannedCall>> calls{};  // by rank, in order
  std::vector<std::uint32_t> window{};            // by rank: how many of its calls are in flight at once
  std::vector<double> think_s{};                  // by rank: between one call's end and the next call, at most
  bool persists = false;                          // ranks go on calling after a failure
  bool parts = false;                             // ranks say goodbye once they are through

  Trouble trouble = Trouble::none;
  Rank culprit = kNoRank;  // whom the trouble befalls; in a mismatch one of the odd ranks
  std::vector<SimFault> faults{};
  double act_s = 0.0;  // abort, close: when

  double busy_s = 0.0;   // an upper bound of the time without trouble, at which all time-outs are measured
  double until_s = 0.0;  // everything is over by then, or hangs
  std::uint64_t events_most = 0;  // of the network; more are a hang in which something goes on for ever
};

/// The trouble of a seed, without drawing the rest.
Trouble trouble_of(std::uint64_t seed);
Program draw(std::uint64_t seed, Rank first_ranks, Rank last_ranks);
/// The first operation that not all ranks call alike; nullopt: they all do.
std::optional<std::uint32_t> first_difference(const Program& program);
/// For people: costs, calls and trouble, a line each.
std::string describe(const Program& program);
std::string describe(const PlannedCall& call);

}  // namespace telegrad::explorer
