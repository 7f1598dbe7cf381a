// Reduce-scatter by halving, allgather by doubling: 2·ceil(log2 P) α + 2(P−1)/P·nβ + (P−1)/P·nγ. Rabenseifner,
// "Optimization of collective reduction operations", ICCS 2004, LNCS 3036, §2; on the circulant graph of Träff,
// arXiv:2410.14234 (see halving.cpp), that is the cost for every P, where a fold of the ranks beyond a power of two
// would cost another 2nβ.
//
// The allgather takes the rounds of the reduce-scatter in reverse: a rank that holds the sums of `distance` blocks, its
// own first, sends the front ones back to the rank `distance` behind, and gets the next ones from the rank ahead.
#include "collectives/allreduce_rabenseifner.hpp"

#include <array>
#include <optional>

#include "base/check.hpp"
#include "collectives/elements.hpp"
#include "collectives/halving.hpp"

namespace telegrad {

Task<void> allreduce_rabenseifner(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  const Rank rank = net.rank();
  const Rank size = net.size();
  if (size == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  const Partition partition(input.size() / size_of(dtype), size);
  const Bytes mine = elements(output, dtype, partition[rank]);
  co_await halve(net, dtype, reduction, input, partition, mine);
  co_await finish_reduction(net, dtype, reduction, mine);

  Step step = kHalvingSteps;
  for (Rank left = halving_rounds(size); left > 0; --left, step += 2) {
    const HalvingRound round = halving_round(size, left - 1);
    const Rank ahead = (rank + round.distance) % size;
    const Rank behind = (rank + size - round.distance) % size;
    // What lies around the end of the vector goes in two messages.
    const auto ranges_of = [&](Rank first) {
      const Arc arc(partition, first, round.blocks());
      return arc.ranges({0, arc.size()});
    };
    const std::array<Range, 2> here = ranges_of(rank);
    const std::array<Range, 2> there = ranges_of(ahead);
    auto sending = net.send(behind, step, elements(output, dtype, here[0]));
    auto receiving = net.receive(ahead, step, elements(output, dtype, there[0]));
    std::optional<Transport::Sending> sending_rest;
    std::optional<Transport::Receiving> receiving_rest;
    if (here[1].size() > 0) sending_rest.emplace(net, behind, step + 1, elements(output, dtype, here[1]));
    if (there[1].size() > 0) receiving_rest.emplace(net, ahead, step + 1, elements(output, dtype, there[1]));
    co_await receiving;
    if (receiving_rest) co_await *receiving_rest;
    co_await sending;
    if (sending_rest) co_await *sending_rest;
  }
}

}  // namespace telegrad
