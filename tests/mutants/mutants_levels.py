"""Bugs planted into sums on two levels; see mutants.py."""

from __future__ import annotations

from mutant import mutant as _mutant

DENSE = "collectives/dense/allreduce_two_level.cpp"
SPARSE = "collectives/sparse/two_level.cpp"
NODES = "collectives/support/nodes.cpp"

LEVELS_MUTANTS = (
    _mutant(
        "two-level: gathered before it is summed between nodes",
        DENSE,
        "co_await summed_[segment % kLanesBetween].until(segment / kLanesBetween + 1);",
        "co_await reduced_[segment % kLanesBetween].until(segment / kLanesBetween + 1);",
    ),
    _mutant(
        "two-level: a lane sums a segment that is not reduced yet",
        DENSE,
        "co_await reduced_[lane].until(done);",
        "co_await reduced_[lane].until(done - 1);",
    ),
    _mutant(
        "two-level: an average is divided inside of nodes too",
        DENSE,
        "reduce_scatter(group, dtype_, summing(), elements(input_",
        "reduce_scatter(group, dtype_, reduction_, elements(input_",
    ),
    _mutant(
        "two-level: an average is never divided",
        DENSE,
        "finish_reduction(net_, dtype_, reduction_, slice)",
        "finish_reduction(net_, dtype_, summing(), slice)",
    ),
    _mutant(
        "two-level: a segment's phases inside have the same steps",
        DENSE,
        "(static_cast<Step>(segment) * 2 + phase) * kPhaseSteps",
        "(static_cast<Step>(segment) + phase) * kPhaseSteps",
    ),
    _mutant(
        "two-level: owners of the last node do not take part",
        DENSE,
        "bool owns() const { return place_ < nodes_.slices(); }",
        "bool owns() const { return place_ < nodes_.slices() && node_ + 1 < nodes_.count(); }",
    ),
    _mutant(
        "two-level streams: indices stay counted from the slice's begin",
        SPARSE,
        "    if (!slice.dense) move_indices(slice.indices.span(), static_cast<std::uint32_t>(slice.range.begin));\n",
        "",
    ),
    _mutant(
        "two-level streams: an average is not divided",
        SPARSE,
        "    if (how_.reduction == Reduction::avg && !rounds_means()) co_await divide_by_ranks(net_, slice);\n",
        "",
    ),
    _mutant(
        "two-level streams: the first rank's slice is not summed between nodes",
        SPARSE,
        "if (place_ < nodes_.slices()) co_await",
        "if (place_ < nodes_.slices() && place_ != 0) co_await",
    ),
    _mutant(
        "nodes: a slice's owners are neighbours of its owners",
        NODES,
        "owners.push_back(node[slice]);",
        "owners.push_back(node[&node == &members_.back() ? slices_ - 1 - slice : slice]);",
    ),
    _mutant(
        "nodes: an open sum between them has the steps of the one of all ranks",
        "collectives/sparse/auto.cpp",
        "knows_levels(how) ? kOpenAboveLevels : kOpenSteps",
        "kOpenSteps",
    ),
    _mutant(
        "nodes: vectors of an open sum are not added on two levels",
        "collectives/sparse/as_dense.cpp",
        "how.reduction, addend, sum);\n}",
        "how.reduction == Reduction::sum ? Reduction::max : how.reduction, addend, sum);\n}",
    ),
)
