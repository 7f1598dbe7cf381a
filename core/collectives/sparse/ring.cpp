// Sparse reduce-scatter round a ring, the counterpart of the dense one (Patarasuk, Yuan, J. Parallel and Distributed
// Computing 69(2), 2009, §4): slice b begins at rank b + 1 and grows on its way to rank b.
#include "collectives/sparse/ring.hpp"

#include <optional>
#include <utility>
#include <vector>

#include "collectives/support/any_size.hpp"

namespace telegrad {
namespace {

template <class V>
Step steps_of_message(const Transport& net, const Partition& slices) {
  return any_size_steps(net, most_bytes<V>(slices));
}

}  // namespace

template <class V>
Task<OwnedSlice<V>> ring_owned_slice(Transport& net, const SparseVector<V>& mine, const Partition& slices,
                                     const SparseReduction& how) {
  const Rank size = net.size();
  const Rank left = (net.rank() + size - 1) % size;
  const Rank right = (net.rank() + 1) % size;
  const std::size_t most = most_bytes<V>(slices);
  const auto before = [&](Rank distance) { return slice_of(slices, (net.rank() + size - distance) % size); };
  const auto share = [&](IndexRange slice) { return mine.slice(slice.begin, slice.end); };

  OwnedSlice<V> sum;
  Buffer leaving;
  for (Rank t = 0; t + 1 < size; ++t) {
    const SparseView<V> partial = t == 0 ? share(before(1)) : sum.view();
    co_await decide(net, bytes_of(partial), [&] { leaving = encode_share(partial, how); });
    const Step step = t * steps_of_message<V>(net, slices);
    const Buffer message = co_await exchange_any_size(net, right, left, step, leaving.bytes(), most);
    const IndexRange slice = before(t + 2);
    std::optional<Decoded<V>> came;
    co_await decide(net, message.size(), [&] { came.emplace(decode<V>(message.bytes(), slice)); });
    co_await check_decoded(net, left, *came);
    const std::vector<SparseView<V>> both{came->view(), share(slice)};
    const double delta = wire_delta<V>(slice, how.switch_factor);
    const std::size_t bytes = bytes_of(both[0]) + bytes_of(both[1]);
    OwnedSlice<V> grown;
    co_await decide(net, bytes, [&] { grown = reduce_slices<V>(both, how.reduction, delta); });
    sum = std::move(grown);
  }
  if (how.reduction == Reduction::avg) co_await divide_by_ranks(net, sum);
  co_return sum;
}

template <class V>
Step ring_steps(const Transport& net, const Partition& slices) {
  return (net.size() - 1) * steps_of_message<V>(net, slices);
}

#define TELEGRAD_INSTANTIATE(V)                                                                    \
  template Task<OwnedSlice<V>> ring_owned_slice(Transport&, const SparseVector<V>&, const Partition&, \
                                                const SparseReduction&);                           \
  template Step ring_steps<V>(const Transport&, const Partition&);
TELEGRAD_FOR_ENTRY_VALUES(TELEGRAD_INSTANTIATE)
TELEGRAD_INSTANTIATE(CountedF32)
#undef TELEGRAD_INSTANTIATE

}  // namespace telegrad
