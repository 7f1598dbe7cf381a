"""Encoded values on the wire, and entries of one sign: what rounding loses waits in the residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, given, gradients_of, named, plain_sgd

from telegrad import Communicator
from telegrad.compress import ExactTopK, ParameterCompression, ParameterInfo

OnRanks = Callable[..., list[Any]]


def one_signed(tensor: ParameterInfo) -> ParameterCompression:
    """The embedding by the mean of one sign at a time, the output layer with its values, the others densely."""
    selections = {"embedding": ExactTopK(same_sign=True), "hidden": ExactTopK()}
    return ParameterCompression(selections.get(tensor.name), 0.05)


EXHAUSTIVE = 4  # of these, the first go on for longer
LOSSY: list[dict[str, Any]] = [
    {"same_sign": True, "select": "trimmed"},
    {"values": "int8", "select": "topk"},
    {"values": "qsgd8"},
    {"values": "packed-bf16", "momentum": 0.9, "masking": False, "optimizer": plain_sgd},
    {"same_sign": True, "select": "search", "output": ["embedding"]},
    {"values": "packed-bf16"},
    {"values": "f16", "select": "topk"},
    {"values": "raw-qsgd4", "select": "topk"},
    {"values": "packed-codebook2", "select": "topk"},
    {"density": 0.01, "policy": one_signed},
    {"density": 0.01, "policy": one_signed, "values": "int8"},
    {"values": "int8", "momentum": 0.5, "masking": False, "optimizer": plain_sgd},
    {"values": "int8", "nonfinite": "skip"},
    {"density": 0.01, "policy": one_signed, "nonfinite": "skip"},
]


def _simple(options: dict[str, Any]) -> dict[str, Any]:
    return {"small_elements": 2048, **options} if "policy" in options else options


@pytest.mark.parametrize(
    ("ranks", "steps", "options"),
    [
        *((2, 80, options) for options in LOSSY[EXHAUSTIVE:]),
        (1, 80, LOSSY[0]),
        *((2, 300, options) for options in LOSSY[:EXHAUSTIVE]),
    ],
    ids=named,
)
def test_nothing_is_lost(on_ranks: OnRanks, ranks: int, steps: int, options: dict[str, Any]) -> None:

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = Trainer(comm, **_simple(options))
        applied = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
        for step in range(steps):
            for name, values in trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT).items():
                applied[name] += values
        return applied, {name: trainer.waiting(name) for name in LARGE}

    outcomes = on_ranks(ranks, run)
    for name in LARGE:
        waiting = sum(residuals[name] for _, residuals in outcomes)
        expected = given(name, ranks, steps, options.get("momentum", 0.0))
        np.testing.assert_allclose(outcomes[0][0][name] * ranks + waiting, expected, atol=0.5)
        assert np.abs(outcomes[0][0][name]).sum() > 0
        for applied, _ in outcomes:
            np.testing.assert_array_equal(applied[name], outcomes[0][0][name])


def test_entries_of_one_sign_arrive_as_their_mean(on_ranks: OnRanks) -> None:
    """Every rank's own mean, once: RedSync's exchange."""

    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        trainer = Trainer(comm, small_elements=2048, density=0.01, policy=one_signed)
        return trainer.step(gradients_of(comm.rank, 0), ONE)["embedding"], trainer.residual("embedding")

    outcomes, expected = on_ranks(2, run), np.zeros(1200)
    for rank, (_, residual) in enumerate(outcomes):
        gradient = gradients_of(rank, 0)["embedding"]
        chosen = np.argsort(-gradient, kind="stable")[:60]
        mean = gradient[chosen].mean()
        expected[chosen] += mean / 2
        np.testing.assert_allclose(residual[chosen], gradient[chosen] - mean, atol=1e-4)
    np.testing.assert_allclose(outcomes[0][0], expected, rtol=1e-6)


def test_the_output_layer_keeps_its_values(on_ranks: OnRanks) -> None:
    """The last matrix, unless it is named; all others have one sign at a time."""

    def run(comm: Communicator, output: list[str] | None) -> list[set[str]]:
        trainer = Trainer(comm, same_sign=True, select="topk", output=output)
        steps = [trainer.step(gradients_of(comm.rank, step), REBUILT) for step in range(4)]
        return [{name for name in LARGE if step[name].min() < 0 < step[name].max()} for step in steps]

    assert on_ranks(2, lambda comm: run(comm, None)) == [[{"hidden"}] * 4] * 2
    assert on_ranks(2, lambda comm: run(comm, ["embedding", "bias"])) == [[{"embedding"}] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_alternate_and_ranks_agree(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> list[np.ndarray]:
        trainer = Trainer(comm, dtype, small_elements=2048, density=0.01, policy=one_signed)
        return [trainer.step(gradients_of(comm.rank, step), REBUILT)["embedding"] for step in range(6)]

    one, two = on_ranks(2, run)
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        np.testing.assert_array_equal(a, b)
        assert a.any()
        assert (a >= 0).all() if step % 2 == 0 else (a <= 0).all()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"values": "auto"}, torch.bfloat16),
        ({"values": "int8"}, torch.float32),
        ({"values": "int8", "momentum": 0.9, "optimizer": plain_sgd}, torch.float32),
        ({"density": 0.01, "policy": one_signed}, torch.float32),
        ({"density": 0.01, "policy": one_signed}, torch.bfloat16),
    ],
    ids=named,
)
def test_nan_is_sent_and_leaves_no_trace(on_ranks: OnRanks, options: dict[str, Any], dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, nonfinite="send", **_simple(options))
        for step in range(6):
            gradients = gradients_of(comm.rank, step)
            if step == 3 and comm.rank == 1:
                gradients["embedding"][5] = np.nan
            result = trainer.step(gradients, REBUILT)
            assert np.isnan(result["embedding"][5]) == (step == 3)
            assert all(np.isfinite(trainer.residual(name)).all() for name in LARGE)
            velocities = trainer.memory().get("velocities", {}).values()
            assert all(np.isfinite(one["velocity"]).all() for one in velocities)
            assert np.isfinite(result["hidden"]).all()

    on_ranks(2, run)


@pytest.mark.parametrize("options", [{"values": "int8"}, {"same_sign": True, "select": "topk"}], ids=named)
def test_a_dropped_step_leaves_nothing_behind(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    """Neither what was sent nor what rounding lost of it: buckets before the one at fault had both."""
    buckets = [["embedding", "hidden", "norm", "bias"], ["scale"]]

    def run(comm: Communicator) -> None:
        trainer, reference = Trainer(comm, nonfinite="skip", **options), Trainer(comm, **options)
        for step in range(5):
            gradients = gradients_of(comm.rank, step)
            if step % 2:
                bad = gradients_of(comm.rank, step)
                bad["scale"][0] = np.nan
                trainer.step(bad, buckets)
                assert trainer.state.skipped
            expected = reference.step(gradients, buckets)
            for name, values in trainer.step(gradients, buckets).items():
                np.testing.assert_array_equal(values, expected[name])
            for name in LARGE:
                np.testing.assert_array_equal(trainer.residual(name), reference.residual(name))

    on_ranks(2, run)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_f16_cannot_hold_waits(on_ranks: OnRanks, ranks: int) -> None:
    """A finite gradient beyond the largest float16 arrives as that, and the rest of it later."""

    def run(comm: Communicator) -> tuple[list[float], float]:
        trainer = Trainer(comm, values="f16", select="topk")
        arrived = []
        for step in range(4):
            gradients = gradients_of(comm.rank, step)
            gradients["hidden"][:] = 0
            gradients["hidden"][3] = -150_000.0 if step == 0 else -1.0
            arrived.append(float(trainer.step(gradients, REBUILT)["hidden"][3]))
        return arrived, float(trainer.residual("hidden")[3])

    for arrived, waits in on_ranks(ranks, run):
        assert arrived[0] == -65504.0
        assert np.isfinite(arrived).all()
        assert sum(arrived) + waits == pytest.approx(-150_003.0, rel=1e-6)  # waits: of one rank, and nearly nothing
