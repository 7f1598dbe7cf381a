"""Bugs planted into the collectives and the session's checks, as source edits. The explorer must find every one."""

from __future__ import annotations

from mutant import Mutant
from mutant import mutant as _mutant
from mutants_filled import FILLED_MUTANTS
from mutants_levels import LEVELS_MUTANTS
from mutants_moves import MOVES_MUTANTS
from mutants_sparse import SPARSE_MUTANTS
from mutants_topk import TOPK_MUTANTS

RING = "collectives/support/ring.cpp"
PASSING = "collectives/dense/allreduce_ring.cpp"
HALVING = "collectives/support/halving.cpp"
RABENSEIFNER = "collectives/dense/allreduce_rabenseifner.cpp"
REDUCE = "collectives/dense/reduce.cpp"
LANES = "collectives/support/lanes.cpp"
DOUBLING = "collectives/dense/allreduce_recursive_doubling.cpp"
GATHER = "collectives/support/allgather_any_size.cpp"
BROADCAST = "collectives/dense/broadcast.cpp"
BARRIER = "collectives/dense/barrier.cpp"
ELEMENTS = "collectives/support/elements.cpp"
REDUCTIONS = "session/reductions.cpp"
MOVES = "session/moves.cpp"
SESSION = "session/session.cpp"
RUNNING = "session/running_operation.cpp"
FAILURE = "session/session_failure.cpp"
TIME = "session/session_time.cpp"
AGREEMENT = "session/agreement.cpp"

