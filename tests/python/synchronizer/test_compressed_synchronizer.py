"""A Synchronizer that compresses: what is sent and what waits is what was given, whatever the plan does."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from given_gradients import LARGE, NAMED, SHAPES, Rank, given, gradients_of, sgd, total
from handmade_buckets import Bucket, named
from synchronised_net import Broken, OnRanks
from torch import Tensor
from varied_options import module_of, objects_of

from telegrad import Communicator, DDPState, LowRank, TransportError, ddp_hook
from telegrad.cost.send_method import SendMethod
from telegrad.ddp import ByShape, BySize
from telegrad.errors import NonFiniteGradient
from telegrad.synchronizer import group_planning
from telegrad.synchronizer.group_planning import measured_ways

STEPS = 9


def assert_nothing_lost(
    results: list[tuple[list[dict[str, Tensor]], dict[str, Tensor]]], steps: int, atol: float
) -> None:
    """``results``: of each rank the averages of all steps, and what waits."""
    ranks, expected = len(results), given(len(results), steps)
    sent, waiting = total(results[0][0]), total([waits for _, waits in results])
    for name in SHAPES:
        whole = ranks * sent[name] + waiting.get(name, 0.0)
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=atol, msg=lambda text, name=name: name + text)
    for other, _ in results[1:]:
        for mine, theirs in zip(results[0][0], other, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


LOSSLESS: list[tuple[dict[str, Any], float]] = [
    ({}, 0.0),
    ({"plan": NAMED, "select": "topk"}, 0.0),
    ({"plan": "wfbp", "combine": "allgather"}, 0.0),
    ({"plan": "single", "combine": "oktopk"}, 0.0),
    ({"plan": "fixed", "combine": "bounded"}, 0.0),
    ({"plan": "fixed", "combine": "gtopk", "values": "raw"}, 0.0),
    ({"values": "int8"}, 0.5),
    ({"plan": "wfbp", "same_sign": True, "select": "topk"}, 0.5),
    ({"warmup_steps": 5}, 0.0),
    ({"warmup_steps": 5, "warmup": "falling", "select": "topk"}, 0.0),
    ({"compress": "cheapest"}, 0.0),
    ({"compress": "cheapest", "formats": ("bf16", "int8")}, 0.5),
    ({"policy": BySize(0.1, 16, "trimmed", dense=("hidden",))}, 0.0),
    ({"plan": NAMED, "compress": LowRank(2, 100)}, 0.01),
    ({"plan": "wfbp", "compress": LowRank(2, 100, "f32"), "warmup_steps": 5}, 0.01),
    ({"plan": "single", "compress": LowRank(policy=ByShape(2, 100, ("embedding",), 0.05))}, 0.01),
]
"""Options, and by how much rounding of what is sent may change the whole."""


# Their number matters to collectives (tests/conformance), and here to plans and to sums that keep a part.
@pytest.mark.parametrize(
    ("ranks", "options", "atol"),
    [
        pytest.param(ranks, options, atol, id=f"{ranks}-{named(options)}")
        for ranks in (1, 2, 4)
        for options, atol in LOSSLESS
        if ranks == 4 or not options or options.get("combine") == "oktopk"
    ],
)
def test_nothing_is_lost(on_ranks: OnRanks, ranks: int, options: dict[str, Any], atol: float) -> None:
    """``plan="auto"``, the default, plans after the fourth pass."""

    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, plan_after=4, **options)
        averages = [rank.step(gradients_of(comm.rank, step)) for step in range(STEPS)]
        assert (rank.sync.plan is None) == ("plan" in options)
        if options.get("compress") != "cheapest":
            assert rank.sync.stats is not None
            assert rank.sync.stats.selected > 0
            compressed = set(LARGE) - ({"hidden"} if "policy" in options else set())
            if getattr(options.get("compress"), "values", "") == "int8":
                compressed = set(SHAPES)  # small ones, of which rounding errors wait
            assert set(rank.waiting()) == compressed
            assert any(one.any() for one in rank.waiting().values())
        return averages, rank.waiting()

    assert_nothing_lost(on_ranks(ranks, run), STEPS, atol * ranks * STEPS)


def test_low_rank_with_default_arguments(on_ranks: OnRanks) -> None:
    """Groups are those of DDP's sizes, which are never planned anew."""

    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, compress=LowRank(2, 100), plan_after=3)
        averages = [rank.step(gradients_of(comm.rank, step)) for step in range(STEPS)]
        assert rank.sync.plan is None
        return averages, rank.waiting()

    assert_nothing_lost(on_ranks(2, run), STEPS, 0.1)


