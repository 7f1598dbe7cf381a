#pragma once
// What every message says about itself. It is compared on arrival with what this rank is doing, before any payload is
// looked at. A plain struct on the wire: the join handshake makes sure that all ranks agree on its layout.

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include "base/types.hpp"

namespace telegrad {

/// What a call of the caller's own reduction says. It lies beyond kLastReduction, because no kernel has it.
inline constexpr Reduction kCustomReduction{13};

inline constexpr std::uint32_t kWireVersion = 20;

// Part of the wire format: append, never renumber.
enum class Operation : std::uint8_t {
  barrier = 1,
  broadcast = 2,
  allgather = 3,
  allreduce = 4,
  sparse_allreduce = 5,
  reduce = 6,
  reduce_scatter = 7,
  gather = 8,
  scatter = 9,
  all_to_all = 10,
  send = 11,     // also of the message itself, on the wire
  receive = 12,
  sparse_allgather = 13,
  sparse_reduce_scatter = 14,
  allreduce_topk = 15,
};
enum class Algorithm : std::uint8_t {
  automatic = 0,
  ring = 1,
  recursive_doubling = 2,
  split_allgather = 3,
  direct = 4,
  rabenseifner = 5,
  split_dense_allgather = 6,
  oktopk = 7,  // these are of an allreduce_topk
  gtopk = 8,
  bounded = 9,
  two_level = 10,
  nccl = 11,  // the sum itself goes by other means: here ranks only tell each other that they have called it
  mpi = 12,   // the network's own collective, after ranks have told each other the same
};

/// What a rank called: two ranks that meet in one operation must agree on all of it.
struct Call {
  Operation operation{};
  DType dtype = DType::u8;
  Reduction reduction = Reduction::none;
  Algorithm algorithm = Algorithm::automatic;
  Rank root = kNoRank;      // send, receive: the other rank
  std::uint64_t count = 0;  // elements; for a sparse operation the dimension
  double switch_factor = 0;  // of a sparse operation
  // Where ranks have blocks of different lengths: a digest of the lengths. Of an allreduce in which nodes count: a digest of
  // the nodes. Of any other sparse allreduce: 0 or kBalancedSlices.
  // Of an allreduce_topk: a digest of its settings, and of what earlier calls have left. Of send and receive: the tag.
  std::uint64_t layout = 0;
  ValueEncoding wire = ValueEncoding::native;  // of a dense reduction's values
  std::array<std::uint8_t, 3> reserved{};  // of a sparse reduction the first: 1 where shares go as they are, as by "sums-…"
  // What its caller makes of it that the rest does not say, as a sum in 32 bits of integers of 8; 0: nothing, else a digest.
  std::uint32_t purpose = 0;

  friend bool operator==(const Call&, const Call&) = default;
};
static_assert(sizeof(Call) == 40);

inline constexpr std::uint64_t kBalancedSlices = 1;
inline constexpr std::uint64_t kOwnCounts = 1;  // of an all_to_all: each pair of ranks has a length of its own

/// What two ranks do between themselves: others know nothing of it, and it has no number among the operations.
inline bool is_point_to_point(const Call& call) {
  return call.operation == Operation::send || call.operation == Operation::receive;
}

/// As a person would write the call: `allreduce(count=1024, dtype=f32, reduction=sum, algorithm=ring)`.
std::string describe(const Call& call);
const char* name_of(Operation operation);
const char* name_of(Algorithm algorithm);
const char* name_of(DType dtype);
const char* name_of(Reduction reduction);
const char* name_of(ValueEncoding encoding);

struct Envelope {
  std::uint32_t epoch = 0;         // which incarnation of the job: messages of an earlier one are dropped
  std::uint32_t communicator = 0;  // which communicator of the job
  std::uint32_t sequence = 0;      // which operation of the communicator; of a send: which one from its source to here
  Step step = 0;                   // which message of the operation; of a send: its tag
  Rank source = 0;
  std::uint32_t reserved = 0;
  std::uint64_t length = 0;  // payload bytes
  Call call;
};
static_assert(sizeof(Envelope) == 72 && std::is_trivially_copyable_v<Envelope>);

}  // namespace telegrad
