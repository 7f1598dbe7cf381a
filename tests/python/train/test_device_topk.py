"""A Synchronizer that compresses on a device whose streams compute: the host's bits, and nothing lost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, computed_on, model_on
from device_ranks import RANKS
from fake_device import FakeStream
from given_gradients import NAMED, Given, gradients_of, sgd
from given_gradients import Rank as HostRank
from handmade_buckets import named
from torch import Tensor
from triton_arrays import DEVICE

from telegrad import Communicator, Synchronizer
from telegrad.errors import NonFiniteGradient, TransportError
from telegrad.train import reshard

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]


class Rank:
    """One rank's model there, and its Synchronizer."""

    def __init__(
        self,
        device: ComputingRuntime,
        comm: Communicator,
        stream: FakeStream,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.device, self.comm, self.stream = device, comm, stream
        self.model = model_on(device, Given(dtype))
        if callable(make_optimizer := options.get("optimizer")):
            options["optimizer"] = make_optimizer(self.model.parameters())
        own = {"compression": "topk", "density": 0.05, "small_tensor_elements": 16}
        self.sync = Synchronizer(self.model, comm, **{**own, **options})

    def step(self, gradients: dict[str, Tensor], *, keeps: bool = False) -> dict[str, Tensor]:
        """The averages, as copies on the host. ``keeps``: gradients of the pass before are added to."""
        if not keeps:
            self.model.zero_grad()
        self.model({name: computed_on(self.device, one) for name, one in gradients.items()}).backward()
        self.stream.synchronize()
        named_parameters = self.model.named_parameters()
        return {name: one.grad.memory.clone() for name, one in named_parameters if one.grad is not None}  # type: ignore[attr-defined]


OnEach = Callable[..., list[Any]]


@pytest.fixture
def on_each(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> OnEach:
    """``on_each(function, **options)`` calls ``function(rank)`` on every Rank; returns by rank."""

    def run(function: Callable[[Rank], Any], **options: Any) -> list[Any]:
        def call(number: int) -> Any:
            with device.on(streams[number]), _aborting(comms[number]):
                rank = Rank(device, comms[number], streams[number], **options)
                try:
                    return function(rank)
                finally:
                    rank.sync.close()

        with ThreadPoolExecutor(RANKS) as pool:
            return [future.result(timeout=60) for future in [pool.submit(call, number) for number in range(RANKS)]]

    return run


@pytest.fixture
def on_hosts() -> Iterator[OnEach]:
    made: list[Communicator] = []

    def run(function: Callable[[Any], Any], ranks: int = RANKS, **options: Any) -> list[Any]:
        def call(comm: Communicator) -> Any:
            with _aborting(comm):
                rank = HostRank(comm, **options)
                try:
                    return function(rank)
                finally:
                    rank.sync.close()

        comms = Communicator.local(ranks, timeout_s=60.0)
        made.extend(comms)
        with ThreadPoolExecutor(ranks) as pool:
            return [future.result(timeout=60) for future in [pool.submit(call, comm) for comm in comms]]

    yield run
    for comm in made:
        comm.close()


@contextlib.contextmanager
def _aborting(comm: Communicator) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        comm.abort(f"the test failed: {error!r}")
        raise


def train(steps: range, state: Any = None) -> Callable[[Any], tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]]:
    """A function of a rank: its averages, residuals and state."""

    def run(rank: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]:
        if state is not None:
            rank.sync.load_state_dict(state[rank.comm.rank])
        averages = [rank.step(gradients_of(rank.comm.rank, step)) for step in steps]
        saved = rank.sync.state_dict()
        kept = {
            f"{kind} {name}": entry[kind]
            for group, kind in (("parameters", "residual"), ("velocities", "velocity"))
            for name, entry in saved["compressor"].get(group, {}).items()
        }
        return averages, kept, saved

    return run


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in other.items():
        assert torch.equal(one[name], x), name


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "single", "selection": "topk"},
        {"plan": NAMED, "selection": "reused", "interval": 3},
        {"plan": "wfbp", "selection": "topk", "momentum": 0.9, "nesterov": True, "optimizer": sgd},
        {"plan": "single", "selection": "topk", "compression_warmup_steps": 2},
        {"plan": NAMED, "selection": "topk", "dtype": torch.bfloat16, "nonfinite": "send"},
        {"plan": NAMED, "selection": "topk", "compression_warmup_steps": 4, "compression_warmup": "falling"},
        {"plan": "single", "selection": "reused", "feedback": "steps", "optimizer": sgd},
        {"plan": NAMED, "selection": "topk", "wire": "packed-int8"},
    ],
    ids=named,
)
def test_the_hosts_bits(on_each: OnEach, on_hosts: OnEach, options: dict[str, Any]) -> None:
    found, expected = on_each(train(range(5)), **options), on_hosts(train(range(5)), **options)
    for (averages, kept, _), (wanted, waits, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_leaves_with_a_dense_step(on_each: OnEach, on_hosts: OnEach, dtype: torch.dtype) -> None:
    """A state of step 0 with something in it, and a warm-up in which one rank's parameter takes no part at first."""

    def idle(rank: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]:
        rank.sync.load_state_dict(states[rank.comm.rank])
        gradients = gradients_of(rank.comm.rank, 3)
        if rank.comm.rank == 1:
            gradients["hidden"].zero_()
        first = rank.step(gradients)
        averages, kept, saved = train(range(4, 7))(rank)
        return [first, *averages], kept, saved

    options = {"plan": "single", "selection": "topk", "dtype": dtype}
    states = [state | {"step": 0} for _, _, state in on_hosts(train(range(3)), **options)]
    options["compression_warmup_steps"] = 2
    found, expected = on_each(idle, **options), on_hosts(idle, **options)
    for (averages, kept, _), (wanted, waits, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)


def test_a_state_of_the_device_for_fewer_ranks_on_the_host(on_each: OnEach, on_hosts: OnEach) -> None:
    found = on_each(train(range(3)), plan="single", selection="topk")
    states = reshard([state for _, _, state in found], 2)
    expected = sum(kept["residual hidden"].double() for _, kept, _ in found)
    resharded = sum(state["compressor"]["parameters"]["hidden"]["residual"].double() for state in states)
    torch.testing.assert_close(resharded, expected, rtol=0, atol=1e-3)
    on_hosts(train(range(3, 5), states), ranks=2, plan="single", selection="topk")


def test_a_parameter_that_only_some_ranks_use(on_each: OnEach, on_hosts: OnEach) -> None:
    """Its gradient stays where no rank has one, and where others have, what this rank still had is its share."""

    def run(rank: Any) -> tuple[list[dict[str, Tensor]], Any]:
        averages = [rank.step(gradients_of(rank.comm.rank, 0))]
        names = ("hidden", "norm", "bias")
        keeping = rank.step if isinstance(rank, Rank) else _keeping(rank)
        averages.append(keeping(gradients_of(rank.comm.rank, 1, names), keeps=True))
        own = (*names, "embedding") if rank.comm.rank == 1 else names
        averages.append(keeping(gradients_of(rank.comm.rank, 2, own), keeps=True))
        return averages, rank.sync.state_dict()["compressor"]["parameters"]["embedding"]["residual"]

    found = on_each(run, plan=NAMED, selection="topk")
    expected = on_hosts(run, plan=NAMED, selection="topk")
    for (averages, waits), (wanted, residual) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert torch.equal(waits, residual)
    assert torch.equal(found[0][0][0]["embedding"], found[0][0][1]["embedding"])


def _keeping(rank: Any) -> Callable[..., dict[str, Tensor]]:
    def step(gradients: dict[str, Tensor], *, keeps: bool) -> dict[str, Tensor]:
        assert keeps
        rank.model(gradients).backward()
        return rank.averages()  # type: ignore[no-any-return]

    return step


def test_a_ranks_own_gradient_is_clipped(on_each: OnEach, on_hosts: OnEach) -> None:
    options = {"plan": NAMED, "selection": "topk", "clip_norm": 5000.0}
    found, expected = on_each(train(range(3)), **options), on_hosts(train(range(3)), **options)
    for (averages, _, _), (wanted, _, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            for name, x in other.items():
                torch.testing.assert_close(one[name], x, rtol=1e-5, atol=1e-3)


def test_nan_is_raised_late_and_is_in_no_residual(on_each: OnEach) -> None:
    def run(rank: Rank) -> str:
        rank.step(gradients_of(rank.comm.rank, 0))
        gradients = gradients_of(rank.comm.rank, 1)
        if rank.comm.rank == 1:
            gradients["hidden"][3, 5] = math.nan
        assert rank.step(gradients)["hidden"].isnan().sum() == 1
        wanted = NonFiniteGradient if rank.comm.rank == 1 else TransportError

        def go_on() -> None:
            for step in range(2, 4):
                rank.step(gradients_of(rank.comm.rank, step))
                rank.sync.comm.synchronize()

        with pytest.raises(wanted, match="rank 1, step 1: the gradient of 'hidden' has entries") as caught:
            go_on()
        compression = rank.sync._compression
        assert compression is not None
        compression.device.feedback.save()  # type: ignore[attr-defined]
        assert all(torch.from_numpy(entry.values).isfinite().all() for entry in compression.compressor.residuals)
        return type(caught.value).__name__

    assert on_each(run)[1] == "NonFiniteGradient"


def test_the_counters_are_known_after_a_state(on_each: OnEach, on_hosts: OnEach) -> None:
    def run(rank: Any) -> tuple[int, ...]:
        train(range(3))(rank)
        stats = rank.sync.stats
        return (stats.buckets, stats.elements, stats.dense_elements, stats.wanted, stats.selected)

    assert on_each(run, plan=NAMED, selection="reused") == on_hosts(run, plan=NAMED, selection="reused")
