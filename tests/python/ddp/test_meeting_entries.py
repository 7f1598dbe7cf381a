"""``combine=``: how the ranks' entries meet, and what goes back into the residuals."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, given, gradients_of, named, plain_sgd

from telegrad import BoundedTopk, Communicator, NonFiniteGradient, TopK
from telegrad.ddp.options import COMBINE
from telegrad.ddp.telemetry import DDPStats

OnRanks = Callable[..., list[Any]]
STEPS = 100  # thresholds are found anew at every 32nd, slices cut at every 64th


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """``x`` with all but its k largest magnitudes zero; what ties with the least of them stays."""
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_first_sum_has_the_largest_of_the_largest(on_ranks: OnRanks, ranks: int) -> None:
    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = Trainer(comm, select="topk", combine="oktopk")
        averages = trainer.step(gradients_of(comm.rank, 0), REBUILT)
        return averages, {name: trainer.waiting(name) for name in LARGE}

    outcomes = on_ranks(ranks, run)
    for name in LARGE:
        k = round(0.05 * np.prod(SHAPES[name]))
        gradients = [gradients_of(rank, 0)[name] for rank in range(ranks)]
        selected = []
        for gradient in gradients:
            order = np.argsort(-np.abs(gradient), kind="stable")[:k]
            selected.append(np.zeros_like(gradient))
            selected[-1][order] = gradient[order]
        kept = _largest(np.sum(selected, axis=0), k)
        for (averages, waiting), gradient, own in zip(outcomes, gradients, selected, strict=True):
            np.testing.assert_allclose(averages[name], kept / ranks, rtol=1e-6)
            np.testing.assert_array_equal(waiting[name], np.where((own != 0) & (kept != 0), 0, gradient))


class OkTopkSGD:
    """Ok-Topk SGD of all ranks (Li, Hoefler, PPoPP 2022, Algorithm 2), of the parameters that are compressed. Unlike
    there each gives its share, and sums are compared across them by magnitude / v^(1/4), v their mean square."""

    def __init__(self, ranks: int, density: float) -> None:
        self.counts = {name: round(density * np.prod(SHAPES[name])) for name in LARGE}
        self.k, self.elements = sum(self.counts.values()), sum(int(np.prod(shape)) for shape in SHAPES.values())
        self.squares: dict[str, float] = {}
        self.residuals = [
            {name: np.zeros(int(np.prod(SHAPES[name])), np.float32) for name in LARGE} for _ in range(ranks)
        ]

    def step(self, gradients: list[dict[str, np.ndarray]], rate: np.float32) -> dict[str, np.ndarray]:
        """What the parameters lose."""
        pending = [
            {name: residual[name] + rate * gradient[name] for name in LARGE}
            for residual, gradient in zip(self.residuals, gradients, strict=True)
        ]
        chosen = [{name: _largest(own[name], self.counts[name]) for name in LARGE} for own in pending]
        sums = {name: np.sum([own[name] for own in chosen], axis=0) for name in LARGE}
        least = min(self.squares.values(), default=1.0)
        weights = {name: np.float32(math.sqrt(math.sqrt(least / self.squares.get(name, least)))) for name in LARGE}
        largest = _largest(np.concatenate([sums[name] * weights[name] for name in LARGE]), self.k)
        keeps = dict(zip(LARGE, np.split(largest != 0, [sums[LARGE[0]].size]), strict=True))
        kept = {name: np.where(keeps[name], sums[name], 0) / np.float32(len(pending)) for name in LARGE}
        for name, own in kept.items():
            below = np.abs(largest[largest != 0]).min() / weights[name] / len(pending)
            mean = np.square(own, dtype=np.float64).mean() if own.any() else below**2 * self.k / self.elements
            mean = float(mean) / float(rate) ** 2  # as averages of gradients have it
            self.squares[name] = (self.squares.get(name, mean) + mean) / 2
        for residual, own, sent in zip(self.residuals, pending, chosen, strict=True):
            residual |= {name: np.where((sent[name] != 0) & keeps[name], 0, own[name]) for name in LARGE}
        return kept


def test_ok_topk_sgd_is_that_of_its_reference(on_ranks: OnRanks) -> None:
    """Bit for bit: all rates are powers of two, and four ranks' mean is exact."""
    ranks, steps, density = 4, 20, 0.05

    def drawn(rank: int, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([rank, step])
        drawn = {name: rng.standard_normal(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}
        return drawn | {"hidden": drawn["hidden"] / np.float32(4)}

    reference, rates = OkTopkSGD(ranks, density), np.float32(0.5) ** np.arange(1, steps + 1, dtype=np.float32)
    expected = [reference.step([drawn(rank, step) for rank in range(ranks)], rates[step]) for step in range(steps)]
    assert all(sum(np.count_nonzero(one[name]) for one in expected) > 200 for name in LARGE)

    def run(comm: Communicator) -> None:
        compress = dataclasses.replace(
            TopK.oktopk(density, threshold_every=1), select="topk", small_elements=16, interval=None
        )
        trainer = Trainer(comm, compress=compress, optimizer=plain_sgd)
        optimizer = trainer.state._scales._optimizer
        assert optimizer is not None
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = float(rates[step])
            averages = trainer.step(drawn(comm.rank, step), ONE)
            for name in LARGE:
                np.testing.assert_array_equal(rates[step] * averages[name], expected[step][name])
        for name in LARGE:
            np.testing.assert_array_equal(trainer.waiting(name), reference.residuals[comm.rank][name])

    on_ranks(ranks, run)


def words_most(collective: str | BoundedTopk, ranks: int, selected: int, wanted: int) -> float:
    """That a rank sends or receives in all sums of so many entries, at most."""
    sums = 2 * STEPS  # of two buckets
    if collective == "gtopk":
        return 2 * wanted * math.ceil(math.log2(ranks))
    if collective not in ("gtopk", "oktopk"):
        return 4 * (1.5 * wanted / ranks + sums) * (ranks - 1)
    most = max(selected, 1.25 * wanted)
    return 6 * most + 2 * sums * max(ranks, 6 * math.sqrt(most))


@pytest.mark.parametrize(
    "options",
    [
        {"combine": "oktopk"},
        {"combine": "oktopk", "select": "topk", "nonfinite": "skip"},
        {"combine": "oktopk", "dtype": torch.bfloat16},
        {"combine": "oktopk", "momentum": 0.9, "masking": False, "optimizer": plain_sgd},
        {"combine": "gtopk"},
        {"combine": "gtopk", "dtype": torch.bfloat16, "values": "bf16", "select": "topk"},
        {"combine": "bounded"},
        {"combine": BoundedTopk(slack=1.5, boundaries_every=3)},
        {"combine": "bounded", "momentum": 0.9, "masking": False, "optimizer": plain_sgd, "nonfinite": "skip"},
        {"combine": "oktopk", "values": "packed-bf16"},
        {"combine": "oktopk", "values": "f16", "select": "topk"},
        {"combine": "oktopk", "values": "int8", "nonfinite": "skip"},
        {"combine": "oktopk", "values": "raw-qsgd8"},
        {"combine": "oktopk", "values": "bf16", "dtype": torch.bfloat16},
    ],
    ids=named,
)
def test_nothing_is_lost_of_what_sums_do_not_keep(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], DDPStats]:
        trainer = Trainer(comm, **options)
        applied = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            for name, values in trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT).items():
                applied[name] += values
        return applied, {name: trainer.waiting(name) for name in LARGE}, trainer.state.stats

    ranks = 3
    outcomes = on_ranks(ranks, run)
    for name in LARGE:
        waiting = sum(outcome[1][name] for outcome in outcomes)
        applied = outcomes[0][0][name] * ranks
        # Averages are bfloat16s there: of at most 400, a hundred times.
        expected = given(name, ranks, STEPS, options.get("momentum", 0.0))
        np.testing.assert_allclose(applied + waiting, expected, atol=64 if options.get("dtype") else 0.5)
        for outcome in outcomes:
            np.testing.assert_array_equal(outcome[0][name], outcomes[0][0][name])
    selected = max(outcome[2].selected for outcome in outcomes)
    for _, _, stats in outcomes:
        assert 0.75 <= stats.kept / stats.wanted <= 1.25
        most = words_most(options["combine"], ranks, selected, stats.wanted)
        assert 0 < max(stats.words_sent, stats.words_received) <= most