def test_low_rank_whose_averages_the_optimizer_waits_for(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        first, second = (Rank(comm, compress=LowRank(2, 100), plan=NAMED, waits=waits) for waits in (False, True))
        for step in range(4):
            gradients = gradients_of(comm.rank, step)
            expected = first.step(gradients)
            second.model.zero_grad()
            second.model(gradients).backward()
            second.sync.wait()
            assert all(torch.equal(one, expected[name]) for name, one in second.averages().items())
            second.trains.step()

    on_ranks(2, run)


def sparse_where_large(*_: object, **__: object) -> list[SendMethod]:
    """Only ``embedding``, alone, is of a length for which it pays."""
    return [
        SendMethod("dense", lambda size: 1.0 + size),
        SendMethod(
            "sparse", lambda size: 4300.0 if size <= 4800 else 1e5, lambda size: 1e-6, beside=lambda size: 1.0 + size
        ),
    ]


def test_ways_follow_from_the_plan(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_planning, "measured_ways", sparse_where_large)

    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, compress="cheapest", plan_after=3)
        averages = [rank.step(gradients_of(comm.rank, step)) for step in range(3)]
        assert rank.sync.stats is not None
        assert rank.sync.stats.selected == 0  # what is not planned yet goes densely
        plan = rank.sync.plan
        assert plan is not None
        sparse = [names for names, way in zip(rank.sync.groups, plan.ways, strict=True) if way == "sparse"]
        assert [name for names in sparse for name in names if name in LARGE] == ["embedding"]
        averages += [rank.step(gradients_of(comm.rank, step)) for step in range(3, STEPS)]
        waiting = rank.waiting()
        assert waiting["embedding"].any()
        assert not waiting["hidden"].any()
        return averages, waiting

    assert_nothing_lost(on_ranks(2, run), STEPS, 0.0)


def test_what_waits_survives_other_groups_and_leaves_with_a_dense_one(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, plan="single", select="topk")
        averages = [rank.step(gradients_of(comm.rank, step)) for step in range(3)]
        before = rank.waiting()
        rank.sync._set_groups(NAMED, ["sparse", "sparse"])
        assert all(torch.equal(before[name], one) for name, one in rank.waiting().items())
        averages += [rank.step(gradients_of(comm.rank, step)) for step in range(3, 6)]
        assert rank.waiting()["hidden"].any()
        rank.sync._set_groups(NAMED, ["dense", "sparse"])
        averages += [rank.step(gradients_of(comm.rank, step)) for step in range(6, STEPS)]
        assert not rank.waiting()["hidden"].any()
        assert rank.waiting()["embedding"].any()
        return averages, rank.waiting()

    assert_nothing_lost(on_ranks(2, run), STEPS, 0.0)


