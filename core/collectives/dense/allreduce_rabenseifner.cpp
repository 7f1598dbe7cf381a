// Reduce-scatter by halving, allgather by doubling: 2·ceil(log2 P) α + 2(P−1)/P·nβ + (P−1)/P·nγ. Rabenseifner,
// "Optimization of collective reduction operations", ICCS 2004, LNCS 3036, §2; on the circulant graph of Träff,
// arXiv:2410.14234 (see halving.cpp), that is the cost for every P, where a fold of the ranks beyond a power of two
// would cost another 2nβ.
//
// The allgather takes the rounds of the reduce-scatter in reverse: a rank that holds the sums of `distance` blocks, its
// own first, sends the front ones back to the rank `distance` behind, and gets the next ones from the rank ahead.
//
// Few ranks that share memory take one round for each half where vectors are short: see allreduce_direct.cpp.
#include "collectives/dense/allreduce_rabenseifner.hpp"

#include "base/check.hpp"
#include "collectives/dense/allreduce_direct.hpp"
#include "collectives/support/elements.hpp"
#include "collectives/support/halving.hpp"
#include "collectives/support/pieces.hpp"

namespace telegrad {

Task<void> allreduce_rabenseifner(Transport& net, DType dtype, Reduction reduction, ConstBytes input, Bytes output) {
  TELEGRAD_CHECK(input.size() == output.size() && input.size() % size_of(dtype) == 0);
  const Rank rank = net.rank();
  const Rank size = net.size();
  if (size == 1) {
    co_await copy(net, input, output);
    co_return;
  }
  if (goes_directly(net, input.size())) {
    co_await allreduce_direct(net, dtype, reduction, input, output);
    co_return;
  }
  const Partition partition(input.size() / size_of(dtype), size);
  const Bytes mine = elements(output, dtype, partition[rank]);
  co_await halve(net, dtype, reduction, input, partition, mine);

  for (Rank left = halving_rounds(size); left > 0; --left) {
    const HalvingRound round = halving_round(size, left - 1);
    const Rank ahead = (rank + round.distance) % size;
    const Rank behind = (rank + size - round.distance) % size;
    const std::size_t pieces = pieces_of(net, partition, dtype, round.blocks());
    const auto parts_of = [&](Rank first, std::size_t piece) {
      const Arc arc(partition, first, round.blocks());
      return arc.ranges(part_of({0, arc.size()}, pieces, piece));
    };

    PieceExchange exchange(net, pieces, [&](PieceExchange& messages, std::size_t piece) {
      const auto here = parts_of(rank, piece);
      const auto there = parts_of(ahead, piece);
      for (const std::size_t part : {0, 1}) {
        const Step step = kHalvingSteps + step_of(left - 1, piece, part);
        if (part == 0 || there[part].size() > 0) messages.receive(ahead, step, elements(output, dtype, there[part]));
        if (part == 0 || here[part].size() > 0) messages.send(behind, step, elements(output, dtype, here[part]));
      }
    });
    for (std::size_t piece = 0; piece < pieces; ++piece) co_await exchange.take();
    co_await exchange.finish();
  }
}

}  // namespace telegrad
