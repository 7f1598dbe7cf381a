"""Ranks whose gradients are given, on a device whose streams compute and on the host: for tests that compare both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, computed_on, model_on
from device_ranks import RANKS
from fake_device import FakeStream
from given_gradients import Given, gradients_of, sgd
from given_gradients import Rank as HostRank
from torch import Tensor
from varied_options import objects_of

from telegrad import Communicator, Synchronizer


class DeviceRank:
    """One rank's model on a device, and its Synchronizer."""

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
        self.trains = sgd(self.model.parameters())
        if callable(make_optimizer := options.get("optimizer")):
            options["optimizer"] = make_optimizer(self.model.parameters())
        own: dict[str, Any] = {}
        if isinstance(options.get("compress", "topk"), str):
            own = {"compress": "topk", "small_elements": 16}
            if options.get("compress") != "quantised":
                own["density"] = 0.05
        self.sync = Synchronizer(self.model, comm, **objects_of(**{"compress": None, **own, **options}))

    def step(self, gradients: dict[str, Tensor], *, keeps: bool = False) -> dict[str, Tensor]:
        """The averages, as copies on the host; a step of the optimizer has used them, which gradients do not depend on.
        ``keeps``: gradients of the pass before are added to."""
        if not keeps:
            self.model.zero_grad()
        self.model({name: computed_on(self.device, one) for name, one in gradients.items()}).backward()
        self.stream.synchronize()
        named_parameters = self.model.named_parameters()
        averages = {name: one.grad.memory.clone() for name, one in named_parameters if one.grad is not None}  # type: ignore[attr-defined]
        self.trains.step()
        return averages


OnEach = Callable[..., list[Any]]


@pytest.fixture
def on_devices(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> OnEach:
    """``on_devices(function, **options)`` calls ``function(rank)`` on every DeviceRank; returns by rank."""

    def run(function: Callable[[DeviceRank], Any], **options: Any) -> list[Any]:
        def call(number: int) -> Any:
            with device.on(streams[number]), _aborting(comms[number]):
                rank = DeviceRank(device, comms[number], streams[number], **options)
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


def train(
    steps: range, state: Any = None, *, gradients: Callable[[int, int], dict[str, Tensor]] = gradients_of
) -> Callable[[Any], tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]]:
    """A function of a rank: its averages, residuals and state. ``gradients``: of a rank and a step."""

    def run(rank: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]:
        if state is not None:
            rank.sync.load_state_dict(state[rank.comm.rank])
        averages = [rank.step(gradients(rank.comm.rank, step)) for step in steps]
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
