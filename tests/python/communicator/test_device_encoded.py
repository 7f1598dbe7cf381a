"""all_reduce(wire=) of device tensors: what the host gives, in every chunk, of fewer bytes that are copied. Over a
device without hardware."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import FakeRuntime, FakeStream, on_fake_device
from triton_arrays import DEVICE

from telegrad import Communicator
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.entries import DeviceEntries
from telegrad.communicator.operands import WIRES
from telegrad.errors import TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

CHUNK = 1 << 12  # elements
BITS = {"bf16": 16, "f16": 16, "int8": 8 + 32 / 256, "qsgd8": 8 + 32 / 1024, "qsgd4": 4 + 32 / 1024}
BITS |= {"qsgd2": 2 + 32 / 1024, "e3m0": 4 + 32 / 1024, "codebook2": 2 + 64 / 512}


def given(rank: int, n: int) -> torch.Tensor:
    return values(rank, n) / 7 + rank


def of_host(n: int, ranks: int = RANKS, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sums and errors of calls one after another, each of one chunk."""
    comms = Communicator.local(ranks, timeout_s=60.0)
    sums, errors = [given(rank, n) for rank in range(ranks)], [torch.zeros(n) for _ in range(ranks)]
    for first in range(0, max(n, 1), CHUNK):
        part = slice(first, first + CHUNK)
        works = [
            comm.all_reduce(sums[rank][part], error=errors[rank][part], async_op=True, **options)
            for rank, comm in enumerate(comms)
        ]
        for work in works:
            work.wait()
    for comm in comms:
        comm.close()
    return sums, errors


def call_all(device: FakeRuntime, ranks: int, call: Callable[[Communicator, int], Any]) -> None:
    """``ranks`` of them, each on a stream of its own."""
    comms, streams = Communicator.local(ranks, timeout_s=60.0), [device.new_stream() for _ in range(ranks)]
    on_all(device, comms, streams, call)
    for stream in streams:
        stream.synchronize()
    for comm in comms:
        comm.close()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("ranks", "n"), [(3, 0), (3, 1), (3, 1000), (3, CHUNK), (3, 3 * CHUNK + 500), (1, 1500)])
def test_the_hosts_bits(device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, ranks: int, wire: str, n: int) -> None:
    check_the_hosts_bits(device, monkeypatch, ranks, wire, n)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("ranks", "n"), [(2, 0), (2, 1), (2, 2 * CHUNK + 500), (4, 9 * 1024 + 3)])
def test_the_hosts_bits_of_other_numbers(
    device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, ranks: int, wire: str, n: int
) -> None:
    """Two ranks add on the device what both have sent."""
    check_the_hosts_bits(device, monkeypatch, ranks, wire, n)


