"""Bugs planted into the operations that move blocks, the chain of long broadcasts, and sums of encoded values."""

from __future__ import annotations

from mutant import mutant

GATHER_RING = "collectives/dense/allgather_ring.cpp"
GATHER_BRUCK = "collectives/dense/allgather_bruck.cpp"
CHAIN = "collectives/dense/broadcast_chain.cpp"
ALL_TO_ALL = "collectives/dense/all_to_all.cpp"
PIECES = "collectives/support/pieces.cpp"
ENCODED = "collectives/dense/allreduce_quantised.cpp"
ALL_TO_ALL_BRUCK = "collectives/dense/all_to_all_bruck.cpp"
GATHER_TREE = "collectives/dense/gather_tree.cpp"
GATHER_DIRECT = "collectives/dense/gather.cpp"
SCATTER_TREE = "collectives/dense/scatter_tree.cpp"
SCATTER_DIRECT = "collectives/dense/scatter.cpp"

MOVES_MUTANTS = (
    mutant(
        "allgather, ring: the own block is copied before all are heard",
        GATHER_RING,
        "  std::vector<Task<void>> together;",
        "  co_await copy(net, mine, ring.bytes(ring.own()));\n  std::vector<Task<void>> together;",
    ),
    mutant(
        "allgather, ring: takes blocks before all are heard",
        GATHER_RING,
        "if (!ring.other_tells()) co_await barrier(ring.net);",
        "if (ring.all.size() % 2 == 2) co_await barrier(ring.net);",
    ),
    mutant(
        "allgather, ring: passes a piece on before it has come",
        GATHER_RING,
        "co_await ring.arrived.until(index - own + 1);",
        "co_await ring.arrived.until(index - own);",
    ),
    mutant(
        "allgather, ring: uses a piece before it has come",
        GATHER_RING,
        "co_await ring.to_take.until(++taken);",
        "co_await ring.to_take.until(taken++);",
    ),
    mutant(
        "allgather, Bruck: the own block comes out at its neighbour's place",
        GATHER_BRUCK,
        "const std::size_t before = blocks[rank].begin;",
        "const std::size_t before = blocks[(rank + 1) % size].begin;",
    ),
    mutant(
        "allgather, Bruck: the last round has a block too few",
        GATHER_BRUCK,
        "const Rank more = std::min(have, size - have);",
        "const Rank more = std::min(have, size - have - (size - have < have ? 1U : 0U));",
    ),
    mutant(
        "gather: the root does not wait for the last messages",
        GATHER_DIRECT,
        "co_await copy(net, mine, block(root));\n  for (; !receives.empty(); receives.pop_front()) co_await",
        "co_await copy(net, mine, block(root));\n  if (net.size() % 2 == 0) co_await receives.front();\n"
        "  for (; !receives.empty(); receives.pop_front()) if (net.size() % 2 == 1) co_await",
    ),
    mutant(
        "gather, tree: blocks come out in the order of the tree",
        GATHER_TREE,
        "const std::size_t behind = (net.size() - root) * block;",
        "const std::size_t behind = (net.size() - root) * block;\n  root = 0;",
    ),
    mutant(
        "scatter: the root keeps the first block",
        SCATTER_DIRECT,
        "copy(net, block(root), mine)",
        "copy(net, block(0), mine)",
    ),
    mutant(
        "scatter, tree: a subtree gets its neighbour's blocks",
        SCATTER_TREE,
        "scratch.bytes().subspan(distance * block, below * block));",
        "scratch.bytes().subspan((distance - (distance > 2 ? 1 : 0)) * block, below * block));",
    ),
    mutant(
        "all-to-all: takes blocks before all are heard",
        ALL_TO_ALL,
        "co_await barrier(exchange.net);",
        "if (exchange.net.size() == 2) co_await barrier(exchange.net);",
    ),
    mutant(
        "all-to-all: blocks come out where they were for others",
        ALL_TO_ALL,
        "receives.emplace_back(net, from, exchange.first_step, exchange.coming(from));",
        "receives.emplace_back(net, from, exchange.first_step, exchange.coming((from + 1) % net.size()));",
    ),
    mutant(
        "all-to-all: long blocks are taken before all are heard",
        ALL_TO_ALL,
        "  co_await barrier(net);\n  std::vector<Task<void>> both;\n  both.push_back(run_rounds(exchange));",
        "  std::vector<Task<void>> both;\n  both.push_back(run_rounds(exchange));",
    ),
    mutant(
        "pieces: every piece of a long block comes out where the first one belongs",
        PIECES,
        "coming.subspan(part.begin, part.size())",
        "coming.subspan(0, part.size())",
    ),
    mutant(
        "pieces: one of several messages is not waited for",
        PIECES,
        "for (std::uint8_t left = of_piece_.front(); left > 0; --left) {",
        "for (std::uint8_t left = of_piece_.front(); left > 1; --left) {",
    ),
    mutant(
        "all-to-all, Bruck: blocks are not turned back",
        ALL_TO_ALL_BRUCK,
        "const std::size_t source = (rank + size - place) % size;",
        "const std::size_t source = (rank + place) % size;",
    ),
    mutant(
        "broadcast, chain: passes a piece on before it has come",
        CHAIN,
        "co_await chain.arrived.until(index + 1);",
        "co_await chain.arrived.until(index);",
    ),
    mutant(
        "broadcast, chain: the last piece is lost",
        CHAIN,
        "arrived < chain.pieces;) {",
        "arrived + 1 < chain.pieces;) {",
    ),
    mutant(
        "encoded allreduce: a piece leaves before it is encoded",
        ENCODED,
        "return encoded_.until(sent == 0 ? 0 : before(round) + end_of(leaving.size(), sent, piece));",
        "return encoded_.until(sent == 0 ? 0 : before(round) + end_of(leaving.size(), sent, piece) / 2);",
        "2..4",
    ),
    mutant(
        "encoded allreduce: a share is made over one that is leaving",
        ENCODED,
        "if (round > 2) co_await left_.until(round - 2);",
        "",
    ),
    mutant(
        "encoded allreduce: a share comes over one that is not yet added",
        ENCODED,
        "if (round > coming_.size()) co_await added_.until(round - coming_.size());",
        "",
    ),
    mutant(
        "encoded allreduce: a share is added before it has come",
        ENCODED,
        "co_await come_.until(end_of(begin));",
        "end = std::min(units, begin + 1);",
    ),
    mutant(
        "encoded allreduce: the last rounds' shares are added once more",
        ENCODED,
        "last = std::min(first + together_, net_.size()) - 1;",
        "last = std::min(first + together_, net_.size()) - 1;\n"
        "      if (last + 1 == net_.size() && first > 2) --first;",
    ),
    mutant(
        "encoded allreduce: a sum is decoded before it has come",
        ENCODED,
        "last + 1).size()) <= come) ++last;",
        "last).size()) <= come) ++last;",
        "2..4",
    ),
    mutant(
        "encoded allreduce: the own slice stays encoded",
        ENCODED,
        "both.push_back(decoding.take(net.rank(), own));",
        "if (own.size() == 0) both.push_back(decoding.take(net.rank(), own));",
    ),
)
