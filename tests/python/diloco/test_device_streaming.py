"""DiLoCo of tensors on a device whose streams compute: the bits of the host, and what the host waits for."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, computed_on, model_on
from device_fixtures import comms, device, streams
from fake_device import FakeStream
from replicas import network
from torch.distributed import HashStore

from telegrad import Communicator, DiLoCo, NonFiniteGradient, Streaming, TopK, TransportError
from telegrad.communicator.cuda import runtime as runtimes
from telegrad.diloco import ReplicaGroup
from telegrad.diloco.fragment import on_device_of, on_host

__all__ = ["comms", "device", "streams"]

SPARSE: dict[str, Any] = {"compress": TopK(0.1, small_elements=0, combine="allgather"), "decay": 0.9}
EVERY = 6
Move = Callable[[torch.Tensor], torch.Tensor]


class Replica:
    """With gradients that are computed of its parameters, on a device or on the host."""

    def __init__(self, comm: Any, runtime: ComputingRuntime | None, **options: Any) -> None:
        self.number, self._runtime = getattr(comm, "rank", 0), runtime
        self.model = network() if runtime is None else model_on(runtime, network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, foreach=False)
        self.diloco = DiLoCo(self.model, comm, self.optimizer, every=EVERY, **options)

    def step(self, number: int) -> None:
        for place, one in enumerate(self.model.parameters()):
            given = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * number + place))
            given = given * (1 + self.number)
            one.grad = one.detach() * 0.1 + (given if self._runtime is None else computed_on(self._runtime, given))
        for one in self.model.buffers():
            if one.is_floating_point():
                one.mul_(1.0 + 0.01 * (1 + self.number))
        self.optimizer.step()

    def state(self) -> list[bytes]:
        held = [*self.model.parameters(), *self.model.buffers()]
        return [getattr(one, "memory", one.detach()).contiguous().numpy().tobytes() for one in held]


def trained_on_host(comm: Communicator, steps: int, **options: Any) -> list[bytes]:
    replica = Replica(comm, None, **options)
    for number in range(steps):
        replica.step(number)
    return replica.state()


def together(comms: list[Communicator], run: Callable[[Communicator], Any]) -> list[Any]:
    def one(comm: Communicator) -> Any:
        try:
            return run(comm)
        except BaseException as error:
            comm.abort(str(error))
            raise

    with ThreadPoolExecutor(len(comms)) as pool:
        return [future.result(100) for future in [pool.submit(one, comm) for comm in comms]]


WHOLE, MIXED = Streaming(1, delay=4, mix=0), Streaming(1, delay=4)
STREAMS = [(1, 0, 0.0), (1, 2, 0.0), (3, 0, 0.5), (2, 3, 0.25), (3, 5, 0.0)]


@pytest.mark.parametrize(("fragments", "delay", "mix"), STREAMS)
@pytest.mark.parametrize("sparse", [False, True])
def test_a_device_has_the_bits_of_the_host(
    device: ComputingRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    fragments: int,
    delay: int,
    mix: float,
    sparse: bool,
) -> None:
    options = {"streaming": Streaming(fragments, delay=delay, mix=mix), **(SPARSE if sparse else {})}

    def run(comm: Communicator) -> list[bytes]:
        with device.on(streams[comm.rank]) as stream:
            replica = Replica(comm, device, **options)
            for number in range(3 * EVERY + 1):
                replica.step(number)
            stream.synchronize()
            return replica.state()

    expected = together(comms, lambda comm: trained_on_host(comm, 3 * EVERY + 1, **options))
    assert together(comms, run) == expected


@pytest.mark.parametrize(
    "options", [{}, SPARSE, {"streaming": Streaming(2, delay=3, mix=0.25)}], ids=["dense", "sparse", "late"]
)
def test_replicas_of_two_ranks_have_the_bits_of_the_host(device: ComputingRuntime, options: dict[str, Any]) -> None:
    """Each rank exchanges a part of them."""

    def run(comm: Communicator, runtime: ComputingRuntime | None) -> Replica:
        replica = Replica(comm, runtime, replica=2, **options)
        replica.number //= 2
        for number in range(2 * EVERY + 4):
            replica.step(number)
        replica.diloco.exchange()
        return replica

    def run_there(comm: Communicator) -> list[bytes]:
        with device.on(device.new_stream()) as stream:
            replica = run(comm, device)
            stream.synchronize()
            return replica.state()

    expected, comms = (Communicator.local(4, timeout_s=60.0) for _ in range(2))
    try:
        found = together(comms, run_there)
        assert found == together(expected, lambda comm: run(comm, None).state())
        assert found.count(found[0]) == 4
    finally:
        for comm in (*comms, *expected):
            comm.close()


@pytest.mark.parametrize("sparse", [False, True])
def test_the_host_waits_for_no_device_until_the_delay_is_over(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], sparse: bool
) -> None:
    """The streams stand still from before the step that begins an exchange until its average is needed."""
    options = {"streaming": MIXED, **(SPARSE if sparse else {})}

    def run(comm: Communicator) -> list[bytes]:
        goes_on = threading.Event()
        with device.on(streams[comm.rank]) as stream:
            replica = Replica(comm, device, **options)
            for number in range(EVERY - 1):
                replica.step(number)
            comm.barrier()
            before = device.host_waits
            stream.put(goes_on.wait)
            for number in range(EVERY - 1, EVERY + 3):
                replica.step(number)
            assert not replica.diloco._in_flight()
            waits = device.host_waits - before
            comm.barrier()
            assert waits == 0
            goes_on.set()
            for number in range(EVERY + 3, 3 * EVERY):
                replica.step(number)
            assert replica.diloco.rounds == 2
            stream.synchronize()
            return replica.state()

    expected = together(comms, lambda comm: trained_on_host(comm, 3 * EVERY, **options))
    assert together(comms, run) == expected


def test_an_exchange_begins_once_the_device_is_there(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    """On one rank earlier than on another."""

    def run(comm: Communicator) -> int:
        with device.on(streams[comm.rank]) as stream:
            replica = Replica(comm, device, streaming=WHOLE)
            for number in range(EVERY):
                replica.step(number)
            if comm.rank == 0:
                stream.synchronize()
                _wait_for_copies(device)
                replica.step(EVERY)
                assert len(replica.diloco._in_flight()) == 1
            else:
                replica.step(EVERY)
            replica.diloco.exchange()
            return replica.diloco.checksum()

    assert len({*together(comms, run)}) == 1


def _wait_for_copies(device: ComputingRuntime) -> None:
    for stream in device.streams:
        stream.synchronize()


def test_a_replica_that_diverged_is_told_when_its_device_is_there(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    all_trained = threading.Barrier(len(comms))

    def run(comm: Communicator) -> BaseException:
        with device.on(streams[comm.rank]):
            replica = Replica(comm, device, streaming=WHOLE, **SPARSE)
            for number in range(EVERY - 1):
                replica.step(number)
            all_trained.wait(60)  # an abort ends also what another rank has not finished
            if comm.rank == 1:
                with torch.no_grad():
                    next(iter(replica.model.parameters())).mul_(torch.nan)
            try:
                for number in range(EVERY - 1, 2 * EVERY):
                    replica.step(number)
            except (NonFiniteGradient, TransportError) as error:
                return error
            raise AssertionError("nothing was told")

    errors = together(comms, run)
    assert [isinstance(one, NonFiniteGradient) for one in errors] == [False, True, False]
    assert all("entries of '0.weight' have become NaN or infinite in training" in str(one) for one in errors)


def test_replicas_on_devices_come_and_go(device: ComputingRuntime, streams: list[FakeStream]) -> None:
    """While exchanges wait for a device: one comes, and one leaves."""
    store, comes = HashStore(), threading.Event()

    def run(number: int) -> tuple[int, int, set[int]]:
        goal: int | None
        if number == 2:
            assert comes.wait(60)
        group = ReplicaGroup(store, 2, timeout_s=60.0)
        with device.on(streams[number]) as stream:
            replica = Replica(group, device, streaming=Streaming(3, delay=3, mix=0.5), **SPARSE)
            replica.number, goal, step, sizes = number, None, 0, set[int]()
            while goal is None or replica.diloco.rounds < goal:
                sizes.add(replica.diloco.comm.world_size)
                if goal is None and 3 in sizes:  # all see that after one round
                    goal = replica.diloco.rounds + (12 if number == 1 else 36)
                replica.step(step)
                step += 1
                if replica.diloco.rounds >= 6:
                    comes.set()
                time.sleep(0.01)
            if number == 1:
                replica.diloco.close()
                return 0, 0, sizes
            replica.diloco.exchange()
            stream.synchronize()
            found = replica.diloco.rounds, replica.diloco.checksum(), sizes
            replica.diloco.close()
            return found

    with warnings.catch_warnings(), ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("ignore", RuntimeWarning)  # one leaves
        first, _, third = [future.result(100) for future in [pool.submit(run, number) for number in range(3)]]
    assert first[:2] == third[:2]
    assert first[2] >= {2, 3}


def test_devices_whose_streams_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies by itself, as where CUDA's bindings are not there, or of ROCm."""

    def make() -> Any:
        raise TypeError("x is on a ROCm device")

    monkeypatch.setitem(runtimes._makers, "cpu", make)
    monkeypatch.setitem(runtimes._makers, "meta", make)
    values = torch.arange(4.0)
    assert torch.equal(on_host(values), values)
    assert on_device_of(torch.empty(4, device="meta"), values).device.type == "meta"


def test_a_state_of_what_the_device_has_not_reached(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    """It is sent then, so that the state has its average; and a state that is loaded replaces it."""

    def run(comm: Communicator) -> tuple[list[bytes], list[bytes]]:
        with device.on(streams[comm.rank]) as stream:
            replica = Replica(comm, device, streaming=MIXED, **SPARSE)
            for number in range(EVERY):
                replica.step(number)
            state = replica.diloco.state_dict()
            assert [one["left"] for one in state["fragments"]] == [4]
            velocities = [entry["momentum_buffer"].memory.clone() for entry in replica.optimizer.state.values()]
            other = Replica(comm, device, streaming=MIXED, **SPARSE)
            for number in range(EVERY):
                other.step(number)
            other.diloco.load_state_dict(state)
            for entry, velocity in zip(other.optimizer.state.values(), velocities, strict=True):
                entry["momentum_buffer"].copy_(computed_on(device, velocity))
            for one in (replica, other):
                for number in range(EVERY, 2 * EVERY + 4):
                    one.step(number)
                assert one.diloco.rounds == 2
            stream.synchronize()
            return replica.state(), other.state()

    for one, other in together(comms, run):
        assert one == other
