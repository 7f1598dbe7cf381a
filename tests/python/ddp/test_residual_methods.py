"""Momentum correction, residuals of steps, clipping, warm-up and policies, over buckets made by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, gradients_of, plain_sgd

from telegrad import Communicator
from telegrad.compress import BySize, ExactTopK, ParameterCompression, ParameterInfo

OnRanks = Callable[..., list[Any]]


def _sgd_sums(steps: int, ranks: int, momentum: float, nesterov: bool) -> list[dict[str, np.ndarray]]:
    """What torch's SGD with momentum applies in each step, of the mean gradient, at a learning rate of 1."""
    parameters = {name: torch.zeros(int(np.prod(shape)), dtype=torch.float64) for name, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=1.0, momentum=momentum, nesterov=nesterov)
    found = []
    for step in range(steps):
        for name, parameter in parameters.items():
            gradients = [gradients_of(rank, step)[name].astype(np.float64) for rank in range(ranks)]
            parameter.grad = torch.from_numpy(sum(gradients) / ranks)
            parameter.zero_()
        optimizer.step()
        found.append({name: -parameter.numpy().copy() for name, parameter in parameters.items()})
    return found


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"compress": None}, torch.float32),
        ({"compress": None}, torch.bfloat16),
        ({"warmup_steps": 20}, torch.float32),
        ({"density": 1.0, "masking": False}, torch.float32),
    ],
)
def test_momentum_where_everything_is_sent(
    on_ranks: OnRanks, options: dict[str, Any], dtype: torch.dtype, nesterov: bool
) -> None:
    def run(comm: Communicator) -> list[dict[str, np.ndarray]]:
        trainer = Trainer(comm, dtype, momentum=0.9, nesterov=nesterov, optimizer=plain_sgd, **options)
        return [trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT) for step in range(12)]

    expected = _sgd_sums(12, 2, 0.9, nesterov)
    tolerance = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.02, "atol": 20}
    for steps in on_ranks(2, run):
        for found, wanted in zip(steps, expected, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(found[name], wanted[name], **tolerance)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_momentum_loses_nothing(on_ranks: OnRanks, selection: str, nesterov: bool) -> None:
    steps, size = 100, 2

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = Trainer(comm, select=selection, momentum=0.9, nesterov=nesterov, masking=False, optimizer=plain_sgd)
        applied = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
        for step in range(steps):
            for name, values in trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT).items():
                applied[name] += values
        return applied, {name: trainer.waiting(name) for name in SHAPES}

    wanted = _sgd_sums(steps, size, 0.9, nesterov)
    outcomes = on_ranks(size, run)
    for name in SHAPES:
        waiting = sum(residuals[name] for _, residuals in outcomes)
        total = sum(step[name] for step in wanted)
        np.testing.assert_allclose(outcomes[0][0][name] + waiting / size, total, rtol=1e-4, atol=0.5)
        np.testing.assert_array_equal(outcomes[0][0][name], outcomes[1][0][name])


