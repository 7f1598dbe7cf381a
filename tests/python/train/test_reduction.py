"""The hook on buckets made by hand, over ranks in threads: what arrives, what stays, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import telegrad
from telegrad import Communicator, DDPState
from telegrad.errors import NonFiniteGradient, TransportError

OnRanks = Callable[..., list[Any]]
SHAPES = {"embedding": (30, 40), "norm": (16,), "hidden": (20, 50), "bias": (7,), "scale": (3,)}
LARGE, SMALL = ("embedding", "hidden"), ("norm", "bias", "scale")


class Bucket:
    """What a hook may ask of DDP's GradBucket."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buffer: torch.Tensor, index: int, last: bool) -> None:
        self._parameters, self._buffer, self._index, self._last = list(parameters), buffer, index, last

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        pieces = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


class Trainer:
    """One rank: its parameters, its state, and steps over buckets."""

    def __init__(self, comm: Communicator, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.comm = comm
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        self.state = DDPState(
            comm, self.parameters.items(), **{"density": 0.05, "small_tensor_elements": 16, **options}
        )

    def step(self, gradients: dict[str, np.ndarray], buckets: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
        """Averages; both are flat arrays by name."""
        futures, result = [], {}
        for index, names in enumerate(buckets):
            parameters = [self.parameters[name] for name in names]
            flat = np.concatenate([gradients[name] for name in names])
            buffer = torch.from_numpy(flat).to(parameters[0].dtype)
            bucket = Bucket(parameters, buffer, index, index == len(buckets) - 1)
            futures.append((names, buffer, telegrad.ddp_hook(self.state, bucket)))  # type: ignore[arg-type]
        for names, buffer, future in futures:
            outcome = future.wait()
            assert outcome.data_ptr() == buffer.data_ptr()
            sizes = [gradients[name].size for name in names]
            result.update(zip(names, np.split(outcome.float().numpy(), np.cumsum(sizes)[:-1]), strict=True))
        return result

    def memory(self) -> dict[str, Any]:
        """All that the compressor remembers, as a copy."""
        return self.state._compressor.state_dict()

    def residual(self, name: str) -> np.ndarray:
        return self.memory()["parameters"][name]["residual"]


ONE = [["embedding", "norm", "hidden", "bias", "scale"]]
REBUILT = [["scale", "bias", "hidden"], ["norm"], ["embedding"]]


def _gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {
        name: (4 * rng.integers(-60, 60, np.prod(shape))).astype(np.float32)  # sums and quarters of these are exact
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("selection", ["topk", "reused"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_not_applied_waits_in_the_residuals(on_ranks: OnRanks, size: int, selection: str) -> None:
    steps = 12

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = Trainer(comm, selection=selection)
        applied = {name: np.zeros(np.prod(shape), np.float64) for name, shape in SHAPES.items()}
        for step in range(steps):
            # DDP rebuilds its buckets after the first step
            for name, mean in trainer.step(_gradients(comm.rank, step), ONE if step == 0 else REBUILT).items():
                applied[name] += mean
        assert trainer.state.step == steps
        return applied, {name: trainer.residual(name) for name in LARGE}

    outcomes = on_ranks(size, run)
    for name in SHAPES:
        total = sum(_gradients(rank, step)[name].astype(np.float64) for rank in range(size) for step in range(steps))
        applied = outcomes[0][0][name]
        for other, _ in outcomes[1:]:
            np.testing.assert_array_equal(other[name], applied)
        waiting = sum(residuals[name] for _, residuals in outcomes) if name in LARGE else 0.0
        np.testing.assert_array_equal(applied * size + waiting, total)


@pytest.mark.parametrize("options", [{"mode": "dense"}, {"density": 1.0}, {"warmup_steps": 3}])
def test_all_of_it_at_once(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> list[dict[str, np.ndarray]]:
        trainer = Trainer(comm, **options)
        return [trainer.step(_gradients(comm.rank, step), ONE if step == 0 else REBUILT) for step in range(3)]

    for steps in on_ranks(2, run):
        for step, result in enumerate(steps):
            for name in SHAPES:
                expected = (_gradients(0, step)[name] + _gradients(1, step)[name]) / 2
                np.testing.assert_array_equal(result[name], expected)


def test_after_the_warm_up_it_is_sparse(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[int]:
        trainer = Trainer(comm, warmup_steps=2, selection="topk")
        steps = [trainer.step(_gradients(comm.rank, step), REBUILT) for step in range(4)]
        assert trainer.state.stats.selected == trainer.state.stats.wanted == 2 * (60 + 50)
        return [np.count_nonzero(step["embedding"]) for step in steps]

    for counts in on_ranks(2, run):
        assert min(counts[:2]) > 1000
        assert max(counts[2:]) <= 120


def test_small_tensors_are_exact(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> dict[str, np.ndarray]:
        return Trainer(comm).step(_gradients(comm.rank, 0), ONE)

    for result in on_ranks(2, run):
        for name in SMALL:
            np.testing.assert_array_equal(result[name], (_gradients(0, 0)[name] + _gradients(1, 0)[name]) / 2)


def test_bfloat16_rounding_errors_stay_in_the_residual(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        trainer = Trainer(comm, torch.bfloat16, selection="topk")
        applied = np.zeros(1200)
        for step in range(8):
            applied += trainer.step(_gradients(comm.rank, step), REBUILT)["embedding"]
        return applied, trainer.residual("embedding")

    outcome = on_ranks(1, run)[0]
    given = sum(torch.from_numpy(_gradients(0, step)["embedding"]).bfloat16().double().numpy() for step in range(8))
    np.testing.assert_array_equal(outcome[0] + outcome[1], given)
    for applied, residual in (pair := on_ranks(2, run)):
        np.testing.assert_array_equal(applied, pair[0][0])
        assert np.isfinite(residual).all()


def test_an_unused_parameter_keeps_its_residual(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        trainer.step(_gradients(comm.rank, 0), REBUILT)
        before = trainer.residual("hidden")
        gradients = _gradients(comm.rank, 1)
        gradients["hidden"][:] = 0
        result = trainer.step(gradients, REBUILT)
        assert not result["hidden"].any()
        np.testing.assert_array_equal(trainer.residual("hidden"), before)

    on_ranks(2, run)


def test_statistics(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, selection="topk")
        for step in range(3):
            trainer.step(_gradients(comm.rank, step), REBUILT)
        stats = trainer.state.stats
        assert stats.buckets == 9
        assert stats.elements == 3 * (1200 + 16 + 1000 + 7 + 3)
        assert stats.dense_elements == 3 * (16 + 7 + 3)
        assert stats.wanted == stats.selected == 3 * (60 + 50)
        assert stats.selected_to_wanted == 1
        assert stats.nonfinite_buckets == 0
        assert stats.hook_s > 0

    on_ranks(2, run)


def _poisoned(rank: int, name: str, value: float = np.nan) -> dict[str, np.ndarray]:
    gradients = _gradients(rank, 1)
    if rank == 1:
        gradients[name][5] = value
    return gradients


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["hidden", "bias"])
def test_nonfinite_raise(on_ranks: OnRanks, mode: str, value: float, name: str) -> None:
    together = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, mode=mode)
        trainer.step(_gradients(comm.rank, 0), ONE)
        together.wait(20)  # else rank 1 may abort before rank 0 is through with this step
        before = trainer.memory()
        if comm.rank == 1:
            with pytest.raises(
                NonFiniteGradient, match=f"rank 1, step 1: 1 of .* gradient of '{name}' are NaN"
            ) as caught:
                trainer.step(_poisoned(1, name, value), ONE)
            assert (caught.value.rank, caught.value.parameter) == (1, name)
            np.testing.assert_equal(trainer.memory(), before)
        else:
            with pytest.raises(RuntimeError, match=f"NonFiniteGradient: rank 1, step 1.*'{name}'"):
                trainer.step(_poisoned(0, name, value), ONE)
            assert isinstance(trainer.state.failure, TransportError)

    on_ranks(2, run)


def test_nonfinite_skip(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip", density=1.0)
        before = trainer.memory()
        result = trainer.step(_poisoned(comm.rank, "hidden"), REBUILT)
        for name in REBUILT[0]:  # only this bucket is skipped
            np.testing.assert_array_equal(result[name], _gradients(0, 1)[name] / 2)
        np.testing.assert_array_equal(
            result["embedding"], (_gradients(0, 1)["embedding"] + _gradients(1, 1)["embedding"]) / 2
        )
        assert trainer.state.stats.nonfinite_buckets == (comm.rank == 1)
        if comm.rank == 1:
            np.testing.assert_equal(trainer.memory(), before)

    on_ranks(2, run)


def test_nonfinite_skip_leaves_a_filled_residual_alone(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip")
        trainer.step(_gradients(comm.rank, 0), ONE)
        before = trainer.residual("hidden")
        trainer.step(_poisoned(comm.rank, "bias", np.inf), ONE)
        assert np.array_equal(trainer.residual("hidden"), before) is (comm.rank == 1)

    on_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hidden", "bias"])
def test_nonfinite_send(on_ranks: OnRanks, name: str, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, nonfinite="send", selection="topk")
        trainer.step(_gradients(comm.rank, 0), ONE)
        result = trainer.step(_poisoned(comm.rank, name), ONE)
        assert np.flatnonzero(np.isnan(result[name])).tolist() == [5]
        assert all(np.isfinite(values).all() for other, values in result.items() if other != name)
        assert all(np.isfinite(trainer.residual(large)).all() for large in LARGE)
        clean = trainer.step(_gradients(comm.rank, 2), ONE)
        assert all(np.isfinite(values).all() for values in clean.values())

    on_ranks(2, run)


def test_nonfinite_send_loses_nothing_else(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="send", selection="topk")
        given = np.zeros(1000)
        applied = np.zeros(1000)
        for step in range(5):
            gradients = _gradients(0, step)
            given += gradients["hidden"]
            gradients["hidden"][100:200:7] = np.nan
            given[100:200:7] -= _gradients(0, step)["hidden"][100:200:7]
            applied += np.nan_to_num(trainer.step(gradients, ONE)["hidden"])
        np.testing.assert_array_equal(applied + trainer.residual("hidden"), given)

    on_ranks(1, run)


def test_an_unknown_parameter_fails_on_all_ranks(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        if comm.rank == 0:
            trainer.parameters["hidden"] = torch.nn.Parameter(torch.zeros(SHAPES["hidden"]))
            with pytest.raises(
                ValueError, match=r"bucket 0 holds a parameter of shape \(20, 50\) that DDPState does not"
            ):
                trainer.step(_gradients(0, 0), ONE)
        else:
            with pytest.raises(RuntimeError, match="TransportError: .*ValueError: bucket 0 holds a parameter"):
                trainer.step(_gradients(1, 0), ONE)

    on_ranks(2, run)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(1000, dtype=torch.float16), "'hidden' has dtype torch.float16: .*float32 and bfloat16"),
        (torch.zeros(1000, dtype=torch.float64), r"'hidden' has dtype torch.float64: .*model.float\(\)"),
        (torch.zeros(1000, device="meta"), "'hidden' is on meta: this version trains on the CPU"),
    ],
)
def test_buffers_that_cannot_be_reduced(on_ranks: OnRanks, buffer: torch.Tensor, message: str) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        bucket = Bucket([trainer.parameters["hidden"]], buffer, 0, True)
        with pytest.raises(TypeError, match=message):
            telegrad.ddp_hook(trainer.state, bucket)  # type: ignore[arg-type]
        assert isinstance(trainer.state.failure, TypeError)

    on_ranks(1, run)