_COLLECTIVES = (
    _mutant(
        "ring: two steps swapped at the sender",
        RING,
        "net.send(ring.right(), first_step + t, partial)",
        "net.send(ring.right(), first_step + (t ^ 1), partial)",
    ),
    _mutant(
        "lanes: the last segment is lost",
        LANES,
        "segment < lanes.segments; segment += lanes.lanes",
        "segment + (lanes.segments > 1 ? 1 : 0) < lanes.segments; segment += lanes.lanes",
    ),
    _mutant(
        "ring: a slice ends too early",
        RING,
        "co_await reduce_last(net, ring.dtype, ring.reduction, others, own, mine);",
        "const std::size_t early = mine.size() / 8 * 4;\n"
        "  const Partial less{others.values.first(early), others.halvings};\n"
        "  own.values = own.values.first(early);\n"
        "  co_await reduce_last(net, ring.dtype, ring.reduction, less, own, mine.first(early));",
    ),
    Mutant(
        "ring: a send is awaited too late, its scratch is used again",
        RING,
        (
            ("#include <utility>", "#include <deque>\n#include <utility>"),
            ("ConstBytes partial;", "std::deque<Transport::Sending> late;\n  ConstBytes partial;"),
            (
                "auto sending = net.send(ring.right(), first_step + t, partial);",
                "late.emplace_back(net, ring.right(), first_step + t, partial);",
            ),
            ("partial = received;\n    }\n    co_await sending;", "partial = received;\n    }"),
            ("  // What came last", "  for (auto& sending : late) co_await sending;\n  // What came last"),
        ),
    ),
    _mutant(
        "ring: one scratch buffer for what comes and what leaves",
        RING,
        "const Bytes received = in_scratch(t, coming);",
        "const Bytes received = in_scratch(t + 2 < size ? 0 : size, coming);",
    ),
    _mutant(
        "ring: copied instead of added",
        RING,
        "co_await reduce_partial(net, ring.dtype, ring.reduction, before, one, received, halvings_of(t + 2));",
        "co_await copy(net, one.values, received);",
    ),
    _mutant(
        "ring: the mean is a sum",
        RING,
        "co_await reduce_last(net, ring.dtype, ring.reduction, others, own, mine);",
        "co_await reduce_to(net, ring.dtype, ring.reduction, others.values, own.values, mine);",
    ),
    _mutant(
        "ring: gathered blocks go where their neighbour's belong",
        PASSING,
        "net.receive(ring.left(), step, output(ring.before(t + 1)))",
        "net.receive(ring.left(), step, output(ring.before(t + 1 < size - 1 ? t + 1 : t)))",
    ),
    _mutant(
        "ring: writes to the output at once",
        RING,
        "partial = input(ring.before(1));",
        "if (mine.data() != input(net.rank()).data()) co_await copy(net, input(net.rank()), mine);\n"
        "    partial = input(ring.before(1));",
    ),
    _mutant(
        "halving: the block in the middle is not kept",
        HALVING,
        "co_await keep_partial(net_, dtype_, reduction_, before, kept, number + 1);",
        "(void)before;",
    ),
    _mutant(
        "halving: what lies beyond the vector's end is not added",
        HALVING,
        "for (const Range& part : coming.ranges(in)) {",
        "for (const Range& part : {coming.ranges(in)[0]}) {",
    ),
    _mutant(
        "halving: the mean is a sum",
        HALVING,
        "return last ? reduce_last(net_, dtype_, reduction_, here, there, out)",
        "return last ? reduce_to(net_, dtype_, reduction_, here.values, there.values, out)",
    ),
    _mutant(
        "rabenseifner: blocks that come from ahead are taken for nearer ones",
        RABENSEIFNER,
        "parts_of(ahead, piece)",
        "parts_of(round.distance > 2 ? (ahead + size - 1) % size : ahead, piece)",
    ),
    _mutant(
        "reduce: the farthest child is forgotten",
        REDUCE,
        "if (self + distance >= size) continue;",
        "if (self + distance + (distance > 4 ? 1 : 0) >= size) continue;",
    ),
    Mutant(
        "reduce: partial sums lie in the root's output",
        REDUCE,
        (
            ("last ? output : sum.bytes()", "self == 0 ? output : sum.bytes()"),
            ("    mine = sum.bytes();", "    mine = self == 0 ? output : sum.bytes();\n    (void)last;"),
        ),
    ),
    _mutant(
        "doubling: the folded share replaces the own one",
        DOUBLING,
        "co_await reduce_partial(net, dtype, reduction, others, own, both.bytes(), "
        "doubling.halvings_before(doubling.self()));",
        "",
    ),
    _mutant(
        "doubling: unfolds to the wrong rank",
        DOUBLING,
        "net.send(rank + 1, kUnfold, output)",
        "net.send((rank + 3) % (2 * doubling.pairs), kUnfold, output)",
    ),
    _mutant(
        "doubling: the mean is a sum",
        DOUBLING,
        "co_await reduce_last(net, dtype, reduction, here, there, output);",
        "co_await reduce_to(net, dtype, reduction, here.values, there.values, output);",
    ),
    _mutant(
        "doubling: the lanes share their steps",
        DOUBLING,
        "kFirstRound + static_cast<Step>(segment) * rounds",
        "kFirstRound + static_cast<Step>(segment / 2) * rounds",
    ),
    _mutant(
        "doubling: the wrong partner",
        DOUBLING,
        "member < pairs ? 2 * member : member + pairs",
        "member < pairs ? 2 * (pairs - 1 - member) : member + pairs",
    ),
    Mutant(
        "doubling: sums lie in the output before all are heard",
        DOUBLING,
        (
            (
                "there, sum, halvings);\n    here = Partial{sum, halvings};",
                "there, output, halvings);\n    here = Partial{output, halvings};",
            ),
        ),
    ),
    _mutant(
        "allgather of any size: blocks in the wrong order",
        GATHER,
        "return (net_.rank() + net_.size() - 1 - t) % net_.size();",
        "return (net_.rank() + 2 * net_.size() - 1 - t - (t + 3 == net_.size() ? 1 : 0)) % net_.size();",
    ),
    _mutant(
        "broadcast: children are not counted from the root",
        BROADCAST,
        "rank_of(self + distance)",
        "(self + distance)",
    ),
    _mutant(
        "broadcast: the nearest child is left out",
        BROADCAST,
        "distance > 0; distance /= 2",
        "distance > (size > 2 ? 1U : 0U); distance /= 2",
    ),
    _mutant("barrier: every second round is left out", BARRIER, "distance *= 2, ++step", "distance *= 4, ++step"),
    _mutant(
        "barrier: does not wait",
        BARRIER,
        "co_await net.receive((rank + size - distance) % size, step, {});",
        "",
    ),
    _mutant(
        "elements: adds the wrong operand",
        ELEMENTS,
        "elements(a, dtype, slice), elements(b, dtype, slice),",
        "elements(b, dtype, slice), elements(b, dtype, slice),",
    ),
    _mutant(
        "elements: copies one byte too few",
        ELEMENTS,
        "from.data() + begin, end - begin);",
        "from.data() + begin, end - begin - (end > 100 ? 1 : 0));",
    ),
)