def _two_groups(
    parameters: Iterable[torch.nn.Parameter], kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> torch.optim.Optimizer:
    first, *others = parameters
    return kind([{"params": [first], "lr": 0.3}, {"params": others}], lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_residuals_of_steps_lose_nothing(on_ranks: OnRanks, selection: str, kind: type[torch.optim.Optimizer]) -> None:
    """Two parameter groups, whose rates fall from step to step, and one step at a rate of 0."""
    steps, size = 60, 2

    def rate(name: str, step: int) -> float:
        return 0.0 if step == 0 else (0.3 if name == "embedding" else 0.1) * 0.95**step

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        made = functools.partial(_two_groups, kind=kind)
        trainer = Trainer(comm, select=selection, feedback="steps", optimizer=made)
        optimizer = trainer.state._scales._optimizer
        assert optimizer is not None
        applied = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate("embedding", step)
            optimizer.param_groups[1]["lr"] = torch.tensor(rate("hidden", step), dtype=torch.float64)
            for name, values in trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT).items():
                applied[name] += rate(name, step) * values.astype(np.float64)
        return applied, {name: trainer.waiting(name) for name in SHAPES}

    outcomes = on_ranks(size, run)
    for name in SHAPES:
        total = sum(
            rate(name, step) * gradients_of(rank, step)[name].astype(np.float64)
            for rank in range(size)
            for step in range(steps)
        )
        waiting = sum(residuals[name] for _, residuals in outcomes)
        np.testing.assert_allclose(outcomes[0][0][name] * size + waiting, total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("compress", [None, "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_clipping(on_ranks: OnRanks, dtype: torch.dtype, compress: str | None) -> None:
    """Each rank's gradient by its own norm; rank 1's is short enough."""

    def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
        factor = np.float32(1 if rank == 0 else 0.001)
        return {name: values * factor for name, values in gradients_of(rank, step).items()}

    norm_of_rank_0 = np.sqrt(sum(np.square(values).sum() for values in gradients(0, 0).values()))
    clip = np.sqrt(2) * float(norm_of_rank_0) / 3

    def run(comm: Communicator) -> dict[str, np.ndarray]:
        options = {"density": 1.0} if compress else {}
        trainer = Trainer(comm, dtype, compress=compress, clip_norm=clip, **options)
        result = trainer.step(gradients(comm.rank, 0), REBUILT)
        assert trainer.state.stats.clipped_steps == (comm.rank == 0)
        assert trainer.state.step == 1
        return result

    for result in on_ranks(2, run):
        for name in SHAPES:
            expected = (gradients(0, 0)[name] / 3 + gradients(1, 0)[name]) / 2
            tolerance = 1e-5 if dtype == torch.float32 else 0.02
            np.testing.assert_allclose(result[name], expected, rtol=tolerance, atol=tolerance)


def test_clipping_of_huge_and_of_infinite_gradients(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, compress=None, clip_norm=1.0, nonfinite="send")
        gradients = {name: values * np.float32(1e30) for name, values in gradients_of(0, 0).items()}
        norm = np.sqrt(sum(np.square(values.astype(np.float64)).sum() for values in gradients.values()))
        for name, values in trainer.step(gradients, REBUILT).items():
            np.testing.assert_allclose(values, gradients[name] / norm, rtol=1e-4)
        gradients["norm"][3] = np.inf
        result = trainer.step(gradients, REBUILT)  # no norm: nothing is clipped
        np.testing.assert_array_equal(result["hidden"], gradients["hidden"])
        assert trainer.state.stats.clipped_steps == 1

    on_ranks(1, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_clipped_training_goes_on_bitwise_from_other_buckets(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    """As after a restore: the norm must not depend on which parameters share a bucket, nor on their order."""

    def run(comm: Communicator) -> None:
        one, two = (Trainer(comm, dtype, clip_norm=0.3, select="topk") for _ in range(2))
        rng = np.random.default_rng(comm.rank)
        for _ in range(20):
            gradients = {
                name: rng.standard_normal(int(np.prod(shape))).astype(np.float32) for name, shape in SHAPES.items()
            }
            found, expected = one.step(gradients, ONE), two.step(gradients, REBUILT)
            for name in SHAPES:
                np.testing.assert_array_equal(found[name], expected[name])
            for name in LARGE:
                np.testing.assert_array_equal(one.residual(name), two.residual(name))
        assert one.state.stats.clipped_steps == 20

    on_ranks(2, run)


def test_a_clipped_pass_without_its_end_never_was(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer, reference = Trainer(comm, clip_norm=100.0), Trainer(comm, clip_norm=100.0)
        _, lost = trainer.start(gradients_of(comm.rank, 9), REBUILT[0], 0, False)
        for step in range(3):
            gradients = gradients_of(comm.rank, step)
            one, two = trainer.step(gradients, REBUILT), reference.step(gradients, REBUILT)
            for name in SHAPES:
                np.testing.assert_array_equal(one[name], two[name])
        with pytest.raises(RuntimeError, match="backward pass ended before its last bucket"):
            lost.wait()

    on_ranks(2, run)


def test_a_falling_density(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[tuple[int, int]]:
        trainer = Trainer(comm, density=0.02, select="topk", warmup="falling", warmup_steps=10)
        found = []
        for step in range(12):
            before = trainer.state.stats.selected
            trainer.step(gradients_of(comm.rank, step), ONE if step % 3 == 0 else REBUILT)
            found.append(trainer.state.stats.selected - before)
        assert trainer.state.stats.selected == trainer.state.stats.wanted
        return found

    stages = [round(density * 1200) + round(density * 1000) for density in (0.25, 0.0625, 0.02, 0.02, 0.02, 0.02)]
    assert on_ranks(2, run) == [[stage for stage in stages for _ in range(2)]] * 2


def test_a_warm_up_goes_on_after_loading(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        options = {"density": 0.02, "warmup": "falling", "warmup_steps": 20}
        one, two = Trainer(comm, **options), Trainer(comm, **options)
        for step in range(15):
            gradients = gradients_of(comm.rank, step)
            expected = one.step(gradients, REBUILT)
            if step >= 6:
                found = two.step(gradients, ONE)
                for name in SHAPES:
                    np.testing.assert_array_equal(found[name], expected[name])
            if step == 5:
                two.state.load_state_dict(one.state.state_dict())
                with pytest.raises(ValueError, match="no 'parameters'"):
                    two.state.load_state_dict({**one.state.state_dict(), "step": 0, "compressor": {}})

    on_ranks(2, run)


def test_a_policy_says_how_each_tensor_is_sent(on_ranks: OnRanks) -> None:
    seen: list[ParameterInfo] = []

    def policy(tensor: ParameterInfo) -> ParameterCompression:
        seen.append(tensor)
        densities = {"embedding": 0.1, "hidden": 0.01}
        chosen = densities.get(tensor.name)
        return ParameterCompression(None) if chosen is None else ParameterCompression(ExactTopK(), chosen)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, policy=policy)
        for step in range(3):
            trainer.step(gradients_of(comm.rank, step), REBUILT)
        assert trainer.state.stats.selected == 3 * (120 + 10)

    on_ranks(1, run)
    assert seen[0] == ParameterInfo("embedding", 1200, 2, False, (30, 40))
    assert [tensor.name for tensor in seen if tensor.is_output] == ["hidden"]  # the last matrix


def test_large_parameters_have_a_selection_of_their_own(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, policy=BySize(0.05, 16, large_elements=1000, large="topk"))
        for _ in range(3):
            trainer.step({name: np.ones(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}, ONE)
        parameters = trainer.memory()["parameters"]
        assert (parameters["embedding"]["calls"], parameters["hidden"]["calls"]) == (0, 1)  # exact; reused: ties
        assert set(parameters) == set(LARGE)

    on_ranks(1, run)


def _with_momentum(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def _adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"momentum": 0.9}, ValueError, "momentum needs optimizer="),
        ({"momentum": 0.9, "optimizer": _with_momentum}, ValueError, "optimizer has momentum=0.9 of its own"),
        ({"momentum": 0.9, "optimizer": _adam}, ValueError, "optimizer is AdamW: momentum= is for SGD"),
        ({"feedback": "steps"}, ValueError, "feedback='steps' needs optimizer="),
        ({"optimizer": 3}, TypeError, "optimizer is a int: give the torch.optim.Optimizer"),
        ({"scaler": 3, "nonfinite": "skip"}, TypeError, "scaler is a int: give the torch.amp.GradScaler"),
        ({"scaler": torch.amp.GradScaler("cpu")}, ValueError, "nonfinite='raise' does not fit scaler="),
        ({"clip_norm": 0}, ValueError, "clip_norm=0 must be above 0"),
        ({"clip_norm": "1"}, TypeError, "clip_norm='1' must be a number"),
        (
            {"select": "topk", "same_sign": True, "output": ["tail"]},
            ValueError,
            "output names 'tail', which the model does not have",
        ),
    ],
)
def test_bad_options(on_ranks: OnRanks, options: dict[str, Any], error: type[Exception], message: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(error, match=message):
            Trainer(comm, **options)

    on_ranks(1, run)


def test_a_wire_that_bfloat16_cannot_take(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=r"values='qsgd4' does not fit parameter 'embedding' of torch.bfloat16"):
            Trainer(comm, torch.bfloat16, values="qsgd4")

    on_ranks(1, run)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda optimizer: optimizer.param_groups.pop(), "optimizer does not have parameter 'norm'"),
        (lambda optimizer: optimizer.param_groups[1].update(lr=-0.1), "optimizer has the learning rate -0.1"),
        (lambda optimizer: optimizer.param_groups[0].update(lr=float("nan")), "optimizer has the learning rate nan"),
    ],
)
def test_rates_that_are_none(on_ranks: OnRanks, damage: Callable[[Any], Any], message: str) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, feedback="steps", optimizer=_two_groups)
        damage(trainer.state._scales._optimizer)
        with pytest.raises(ValueError, match=message):
            trainer.step(gradients_of(0, 0), ONE)

    on_ranks(1, run)