def check_the_hosts_bits(device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, ranks: int, wire: str, n: int) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 4 * CHUNK)
    options: dict[str, Any] = {"op": "avg", "wire": wire, "seed": 3}
    sums, errors = of_host(n, ranks, **options)
    tensors = [on_fake_device(given(rank, n)) for rank in range(ranks)]
    lost = [on_fake_device(torch.full((n,), 9.0)) for _ in range(ranks)]
    call_all(device, ranks, lambda comm, rank: comm.all_reduce(tensors[rank], error=lost[rank], **options))
    for rank in range(ranks):
        assert torch.equal(plain(tensors[rank]), sums[rank])
        assert torch.equal(plain(lost[rank]), errors[rank])
    assert n < 1000 or any(one.any() for one in errors)
    together = sum(plain(one).double() for one in lost) + ranks * plain(tensors[0]).double()
    exact = sum(given(rank, n).double() for rank in range(ranks))
    torch.testing.assert_close(together, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("wire", ["qsgd8", "qsgd4", "qsgd2", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_rounded_at_random_too(device: FakeRuntime, ranks: int, wire: str, op: str) -> None:
    options = {"op": op, "wire": wire, "seed": 2**63 + 5}
    comms = Communicator.local(ranks, timeout_s=60.0)
    sums = [given(rank, 3000) for rank in range(ranks)]
    for _ in range(2):  # another call draws others
        for work in [comm.all_reduce(sums[rank], async_op=True, **options) for rank, comm in enumerate(comms)]:
            work.wait()
    for comm in comms:
        comm.close()
    tensors = [on_fake_device(given(rank, 3000)) for rank in range(ranks)]

    def twice(comm: Communicator, rank: int) -> None:
        comm.all_reduce(tensors[rank], **options)
        comm.all_reduce(tensors[rank], **options)

    call_all(device, ranks, twice)
    assert all(torch.equal(plain(one), sums[0]) for one in tensors)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_host_tensors_meet_them(device: FakeRuntime, ranks: int) -> None:
    """Up to a chunk: messages are the same."""
    sums, errors = of_host(4000, ranks, wire="qsgd4")
    comms, stream = Communicator.local(ranks, timeout_s=60.0), device.new_stream()
    tensors = [given(rank, 4000) for rank in range(ranks)]
    lost = [torch.zeros(4000) for _ in range(ranks)]
    tensors[1], lost[1] = on_fake_device(tensors[1]), on_fake_device(lost[1])
    works = []
    for rank, comm in enumerate(comms):
        with device.on(stream):
            works.append(comm.all_reduce(tensors[rank], wire="qsgd4", error=lost[rank], async_op=True))
    for rank, work in enumerate(works):
        with device.on(stream):
            work.wait()
        stream.synchronize()
        assert torch.equal(plain(tensors[rank]), sums[rank])
        assert torch.equal(plain(lost[rank]), errors[rank])
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_crosses_the_bus_is_encoded(
    device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, ranks: int, wire: str, loses: bool
) -> None:
    """Of four ranks a quarter goes as float32, and with an error comes back so."""
    n, crossed = 1 << 14, {"copy_to_host": 0, "copy_to_device": 0}

    def copy(name: str, real: Callable[..., None], *args: Any) -> None:
        crossed[name] += args[-1]
        real(*args)

    for name in crossed:
        monkeypatch.setattr(device, name, partial(copy, name, getattr(device, name)))
    tensors = [on_fake_device(given(rank, n)) for rank in range(ranks)]
    lost = [on_fake_device(torch.zeros(n)) if loses else None for _ in range(ranks)]
    call_all(device, ranks, lambda comm, rank: comm.all_reduce(tensors[rank], wire=wire, error=lost[rank]))
    own, encoded = (4 / 4, 3 / 4) if ranks == 4 else (0, 1)
    assert crossed["copy_to_host"] == ranks * n * (encoded * BITS[wire] / 8 + own)
    assert crossed["copy_to_device"] == ranks * n * (BITS[wire] / 8 + own * loses)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_peer_fails_between_two_chunks(device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The chunks before it keep sums and errors, the others are NaN."""
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 4 * CHUNK)
    sums, errors = of_host(CHUNK, ranks, wire="int8")
    comms, streams = Communicator.local(ranks, timeout_s=60.0), [device.new_stream() for _ in range(ranks)]
    n = 3 * CHUNK
    x, lost = on_fake_device(given(0, n)), on_fake_device(torch.ones(n))
    with device.on(streams[0]):
        work = comms[0].all_reduce(x, wire="int8", error=lost, async_op=True)
    for rank in range(1, ranks):
        part, missed = on_fake_device(given(rank, n)[:CHUNK]), on_fake_device(torch.ones(CHUNK))
        with device.on(streams[rank]):
            comms[rank].all_reduce(part, wire="int8", error=missed)
    work.request.wait()  # of the first chunk
    comms[1].abort("the test says so")
    device.wait_on_host(work._event)
    assert torch.equal(plain(x)[:CHUNK], sums[0])
    assert torch.equal(plain(lost)[:CHUNK], errors[0])
    assert plain(x)[CHUNK:].isnan().all()
    assert plain(lost)[CHUNK:].isnan().all()
    with pytest.raises(TransportError, match="the test says so"):
        comms[0].synchronize()
    for comm in comms:
        with contextlib.suppress(TransportError):
            comm.close()


@pytest.mark.parametrize("asked", [{}, {"algorithm": "host_transfer"}])
def test_without_an_error_and_with_out(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], asked: dict[str, str]
) -> None:
    sums, _ = of_host(600, wire="int8")
    tensors = [on_fake_device(given(rank, 600)) for rank in range(RANKS)]
    taken = [on_fake_device(torch.zeros(600)) for _ in range(RANKS)]

    def call(comm: Communicator, rank: int) -> None:
        work = comm.all_reduce(tensors[rank], out=taken[rank], wire="int8", async_op=True, **asked)
        assert work.result() is taken[rank]

    on_all(device, comms, streams, call)
    for rank in range(RANKS):
        streams[rank].synchronize()
        assert torch.equal(taken[rank].as_subclass(torch.Tensor), sums[rank])
        assert torch.equal(tensors[rank].as_subclass(torch.Tensor), given(rank, 600))


def test_what_does_not_fit_is_refused(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    comm, x = comms[0], on_fake_device(torch.zeros(8))
    with device.on(streams[0]):
        with pytest.raises(TypeError, match="x is on .* but error on the host"):
            comm.all_reduce(x, wire="bf16", error=torch.zeros(8))
        with pytest.raises(TypeError, match="error is on"):
            comm.all_reduce(torch.zeros(8), wire="bf16", error=x)
        with pytest.raises(ValueError, match="error shares memory with x"):
            comm.all_reduce(x, wire="bf16", error=x)
        with pytest.raises(ValueError, match="algorithm='nccl' is not supported with wire="):
            comm.all_reduce(x, wire="bf16", algorithm="nccl")
        with pytest.raises(ValueError, match="op='max' is not supported with wire="):
            comm.all_reduce(x, "max", wire="bf16")
        with pytest.raises(TypeError, match="wire= is for float32"):
            comm.all_reduce(on_fake_device(torch.zeros(8, dtype=torch.float64)), wire="bf16")
    with pytest.raises(ValueError, match="algorithm='host_transfer' is not supported with wire="):
        comm.all_reduce(torch.zeros(8), wire="bf16", algorithm="host_transfer")


def test_what_only_rounding_looks_at_is_refused_where_entries_are_not_rounded(
    device: FakeRuntime, comms: list[Communicator]
) -> None:
    places, ones, count = torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.ones(1, dtype=torch.int32)
    entries = DeviceEntries(*(on_fake_device(part) for part in (places, ones, count)), 8)
    out, error = on_fake_device(torch.zeros(8)), on_fake_device(torch.zeros(8))
    with pytest.raises(ValueError, match="error takes what wire= loses, and wire='packed' loses nothing"):
        comms[0].all_reduce(entries, out=out, wire="packed", error=error)
    with pytest.raises(ValueError, match="seed=1 is for a wire= that may round at random"):
        comms[0].all_reduce(entries, out=out, seed=1)


def test_after_a_failure_sums_and_errors_are_nan(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    x, lost = on_fake_device(torch.ones(50)), on_fake_device(torch.ones(50))
    with device.on(streams[0]):
        comms[0].all_reduce(x, wire="qsgd4", error=lost)
    comms[1].abort("the test says so")
    streams[0].synchronize()
    assert x.isnan().all()
    assert lost.isnan().all()