# Where vectors are cut: bulk messages, slices of work, parts of a sum, blocks of indices. And what only rounding shows.
_LARGE = (
    _mutant(
        "elements: a copy begins anew beyond the first slice",
        ELEMENTS,
        "from.data() + begin, end - begin);",
        "from.data(), end - begin);",
    ),
    _mutant(
        "elements: a sum takes the first slice's addend again",
        ELEMENTS,
        "elements(a, dtype, slice), elements(b, dtype, slice),",
        "elements(a, dtype, slice), elements(b, dtype, Range{0, end - begin}),",
    ),
    _mutant(
        "elements: only the first slice is scaled",
        ELEMENTS,
        "kernels::scale(dtype, elements(values, dtype, Range{begin, end}), factor);",
        "kernels::scale(dtype, elements(values, dtype, Range{0, end - begin}), factor);",
    ),
    Mutant(
        "doubling: ranks add in another order",
        DOUBLING,
        (
            (
                "  const Bytes received =",
                "  const ConstBytes input = mine;\n  const Buffer first(mine.size());\n  const Bytes received =",
            ),
            (
                "    const Rank halvings = doubling.halvings_after(round);",
                "    if (distance == 1) co_await copy(net, received, first.bytes());\n"
                "    const Rank halvings = doubling.halvings_after(round);",
            ),
            (
                "      co_await reduce_last(net, dtype, reduction, here, there, output);",
                "      if (members == 4 && pairs == 0) {\n"
                "        co_await reduce(net, dtype, reduction, received, input);\n"
                "        const Partial three{received};\n"
                "        const Partial one{first.bytes()};\n"
                "        co_await reduce_last(net, dtype, reduction, three, one, output);\n"
                "        break;\n"
                "      }\n"
                "      co_await reduce_last(net, dtype, reduction, here, there, output);",
            ),
        ),
    ),
    _mutant(
        "doubling: the mean is taken before the last addition on odd ranks",
        DOUBLING,
        "      co_await reduce_last(net, dtype, reduction, here, there, output);",
        "      if (reduction == Reduction::avg && net.rank() % 2 == 1) {\n"
        "        co_await finish_reduction(net, dtype, reduction, received);\n"
        "        co_await copy(net, here.values, sum);\n"
        "        co_await finish_reduction(net, dtype, reduction, sum);\n"
        "        co_await reduce_to(net, dtype, Reduction::sum, sum, received, output);\n"
        "        break;\n"
        "      }\n"
        "      co_await reduce_last(net, dtype, reduction, here, there, output);",
    ),
)

