#pragma once
// Every owner's sum of its slice to every other rank, between hosts and among few ranks, round by round. While a round's
// messages travel, the next one's is made and what has come is taken. Whoever has given entries of a
// slice is sent no values that are in the sum as they were (sparse/known_values.hpp). What becomes of what has come, this
// must not know.

#include <functional>

#include "base/types.hpp"
#include "collectives/allgather_slices.hpp"
#include "sparse/known_values.hpp"
#include "transport/task.hpp"
#include "transport/transport.hpp"

namespace telegrad {

/// What this rank gave of an owner's slice.
template <class V>
GivenEntries<V> given_to(const EncodedSlice<V>& mine, Rank owner);

struct TakingSums {
  std::function<Task<void>(Rank owner, ConstBytes message)> take;  // once for each of the other ranks
  std::function<bool()> ready;  // before it says so, only what is left at the end is taken
};

/// `mine` has its encoding, or where it leaves values out, the sum itself. Uses any_size_steps() steps from
/// `mine.first_step` on.
template <class V>
Task<void> exchange_sums(Transport& net, const EncodedSlice<V>& mine, const WireFormat& format, TakingSums taking);

}  // namespace telegrad