def test_at_a_density_of_one_it_is_dense(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        sparse, dense = Rank(comm, density=1.0, plan_after=3), Rank(comm, compress=None, plan="fixed")
        for step in range(5):
            gradients = {name: one / 7 for name, one in gradients_of(comm.rank, step).items()}
            averages, expected = sparse.step(gradients), dense.step(gradients)
            for name in SHAPES:
                torch.testing.assert_close(averages[name], expected[name], rtol=1e-6, atol=1e-5)

    on_ranks(3, run)


def test_bfloat16(on_ranks: OnRanks) -> None:
    """What rounding a rank's part loses waits. Ranks have the same gradients: the average loses nothing more."""

    def run(comm: Communicator) -> None:
        rank = Rank(comm, torch.bfloat16, plan="single", select="topk")
        applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        gradients = {name: (one / 12 + 64).to(torch.bfloat16) for name, one in gradients_of(0, 0).items()}
        for step in range(6):
            if step == 4:
                rank.sync._set_groups([[*SHAPES]], ["dense"])
            for name, one in rank.step(gradients).items():
                applied[name] += one.double()
        for name, one in rank.waiting().items():
            assert torch.equal(applied[name] + one, 6 * gradients[name].double())

    on_ranks(2, run)


def test_momentum_correction_is_sgd_with_momentum(on_ranks: OnRanks) -> None:
    """At a density of 1 without masking; densely at first, then planned."""
    model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(6):
        for name, one in model.items():
            one.grad = (gradients_of(0, step)[name] + gradients_of(1, step)[name]) / 2
        optimizer.step()

    def run(comm: Communicator) -> None:
        options: dict[str, Any] = {"optimizer": sgd, "momentum": 0.9, "masking": False, "warmup_steps": 2}
        rank = Rank(comm, density=1.0, plan_after=3, **options)
        for step in range(6):
            rank.step(gradients_of(comm.rank, step))
        for name, one in rank.model.named_parameters():
            torch.testing.assert_close(one.detach(), model[name].detach(), rtol=1e-5, atol=1e-2)
        assert set(rank.sync.state_dict()["compressor"]["velocities"]) == set(SHAPES)

    on_ranks(2, run)


def test_residuals_of_steps(on_ranks: OnRanks) -> None:
    """The learning rate falls while entries wait: they keep the one of their day."""

    def run(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(comm, plan="single", feedback="steps", optimizer=sgd, select="topk")
        optimizer = rank.sync._compression._scales._optimizer  # type: ignore[union-attr]
        assert optimizer is not None
        moved = []
        for step in range(6):
            optimizer.param_groups[0]["lr"] = rate = 0.5**step
            moved.append({name: rate * one for name, one in rank.step(gradients_of(comm.rank, step)).items()})
        return total(moved), rank.waiting()

    results = on_ranks(2, run)
    for name in LARGE:
        expected = sum(0.5**step * gradients_of(rank, step)[name].double() for rank in range(2) for step in range(6))
        torch.testing.assert_close(
            2 * results[0][0][name] + total([w for _, w in results])[name], expected, atol=1e-2, rtol=0
        )


@pytest.mark.parametrize(
    ("warmup", "entries"), [("dense", [2200, 2200, 22, 22]), ("falling", [550, 35, 22, 22])], ids=["dense", "falling"]
)
def test_the_first_steps(on_ranks: OnRanks, warmup: str, entries: list[int]) -> None:
    """How many entries sums of at most k have: with two steps of warm-up the density is 25 % and 1.56 %, then 1 %."""

    def run(comm: Communicator) -> None:
        options: dict[str, Any] = {"warmup": warmup, "warmup_steps": 2, "density": 0.01}
        rank = Rank(comm, plan="single", combine="gtopk", select="topk", **options)
        for step, most in enumerate(entries):
            gradients = {name: one + 6 for name, one in gradients_of(comm.rank, step).items()}  # none is zero
            averages = rank.step(gradients)
            found = sum(int(averages[name].count_nonzero()) for name in LARGE)
            assert found <= most
            assert found > 0.9 * most

    on_ranks(2, run)


@pytest.mark.parametrize(("options", "atol"), [({}, 0.0), ({"compress": LowRank(2, 100)}, 0.01)], ids=named)
def test_what_some_or_no_ranks_use(on_ranks: OnRanks, options: dict[str, Any], atol: float) -> None:
    """``hidden`` is used by rank 0 only in step 1, and then by nobody."""
    without = ("embedding", "norm", "bias")

    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, plan="single", **options)
        averages = [rank.step(gradients_of(comm.rank, 0))]
        before = rank.waiting()["hidden"]
        averages.append(rank.step(gradients_of(comm.rank, 1, tuple(SHAPES) if comm.rank == 0 else without)))
        waiting = rank.waiting()
        if comm.rank == 0 or not options:  # in 8 bits each rank has a part of the sum, and of its rounding error
            assert torch.equal(before, waiting["hidden"]) == (comm.rank == 1)
        assert "hidden" not in rank.step(gradients_of(comm.rank, 2, without))
        rank.model.hidden.grad = averages[0]["hidden"].clone()
        rank.model(gradients_of(comm.rank, 3, without)).backward()  # type: ignore[no-untyped-call]
        assert torch.equal(rank.averages()["hidden"], averages[0]["hidden"])  # keeps what it had
        assert torch.equal(waiting["hidden"], rank.waiting()["hidden"])
        return averages, waiting

    results = on_ranks(2, run)
    of_hidden = [gradients_of(0, 0), gradients_of(1, 0), gradients_of(0, 1)]
    whole = 2 * total(results[0][0])["hidden"] + total([waits for _, waits in results])["hidden"]
    torch.testing.assert_close(whole, total(of_hidden)["hidden"], rtol=0, atol=atol)


def test_an_average_that_one_rank_still_holds_follows(on_ranks: OnRanks) -> None:
    """Rank 1 has not set its gradient to zero, and does not use the parameter in this pass."""
    held = torch.full(SHAPES["hidden"], 12.0)

    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        rank = Rank(comm, plan="wfbp", select="topk")
        names = tuple(SHAPES) if comm.rank == 0 else ("embedding", "norm", "bias")
        if comm.rank == 1:
            rank.model.hidden.grad = held.clone()
        rank.model(gradients_of(comm.rank, 0, names)).backward()
        rank.trains.step()
        return rank.averages()["hidden"].double(), rank.waiting()["hidden"]

    (average, first), (_, second) = on_ranks(2, run)
    assert torch.equal(second, held.double())
    assert torch.equal(2 * average + first, gradients_of(0, 0)["hidden"].double())


@pytest.mark.parametrize(("options", "atol"), [({}, 0.0), ({"compress": LowRank(2, 100)}, 0.01)], ids=named)
def test_accumulation(on_ranks: OnRanks, options: dict[str, Any], atol: float) -> None:
    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, plan_after=3, **options)
        averages = []
        for step in range(0, 12, 3):
            rank.model.zero_grad()
            for part in range(3):
                with rank.sync.no_sync() if part < 2 else contextlib.nullcontext():
                    rank.model(gradients_of(comm.rank, step + part)).backward()
            averages.append(rank.averages())
            rank.trains.step()
        assert rank.sync.state_dict()["step"] == 4
        return averages, rank.waiting()

    assert_nothing_lost(on_ranks(2, run), 12, atol)


