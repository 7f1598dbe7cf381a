"""all_reduce(wire=) of device tensors: what the host gives, in every chunk. Over a device without hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.entries import DeviceEntries
from telegrad.communicator.operands import WIRES

CHUNK = 1 << 12  # elements


def given(rank: int, n: int) -> torch.Tensor:
    return values(rank, n) / 7 + rank


def of_host(n: int, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sums and errors of calls one after another, each of one chunk."""
    comms = Communicator.local(RANKS, timeout_s=60.0)
    sums, errors = [given(rank, n) for rank in range(RANKS)], [torch.zeros(n) for _ in range(RANKS)]
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


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("n", [0, 1, 1000, CHUNK, 3 * CHUNK + 500])
def test_the_hosts_bits(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    monkeypatch: pytest.MonkeyPatch,
    wire: str,
    n: int,
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 4 * CHUNK)
    options: dict[str, Any] = {"op": "avg", "wire": wire, "seed": 3}
    sums, errors = of_host(n, **options)
    tensors = [on_fake_device(given(rank, n)) for rank in range(RANKS)]
    lost = [on_fake_device(torch.full((n,), 9.0)) for _ in range(RANKS)]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank], error=lost[rank], **options))
    for rank in range(RANKS):
        streams[rank].synchronize()
        assert torch.equal(tensors[rank].as_subclass(torch.Tensor), sums[rank])
        assert torch.equal(lost[rank].as_subclass(torch.Tensor), errors[rank])
    assert n < 1000 or any(one.any() for one in errors)


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