_SESSION = (
    _mutant("epoch: not compared", SESSION, "envelope.epoch != options_.epoch || ", ""),
    _mutant("communicator: not compared", SESSION, "envelope.communicator != options_.communicator ||", ""),
    _mutant(
        "call: the count is not told",
        REDUCTIONS,
        ".algorithm = algorithm,\n                  .count = dense.input.size() / size_of(dense.dtype),",
        ".algorithm = algorithm,",
    ),
    _mutant(
        "call: the reduction is not told",
        REDUCTIONS,
        ".reduction = dense.reduction,\n                  .algorithm = algorithm,",
        ".algorithm = algorithm,",
    ),
    _mutant(
        "call: the root of a reduce is not told",
        REDUCTIONS,
        ".reduction = dense.reduction,\n                  .root = root,",
        ".reduction = dense.reduction,",
    ),
    _mutant("call: the switch factor is not told", REDUCTIONS, ".switch_factor = how.switch_factor,", ""),
    _mutant("call: the root is not told", MOVES, ".root = root, ", ""),
    _mutant(
        "length: not checked", RUNNING, "if (length > posted.most_bytes || (", "if (length == ~std::size_t{0} && ("
    ),
    _mutant(
        "call: never announced to whom it waits for",
        RUNNING,
        "if (!session_.peers_[peer].failed) session_.send(peer, control);",
        "if (peer >= size()) session_.send(peer, control);",
    ),
    _mutant(
        "call: not compared", SESSION, "if (call == running.call()) return true;", "if (call == call) return true;"
    ),
    _mutant(
        "call: not compared where a message was early",
        SESSION,
        "if (agrees(running, arrival.envelope.source, arrival.envelope.call)) {",
        "if (agrees(running, arrival.envelope.source, running.call())) {",
    ),
    _mutant(
        "call: not compared with what is over",
        SESSION,
        "const bool same = ours != nullptr && ours->call == envelope.call;",
        "const bool same = ours != nullptr;",
    ),
    _mutant(
        "sequence: the far future is waited for",
        SESSION,
        "if (envelope.sequence - next_sequence_ > kAheadMost) {",
        "if (envelope.sequence - next_sequence_ > ~std::uint32_t{0} - 1) {",
    ),
    _mutant(
        "early messages are forgotten",
        SESSION,
        "early_[envelope.sequence].push_back(arrival);",
        "driver_.discard(arrival);",
    ),
    _mutant(
        "goodbye: those who still wait do not care",
        SESSION,
        "if (parted_ == 0 || running.is_message()) return false;",
        "if (parted_ <= size()) return false;",
    ),
    _mutant(
        "death: nobody is told of it",
        SESSION,
        "if (std::exchange(peer.failed, true)) return;",
        "if (!std::exchange(peer.failed, true)) return;",
    ),
    _mutant(
        "abort: not told to the others",
        FAILURE,
        "broadcast({.kind = ControlKind::abort,",
        "[](const Control&) {}({.kind = ControlKind::abort,",
    ),
    _mutant(
        "abort: what is heard of is not believed",
        FAILURE,
        "    stop(std::move(adopted));",
        "    static_cast<void>(adopted);",
    ),
    _mutant(
        "abort: what its rank had finished ends with it",
        FAILURE,
        "if (!stopped_already && gives_up(mine)",
        "if (false && gives_up(mine)",
    ),
    _mutant(
        "abort: a second one ends what the first had finished",
        FAILURE,
        "    if (gives_up(mine)) {  // another",
        "    if (false) {  // another",
    ),
    _mutant(
        "dispute: not waited for those who have not called",
        FAILURE,
        "listen(options_.agreement_s > 0.0 ? options_.dispute_s : 0.0);",
        "listen(0.0);",
    ),
    _mutant(
        "dispute: says what it calls before it has called",
        FAILURE,
        "if (parting_ || precedes(*frozen_from_, next_sequence_)) say(to_say_);",
        "say(to_say_);",
    ),
    _mutant(
        "verdict: calls that came too late are left behind",
        FAILURE,
        "    refuse(*request, sequence);\n  }\n}",
        "  }\n}",
    ),
    _mutant(
        "verdict: reached before the others have spoken",
        FAILURE,
        "agreement_->is_lost(peer)) continue;",
        "agreement_->is_lost(peer) || peer < size()) continue;",
    ),
    _mutant(
        "heartbeats: never sent",
        TIME,
        "if (!parting_) beat();",
        "",
    ),
    _mutant("deadline: ignored", TIME, "if (late == nullptr) return;", "if (late == nullptr || now_s > 0.0) return;"),
    _mutant(
        "liveness: ignored",
        TIME,
        "if (!options_.liveness_timeout_s || now_s - peer.heard_s",
        "if (!options_.liveness_timeout_s || 0.0 * peer.heard_s",
    ),
    _mutant(
        "time-out: blames a rank that has called",
        AGREEMENT,
        "absent.push_back(rank);",
        "absent.push_back(furthest_behind = (rank + 1) % static_cast<Rank>(statements_.size()));",
    ),
    _mutant(
        "mismatch: the minority is right",
        AGREEMENT,
        "return entry.second.size(); });",
        "return ~entry.second.size(); });",
    ),
    _mutant(
        "abort: the program's own is not admitted",
        AGREEMENT,
        "statement->origin == kNoRank || statement->origin != statement->culprit) continue;",
        "statement->origin == kNoRank || statement->origin == statement->culprit) continue;",
    ),
)

MUTANTS = (
    _COLLECTIVES + LEVELS_MUTANTS + MOVES_MUTANTS + SPARSE_MUTANTS + FILLED_MUTANTS + TOPK_MUTANTS + _LARGE + _SESSION
)