@pytest.mark.parametrize("compression", ["topk", "cheapest"])
def test_each_rank_clips_its_own_gradient(on_ranks: OnRanks, compression: str) -> None:
    norms = [float(torch.cat([one.flatten() for one in gradients_of(rank, 0).values()]).norm()) for rank in range(2)]
    most = 0.9 * min(norms)
    factors = [most / norm for norm in norms]

    def run(comm: Communicator) -> None:
        rank = Rank(comm, compress=compression, density=1.0, clip_norm=most * math.sqrt(2))
        averages = rank.step(gradients_of(comm.rank, 0))
        for name in SHAPES:
            expected = sum(factor * gradients_of(which, 0)[name] for which, factor in enumerate(factors)) / 2
            torch.testing.assert_close(averages[name], expected, rtol=1e-4, atol=1e-2)
        averages = rank.step({name: one / 1000 for name, one in gradients_of(comm.rank, 1).items()})
        expected = (gradients_of(0, 1)["bias"] + gradients_of(1, 1)["bias"]) / 2000
        torch.testing.assert_close(averages["bias"], expected)  # not scaled up

    on_ranks(2, run)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_plans_know_that_what_is_clipped_leaves_at_the_end(on_ranks: OnRanks, clip_norm: float | None) -> None:
    def run(comm: Communicator) -> None:
        rank = Rank(comm, plan_after=3, clip_norm=clip_norm, replan_factor=None)
        for step in range(12):
            rank.step(gradients_of(comm.rank, step))
        plan, trace = rank.sync.plan, rank.sync.trace
        assert plan is not None
        assert trace is not None
        at_end = trace.all_at_once().backward_times
        assert trace.backward_times != at_end
        assert plan.backward_times == (trace.backward_times if clip_norm is None else at_end)

    on_ranks(2, run)


