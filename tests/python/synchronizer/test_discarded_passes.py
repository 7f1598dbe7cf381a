"""Gradients that the program throws away leave nothing in residuals and velocities: training is, bit for bit, as if
their backward passes had never been."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from given_gradients import LARGE, Given, Rank, gradients_of, sgd, total
from handmade_buckets import named
from synchronised_net import Broken, OnRanks
from torch import Tensor

from telegrad import Communicator, LowRank
from telegrad.ddp import gradients_used

STEPS = 5
Discard = Callable[[Rank, dict[str, Tensor]], None]


def backward(rank: Rank, gradients: dict[str, Tensor]) -> None:
    rank.model(gradients).backward()


def clears(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    """As a GAN's step of the generator does to the discriminator."""
    backward(rank, thrown_away)
    rank.model.zero_grad()


def fills_with_zeros(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    backward(rank, thrown_away)
    rank.model.zero_grad(set_to_none=False)


def clears_twice(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    for _ in range(2):
        clears(rank, thrown_away)


def clears_what_was_added(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    """Two passes without a step between them, one on top of the other."""
    for _ in range(2):
        backward(rank, thrown_away)
    rank.model.zero_grad()


def clears_after_no_sync(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    clears(rank, thrown_away)
    with rank.sync.no_sync():
        backward(rank, thrown_away)
    rank.model.zero_grad()


def moves_and_returns(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    """As SAM's first half: the parameters move by hand, and back after the second."""
    backward(rank, thrown_away)
    with torch.no_grad():
        for one in rank.model.parameters():
            one.add_(one.grad)
            one.sub_(one.grad)
            one.add_(1.0)
    rank.model.zero_grad()


def steps_another_optimizer(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    """The optimizer of the other player's parameters uses nothing of these."""
    backward(rank, thrown_away)
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    sgd([other]).step()
    rank.model.zero_grad()


def steps_without_gradients(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    clears(rank, thrown_away)
    rank.trains.step()


def steps_on_zeros(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    """As programs do that zero a bad gradient and step nevertheless."""
    backward(rank, thrown_away)
    rank.model.zero_grad(set_to_none=False)
    rank.trains.step()


def breaks_off(rank: Rank, thrown_away: dict[str, Tensor]) -> None:
    """An exception ends the pass when one group has left."""
    parts = [Broken.apply(rank.model.embedding.flatten()[:1].clone()).sum(), rank.model(thrown_away)]
    with contextlib.suppress(ArithmeticError):
        torch.stack(parts).sum().backward()
    rank.model.zero_grad()


DISCARDS: list[Discard] = [
    clears,
    fills_with_zeros,
    clears_twice,
    clears_what_was_added,
    clears_after_no_sync,
    moves_and_returns,
    steps_another_optimizer,
    steps_without_gradients,
    steps_on_zeros,
]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"select": "topk"},
    {"momentum": 0.5, "optimizer": sgd},
    {"momentum": 0.5, "optimizer": sgd, "nesterov": True, "plan": "wfbp"},
    {"feedback": "steps", "optimizer": sgd},
    {"values": "packed-bf16"},
    {"compress": "quantised", "formats": "int8"},
    {"clip_norm": 1000.0},
]


def memory(rank: Rank) -> dict[str, Any]:
    return rank.sync.state_dict()["compressor"]


def assert_same_memory(mine: Any, expected: Any) -> None:
    assert mine.keys() == expected.keys()
    for key, one in mine.items():
        if isinstance(one, dict):
            assert_same_memory(one, expected[key])
        elif hasattr(one, "dtype"):
            assert (one == expected[key]).all(), key
        else:
            assert one == expected[key], key


def trained(comm: Communicator, discard: Discard | None, **options: Any) -> tuple[Any, ...]:
    """Averages of all steps, what is remembered at the end, and how many passes were discarded."""
    rank = Rank(comm, **{"plan": "fixed", **options})
    averages = []
    for step in range(STEPS):
        averages.append(rank.step(gradients_of(comm.rank, step)))
        rank.model.zero_grad()
        if discard is not None:
            discard(rank, {name: 100 * one for name, one in gradients_of(comm.rank, 50 + step).items()})
    assert rank.sync.stats is not None
    return averages, memory(rank), rank.sync.stats.discarded_passes


@pytest.mark.parametrize(
    ("discard", "options"),
    [
        pytest.param(discard, options, id=f"{discard.__name__}-{named(options)}")
        for number, discard in enumerate(DISCARDS)
        for place, options in enumerate(OPTIONS)
        if (place + number) % 4 == 0 or discard is clears  # each with two of the others
    ],
)
def test_is_as_if_it_had_never_been(on_ranks: OnRanks, discard: Discard, options: dict[str, Any]) -> None:
    expected = on_ranks(2, lambda comm: trained(comm, None, **options))
    found = on_ranks(2, lambda comm: trained(comm, discard, **options))
    for (averages, remembered, discarded), (right, right_memory, none) in zip(found, expected, strict=True):
        assert discarded >= STEPS
        assert none == 0
        for mine, theirs in zip(averages, right, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert_same_memory(remembered, right_memory)


def test_a_pass_that_broke_off_leaves_nothing(on_ranks: OnRanks) -> None:
    expected = on_ranks(2, lambda comm: trained(comm, None, plan="wfbp"))
    found = on_ranks(2, lambda comm: trained(comm, breaks_off, plan="wfbp"))
    for (averages, remembered, _), (right, right_memory, _) in zip(found, expected, strict=True):
        for mine, theirs in zip(averages, right, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert_same_memory(remembered, right_memory)


def test_only_parameters_without_a_step_are_reverted(on_ranks: OnRanks) -> None:
    """Generator and discriminator in one model, with an optimizer each."""

    def run(comm: Communicator) -> Any:
        rank = Rank(comm, plan="fixed")
        mine, other = sgd([rank.model.embedding]), sgd([rank.model.hidden])
        for _ in range(2):
            rank.backward(gradients_of(comm.rank, 0))
            mine.step()
            other.step()
        before = memory(rank)["parameters"]
        rank.backward(gradients_of(comm.rank, 1))
        mine.step()
        rank.model.zero_grad()
        return before, memory(rank)["parameters"]

    for before, after in on_ranks(2, run):
        assert (before["hidden"]["residual"] == after["hidden"]["residual"]).all()
        assert (before["embedding"]["residual"] != after["embedding"]["residual"]).any()


def accumulates(rank: Rank, gradients: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Without ``no_sync``: the second pass averages the first one's average again."""
    rank.backward(gradients)
    backward(rank, more)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_that_are_added_to_count_with_the_step(on_ranks: OnRanks, in_place: bool) -> None:
    """Nothing is lost: what both passes gave is in the average and in what waits."""

    def run(comm: Communicator) -> Any:
        rank = Rank(comm, plan="fixed", select="topk")
        accumulates(rank, gradients_of(comm.rank, 0), gradients_of(comm.rank, 1))
        average = rank.averages()
        rank.trains.step()
        rank.model.zero_grad(set_to_none=not in_place)
        assert rank.sync.stats is not None
        assert rank.sync.stats.discarded_passes == 0
        return average, rank.waiting()

    (average, waits), (_, others_wait) = on_ranks(2, run)
    for name in ("embedding", "hidden"):
        given = sum(gradients_of(rank, step)[name].double() for rank in range(2) for step in range(2))
        torch.testing.assert_close(2 * average[name].double() + waits[name] + others_wait[name], given, rtol=0, atol=0)


@pytest.mark.parametrize("collective", ["oktopk", "gtopk"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_average_of_zeros_is_not_cleared(on_ranks: OnRanks, collective: str, by_hand: bool) -> None:
    """Of sums that keep a part, nothing may be left of a parameter whose gradients are small: all of it waits."""

    def run(comm: Communicator) -> Any:
        rank = Rank(comm, plan="single", combine=collective, select="topk")
        for step in range(2):
            gradients = gradients_of(comm.rank, step)
            backward(rank, {**gradients, "hidden": gradients["hidden"] / 4096})
            if by_hand:
                with torch.no_grad():
                    for one in rank.model.parameters():
                        one -= 0.1 * one.grad
                rank.model.zero_grad()
        assert by_hand or not rank.model.hidden.grad.any()
        if not by_hand:
            rank.trains.step()
        waits = rank.waiting()["hidden"]
        assert rank.sync.stats is not None
        assert rank.sync.stats.discarded_passes == 0
        return waits

    waiting = on_ranks(2, run)
    for rank, waits in enumerate(waiting):
        given = sum(gradients_of(rank, step)["hidden"].double() / 4096 for step in range(2))
        torch.testing.assert_close(waits, given, rtol=1e-6, atol=1e-9)


def test_gradients_much_smaller_than_those_of_other_matrices_travel_in_8_bits(on_ranks: OnRanks) -> None:
    """They share a scale with others, so they wait until that of their columns follows."""
    hidden = torch.outer(torch.arange(20.0), torch.arange(50.0) - 20)
    factors = [1.0, *[1 / 1024] * 24]

    def run(comm: Communicator) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        rank, found = Rank(comm, plan="single", compress=LowRank(2, 100)), []
        for step, factor in enumerate(factors):
            average = rank.step({**gradients_of(comm.rank, step), "hidden": factor * hidden})
            found.append((average, rank.waiting()))
        return found

    results = on_ranks(2, run)
    came = [bool(average["hidden"].any()) for average, _ in results[0]]
    assert came[0]
    assert all(came[8:])
    sent = 2 * total([average for average, _ in results[0]])["hidden"]
    kept = total([one[-1][1] for one in results])["hidden"]
    torch.testing.assert_close(sent + kept, 2 * sum(factors) * hidden.double(), rtol=0, atol=1e-2)


@pytest.mark.parametrize("discard", [clears, clears_twice, clears_what_was_added, clears_after_no_sync])
def test_what_low_rank_discards_is_neither_sent_nor_kept(on_ranks: OnRanks, discard: Discard) -> None:
    """The next pass starts from another Q, the same on all ranks."""
    results = on_ranks(2, lambda comm: trained(comm, discard, compress=LowRank(2, 100)))
    assert all(discarded >= STEPS for _, _, discarded in results)
    for name in LARGE:
        given = sum(gradients_of(rank, step)[name].double() for rank in range(2) for step in range(STEPS))
        sent = 2 * total(results[0][0])[name]
        kept = sum(memory["parameters"][name]["residual"].double().view_as(given) for _, memory, _ in results)
        torch.testing.assert_close(sent + kept, given, rtol=0, atol=0.01)


def test_a_state_has_nothing_of_gradients_that_no_step_has_used(on_ranks: OnRanks) -> None:
    """Where training goes on from it, that pass is made again."""

    def run(comm: Communicator) -> None:
        rank = Rank(comm, plan="fixed")
        rank.step(gradients_of(comm.rank, 0))
        before = memory(rank)
        rank.backward(gradients_of(comm.rank, 1))
        assert_same_memory(memory(rank), before)
        rank.trains.step()
        assert (memory(rank)["parameters"]["hidden"]["residual"] != before["parameters"]["hidden"]["residual"]).any()

    on_ranks(2, run)


def by_hand(model: Given) -> None:
    with torch.no_grad():
        for one in model.parameters():
            one -= 0.1 * one.grad


def by_data(model: Given) -> None:
    for one in model.parameters():
        one.data.add_(one.grad.data, alpha=-0.1)


def by_copies(model: Given) -> None:
    """As from master weights, of which no value shows."""
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.clone())


@pytest.mark.parametrize("update", [by_hand, by_data, by_copies])
def test_parameters_that_the_program_updates_itself(on_ranks: OnRanks, update: Callable[[Given], None]) -> None:
    """Nobody says when: the passes after which values have changed count, and a warning says so once."""

    def run(comm: Communicator) -> Any:
        rank = Rank(comm, plan="fixed")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(STEPS):
                clears(rank, gradients_of(comm.rank, 50 + step))
                rank.backward(gradients_of(comm.rank, step))
                update(rank.model)
            remembered = memory(rank)
        assert rank.sync.stats is not None
        assert rank.sync.stats.discarded_passes == STEPS
        return remembered, [str(one.message) for one in told if "takes that pass as used" in str(one.message)]

    expected = on_ranks(2, lambda comm: trained(comm, None))
    with warnings.catch_warnings():  # threads share the filters
        warnings.simplefilter("ignore")
        found = on_ranks(2, run)
    for (remembered, _), (_, right, _) in zip(found, expected, strict=True):
        assert_same_memory(remembered, right)


@pytest.fixture
def one_rank() -> Iterator[Rank]:
    with Communicator.local(1)[0] as comm:
        yield Rank(comm, plan="fixed")


def test_the_warning_names_the_parameter_and_comes_once(one_rank: Rank) -> None:
    one_rank.backward(gradients_of(0, 0))
    by_hand(one_rank.model)
    with pytest.warns(
        RuntimeWarning, match=r"no torch.optim.Optimizer has stepped parameter 'hidden' .*optimizer="
    ) as found:
        backward(one_rank, gradients_of(0, 1))
    assert found[0].filename == __file__  # that of backward() above
    by_hand(one_rank.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_rank.backward(gradients_of(0, 2))


def test_a_warning_where_no_pass_is_used_for_long(one_rank: Rank) -> None:
    """As where an optimizer has float32 master weights, whose steps a bfloat16 model's values do not show."""
    for step in range(19):
        clears(one_rank, gradients_of(0, step))
    clears(one_rank, gradients_of(0, 19))
    with pytest.warns(
        RuntimeWarning, match=r"20 backward passes in a row of parameter 'hidden'.*gradients_used\(\)"
    ) as found:
        one_rank.sync.state_dict()
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(30):
            clears(one_rank, gradients_of(0, step))


def test_no_such_warning_where_some_are_used(one_rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(60):
            clears(one_rank, gradients_of(0, step))
            if step % 15 == 0:
                backward(one_rank, gradients_of(0, step))
                gradients_used(one_rank.model.parameters())
                one_rank.model.zero_grad()


def test_a_fused_optimizer_that_a_scaler_makes_skip_the_step() -> None:
    """GradScaler calls its step nevertheless, with found_inf."""
    with Communicator.local(1)[0] as comm:
        rank = Rank(comm, plan="fixed", nonfinite="send", select="topk")
        fused = torch.optim.SGD(rank.model.parameters(), lr=0.5, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            before = memory(rank)
            gradients = gradients_of(0, step)
            overflows = step == 1
            if overflows:
                gradients["hidden"][0, 0] = torch.inf
            scaler.scale(rank.model(gradients)).backward()
            values = rank.model.hidden.detach().clone()
            scaler.step(fused)
            scaler.update()
            rank.model.zero_grad()
            assert torch.equal(rank.model.hidden.detach(), values) == overflows
            if overflows:
                assert_same_memory(memory(rank), before)
            else:
                with pytest.raises(AssertionError):
                    assert_same_memory(memory(rank), before)


def test_no_warning_where_an_optimizer_steps(one_rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            clears(one_rank, gradients_of(0, 50 + step))
            one_rank.step(gradients_of(0, step))
        one_rank.sync.state_dict()


def test_gradients_that_are_taken_away_to_be_combined(on_ranks: OnRanks) -> None:
    """As gradient surgery does: said to be used, nothing of them is lost."""

    def run(comm: Communicator) -> Any:
        rank = Rank(comm, plan="fixed", select="topk")
        taken = []
        for step in range(2):
            taken.append(rank.backward(gradients_of(comm.rank, step)))
            gradients_used(rank.model.parameters())
            rank.model.zero_grad()
        assert rank.sync.stats is not None
        waits = rank.waiting()
        assert rank.sync.stats.discarded_passes == 0
        return taken, waits

    (taken, waits), (_, others_wait) = on_ranks(2, run)
    for name in ("embedding", "hidden"):
        given = sum(gradients_of(rank, step)[name].double() for rank in range(2) for step in range(2))
        sent = sum(2 * one[name].double() for one in taken)
        torch.testing.assert_close(sent + waits[name] + others_wait[name], given, rtol=0, atol=0)


def test_gradients_used_takes_parameters() -> None:
    for wrong in (torch.nn.Linear(2, 2), torch.ones(2), 3):
        with pytest.raises(TypeError, match=r"parameters is a \w+: give several, as model.parameters\(\)"):
            gradients_used(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parameters has a str: give tensors"):
        gradients_used(["weight"])  # type: ignore[list-item]
    gradients_used([torch.nn.Parameter(torch.ones(2))])


def test_hooks_go_with_the_synchronizer(one_rank: Rank) -> None:
    import gc

    assert one_rank.model.hidden._backward_hooks
    one_rank.sync.close()
    model = one_rank.model
    del one_rank.sync
    gc.collect()
    assert not model.hidden._backward_hooks