@pytest.mark.parametrize("options", [{}, {"select": "topk", "values": "raw"}, {"dtype": torch.bfloat16}], ids=named)
def test_gathered_entries_add_up_to_the_sum(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    def run(comm: Communicator, combine: str) -> list[dict[str, np.ndarray]]:
        trainer = Trainer(comm, combine=combine, **options)
        return [trainer.step(gradients_of(comm.rank, step), REBUILT) for step in range(5)]

    summed, gathered = (on_ranks(3, functools.partial(run, combine=one)) for one in ("allreduce", "allgather"))
    for mine, theirs in zip(summed, gathered, strict=True):
        for expected, found in zip(mine, theirs, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(found[name], expected[name], rtol=2**-7 if options.get("dtype") else 1e-6)
                np.testing.assert_array_equal(found[name] != 0, expected[name] != 0)


def test_a_gradient_of_nan_is_sent_and_spoils_no_residual(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, combine="oktopk", nonfinite="send")
        gradients = gradients_of(comm.rank, 0)
        if comm.rank == 1:
            gradients["hidden"][:500] = np.nan  # ten times as many as are sent
        assert np.isnan(trainer.step(gradients, REBUILT)["hidden"]).any()
        for name in LARGE:
            assert np.isfinite(trainer.waiting(name)).all()

    on_ranks(2, run)


@pytest.mark.parametrize("collective", COMBINE)
def test_a_pass_that_was_broken_off_is_waited_for(on_ranks: OnRanks, collective: str) -> None:
    """As when a rank's loss raises between two buckets and the loop goes on with the next batch: on all ranks."""

    def run(comm: Communicator) -> dict[str, np.ndarray]:
        trainer = Trainer(comm, combine=collective, density=0.3)
        for step in range(10):
            gradients = gradients_of(comm.rank, step)
            trainer.start(gradients, REBUILT[0], 0, False)
            averages = trainer.step(gradients, REBUILT)
        return averages

    outcomes = on_ranks(3, run)
    for averages in outcomes:
        for name in SHAPES:
            np.testing.assert_array_equal(averages[name], outcomes[0][name])


def test_values_that_such_sums_do_not_round(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="values='bf16' rounds values, which combine='gtopk' does not"):
            Trainer(comm, combine="gtopk", values="bf16")

    on_ranks(1, run)


def test_a_gradient_of_nan_is_refused_as_ever(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, combine="oktopk")
        gradients = gradients_of(0, 0)
        gradients["hidden"][3] = np.nan
        with pytest.raises(NonFiniteGradient):
            trainer.step(gradients, REBUILT)

    on_ranks(1, run)
