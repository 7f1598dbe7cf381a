"""What loads kernels does so before a stream waits for a peer: loading may wait for all streams of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime
from device_ranks import RANKS, on_all
from fake_device import DEVICE_TYPE, FakeRuntime, FakeStream, on_fake_device
from triton_arrays import DEVICE

from telegrad import Communicator, DeviceEntries
from telegrad.communicator.cuda import runtime as runtimes
from telegrad.kernels.staging import triton as kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]


class LoadingRuntime(ComputingRuntime):
    """Writes down, in the host's order, kernels that are launched for the first time, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[str] = []
        self.launches = 0
        self._loaded: set[Any] = set()

    def launch(self, stream: FakeStream, kernels: Callable[..., None], *tensors: torch.Tensor) -> None:
        self.launches += 1
        name = kernels.__name__
        # As Triton tells kernels apart, and torch loads its own.
        compiled = (name, *((x.dtype, x.data_ptr() % 16 == 0) for x in tensors))
        if compiled not in self._loaded:
            self._loaded.add(compiled)
            self.journal.append(f"loads {name}")
        super().launch(stream, kernels, *tensors)

    def wait_value(self, stream: FakeStream, address: int, value: int) -> None:
        self.journal.append("waits")
        super().wait_value(stream, address, value)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadingRuntime]:
    runtime = LoadingRuntime()
    monkeypatch.setitem(runtimes._makers, DEVICE_TYPE, lambda: runtime)
    monkeypatch.setitem(runtimes._runtimes, DEVICE_TYPE, runtime)
    yield runtime
    runtime.stop()


LOADS = [f"loads {kernels.stage.__name__}", f"loads {kernels.write_sum.__name__}"]


def sums(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    dtype: torch.dtype = torch.float32,
    room: int = 3,
    first: int = 0,
    n: int = 10,
    loses: bool = False,
    **options: Any,
) -> None:
    """Each rank adds its number + 1 at 1 and 4 of ``n``; ``first``: where in its memory the output begins; ``loses``:
    what rounding loses is wanted."""
    places = torch.tensor([1, 4] + [9] * (room - 2), dtype=torch.uint32)
    outs = [on_fake_device(torch.zeros(first + n, dtype=dtype))[first:] for _ in comms]

    def call(comm: Communicator, rank: int) -> Any:
        values = on_fake_device(torch.full((room,), rank + 1.0, dtype=dtype))
        given = DeviceEntries(on_fake_device(places), values, on_fake_device(torch.tensor([2])), n)
        lost = {"wire": "int8", "error": on_fake_device(torch.zeros(n))} if loses else {}
        return comm.all_reduce(given, out=outs[rank], **lost, **options)

    works = on_all(device, comms, streams, call)
    for rank, stream in enumerate(streams):
        with device.on(stream):
            if options.get("async_op"):
                works[rank].wait()
        stream.synchronize()
        assert outs[rank].tolist() == [0.0, 6.0, 0.0, 0.0, 6.0] + [0.0] * (n - 5)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("room", [2, 3])
def test_kernels_are_loaded_before_the_first_wait(
    device: LoadingRuntime, comms: list[Communicator], streams: list[FakeStream], async_op: bool, room: int
) -> None:
    sums(device, comms, streams, room=room, async_op=async_op)
    assert device.journal == LOADS + ["waits"] * RANKS


def test_once_for_each_kind_of_tensor(
    device: LoadingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    launched: list[int] = []
    for options, loads in (
        ({}, LOADS),
        ({"dtype": torch.bfloat16}, LOADS),
        ({"first": 1}, LOADS[1:]),  # an output that is aligned otherwise
        ({"room": 5}, []),
        ({}, []),
    ):
        device.journal.clear()
        device.launches = 0
        sums(device, comms, streams, **options)
        assert device.journal == loads + ["waits"] * RANKS
        launched.append(device.launches)
    assert launched == [2 * RANKS + 2] * 3 + [2 * RANKS] * 2


@pytest.mark.parametrize("loses", [False, True])
def test_whether_there_is_room_for_entries_is_a_kind(
    device: LoadingRuntime, comms: list[Communicator], streams: list[FakeStream], loses: bool
) -> None:
    """In the sum, and in what is lost: addresses of nothing are aligned otherwise."""
    launched: list[int] = []
    for n in (8, 7, 6, 8):
        device.launches = 0
        sums(device, comms, streams, n=n, loses=loses)
        launched.append(device.launches - 2 * RANKS)
    assert launched == [2, 2, 0, 0]


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_those_that_encode_and_decode_too(
    device: LoadingRuntime, comms: list[Communicator], streams: list[FakeStream], async_op: bool, loses: bool
) -> None:
    """Once for each wire, reduction and kind of tensors; the tensors stay what they are meanwhile."""
    loads = [f"loads {name}" for name in ("encode", "decode")]
    for first, op, found in ((0, "sum", loads), (0, "sum", []), (1, "sum", loads), (0, "avg", [])):
        device.journal.clear()
        tensors = [on_fake_device(torch.full((first + 8,), rank + 1.0))[first:] for rank in range(RANKS)]
        lost = [on_fake_device(torch.zeros(8)) if loses else None for _ in range(RANKS)]

        def call(comm: Communicator, rank: int, given: Any = (tensors, lost, op)) -> Any:
            xs, errors, op = given
            return comm.all_reduce(xs[rank], op, wire="bf16", error=errors[rank], async_op=async_op)

        works = on_all(device, comms, streams, call)
        for rank, stream in enumerate(streams):
            with device.on(stream):
                if async_op:
                    works[rank].wait()
            stream.synchronize()
            assert tensors[rank].tolist() == [2.0 if op == "avg" else 6.0] * 8
        assert device.journal == found + ["waits"] * RANKS