def test_nan_is_told_on_all_ranks(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> str:
        rank = Rank(comm, plan="single")
        rank.step(gradients_of(comm.rank, 0))
        comm.barrier()  # who tells the others ends what they still wait for, too
        gradients = gradients_of(comm.rank, 1)
        if comm.rank == 1:
            gradients["hidden"][3, 4] = math.nan
        before = rank.waiting()
        with pytest.raises(NonFiniteGradient if comm.rank == 1 else TransportError) as caught:
            rank.step(gradients)
        if comm.rank == 1:
            assert all(torch.equal(before[name], one) for name, one in rank.waiting().items())
        return str(caught.value)

    for said in on_ranks(2, run):
        assert "1 of 1000 entries in the gradient of 'hidden' are NaN or infinite" in said
        assert "choose nonfinite='send'" in said


@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_nan_is_sent(on_ranks: OnRanks, way: str) -> None:
    def run(comm: Communicator) -> None:
        rank = Rank(comm, plan="single", nonfinite="send")
        rank.step(gradients_of(comm.rank, 0))
        rank.sync._set_groups([[*SHAPES]], [way])
        gradients = gradients_of(comm.rank, 1)
        if comm.rank == 1:
            gradients["hidden"][3, 4] = math.nan
        before = rank.waiting()["hidden"][3, 4]
        averages = rank.step(gradients)
        assert averages["hidden"].isnan().sum() == 1
        assert averages["hidden"][3, 4].isnan()
        waiting = rank.waiting()["hidden"]
        assert waiting.isfinite().all()
        if comm.rank == 1:
            assert waiting[3, 4] == before

    on_ranks(2, run)


def test_a_pass_without_compressed_parameters(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        rank = Rank(comm, small_elements=10_000, plan_after=3)
        for step in range(5):
            averages = rank.step(gradients_of(comm.rank, step))
            expected = (gradients_of(0, step)["hidden"] + gradients_of(1, step)["hidden"]) / 2
            assert torch.equal(averages["hidden"], expected)
        assert rank.sync.plan is not None
        assert {*rank.sync.plan.ways} == {"dense"}
        assert rank.sync.state_dict()["compressor"]["parameters"] == {}

    on_ranks(2, run)


@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.05, "small_elements": 16, "momentum": 0.9, "values": "raw-bf16"},
        {"compress": LowRank(2, 100)},
        {"compress": LowRank(values="f32", policy=ByShape(2, 100, ("embedding",), 0.05))},
    ],
    ids=named,
)
def test_averages_are_those_of_a_ddp_state(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    """The same bits, with one bucket for all."""

    def run(comm: Communicator) -> None:
        rank = Rank(comm, plan=[[*SHAPES]], optimizer=sgd, **options)
        parameters = dict(rank.model.named_parameters())
        state = DDPState(comm, module_of(parameters), **objects_of(optimizer=sgd(parameters.values()), **options))
        for step in range(5):
            gradients = gradients_of(comm.rank, step)
            buffer = torch.cat([gradients[name].flatten() for name in SHAPES])
            bucket = Bucket([*parameters.values()], buffer, 0, True)
            expected = ddp_hook(state, bucket).wait().split([one.numel() for one in parameters.values()])  # type: ignore[arg-type]
            averages = rank.step(gradients)
            for name, one in zip(SHAPES, expected, strict=True):
                assert torch.equal(averages[name].flatten(), one)
        ours, theirs = rank.sync.state_dict()["compressor"], state.state_dict()["compressor"]
        groups = {"parameters": "residual", "velocities": "velocity"}
        for group, kind in ((one, kind) for one, kind in groups.items() if one in theirs):
            assert ours[group].keys() == theirs[group].keys()
            assert all(torch.equal(one[kind], theirs[group][name][kind]) for name, one in ours[group].items())
        assert rank.sync.stats is not None
        assert rank.sync.stats.selected == state.stats.selected
        assert rank.sync.stats.elements == state.stats.elements

    on_ranks(2, run)


def test_what_waits_is_worth_its_own_learning_rate_in_a_dense_sum_too(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        parameters: list[torch.optim.Optimizer] = []

        def made(of: Any) -> torch.optim.Optimizer:
            parameters.append(sgd(of))
            return parameters[-1]

        rank = Rank(comm, plan="single", feedback="steps", optimizer=made, select="topk")
        moved = torch.zeros(SHAPES["hidden"], dtype=torch.float64)
        for step, rate in enumerate((0.5, 0.25, 0.125, 0.0, 0.0625)):
            parameters[0].param_groups[0]["lr"] = rate
            if step == 2:
                rank.sync._set_groups([[*SHAPES]], ["dense"])
            moved += rate * rank.step(gradients_of(comm.rank, step))["hidden"].double()
        return moved, rank.waiting()["hidden"]

    results = on_ranks(2, run)
    expected = sum(
        rate * gradients_of(rank, step)["hidden"].double()
        for rank in range(2)
        for step, rate in enumerate((0.5, 0.25, 0.125, 0.0, 0.0625))
    )
    assert not any(waits.any() for _, waits in results)
    assert torch.equal(2 * results[0][0], expected)


@pytest.mark.parametrize(("options", "atol"), [({}, 0.0), ({"compress": LowRank(2, 100)}, 0.01)], ids=named)
def test_after_a_pass_that_was_broken_off(on_ranks: OnRanks, options: dict[str, Any], atol: float) -> None:
    """What it sent is lost with it; then ranks agree again, and nothing more is."""

    def run(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Rank(comm, plan=[["bias"], ["norm"], ["hidden"], ["embedding"]], **options)
        gradients = gradients_of(comm.rank, 7)
        loss = rank.model({name: gradients[name] for name in ("bias", "norm")})
        broken = Broken.apply(rank.model.embedding).sum() + rank.model.hidden.sum()  # type: ignore[no-untyped-call]
        with pytest.raises(ArithmeticError):
            (loss + broken).backward()
        rank.model.zero_grad()
        before = rank.waiting()
        assert not before["embedding"].any()
        averages = [rank.step(gradients_of(comm.rank, step)) for step in range(3)]
        waiting = rank.waiting()
        return averages, {name: one - before[name] for name, one in waiting.items()}

    assert_nothing_lost(on_ranks(2, run), 3, atol)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"compress": "cheapest"}, ["dense", "sparse"]),
        ({"compress": "cheapest", "formats": "qsgd8"}, ["dense", "sparse", "qsgd8"]),
        ({"compress": "quantised", "formats": ["int8", "bf16"]}, ["int8", "bf16"]),
        ({"compress": "topk", "combine": "oktopk", "values": "raw"}, ["sparse"]),
        ({"momentum": 0.9, "optimizer": sgd, "select": "topk"}, ["sparse"]),
        ({"small_elements": 10_000}, ["dense"]),
    ],
    ids=["cheapest", "cheapest-qsgd8", "quantised", "topk", "momentum", "nothing to compress"],
)
def test_ways_are_timed_alike_on_all_ranks(on_ranks: OnRanks, options: dict[str, Any], names: list[str]) -> None:
    sizes = (0, 1 << 10, 5000, 1 << 16, 1 << 20)

    def run(comm: Communicator) -> list[list[float]]:
        rank = Rank(comm, **options)
        compression = rank.sync._compression
        assert compression is not None
        before = rank.sync.state_dict()
        ways = measured_ways(compression, comm, most_bytes=1 << 18)
        assert str(rank.sync.state_dict()) == str(before)
        assert [way.name for way in ways] == names
        assert all(way.cost(size) > 0 for way in ways for size in sizes)
        assert all(way.busy is not None and way.busy(1 << 16) > 0 for way in ways)
        assert all((way.busy_beside is None) == (way.name == "dense") for way in ways)
        assert all((way.delay(1 << 16) > 0) == (way.name != "dense") == (way.beside is not None) for way in ways)
        return [[*map(way.cost, sizes), *map(way.delay, sizes)] for way in ways]

    first, second = on_ranks(2, run)
    assert first == second
