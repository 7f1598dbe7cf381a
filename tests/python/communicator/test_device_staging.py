"""Pinned memory of operations on device tensors: what is kept, what is used again, and how much is under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator
from telegrad.communicator import base
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.staging import Lease, Staging, staging_of

CHUNK = 4096
"""The shortest buffers that there are."""


def lent(staging: Staging, *sizes: tuple[int, int], **options: Any) -> list[Lease]:
    leases: list[Lease] = []
    staging.lease(sizes, leases, **options)
    return leases


@pytest.fixture
def held(streams: list[FakeStream]) -> Iterator[threading.Event]:
    """The ranks' streams get nowhere before this is set."""
    event = threading.Event()
    for stream in streams:
        stream.put(event.wait)
    yield event
    event.set()


def given_back(device: FakeRuntime, staging: Staging, leases: list[Lease]) -> None:
    stream = device.new_stream()
    staging.give_back(stream, device.record(stream), leases)
    stream.synchronize()


def test_leases_are_apart_and_used_again(device: FakeRuntime) -> None:
    staging = Staging(device)
    first, second = lent(staging, (100, 4096), (4096, 1))
    assert first.words.ready != second.words.ready
    assert all(lease.words.done - lease.words.ready == 64 for lease in (first, second))
    assert first.input.numel() == first.output.numel() == 4096
    used = (first.words.ready, first.words.value)
    given_back(device, staging, [first, second])
    (again,) = lent(staging, (1, 2))
    assert again in (first, second)
    assert (again.words.ready, again.words.value) != used
    (other,) = lent(staging, (4097, 0))
    assert (other.input.numel(), other.output, other.output_address) == (8192, None, 0)
    assert (staging.counts.allocated, staging.counts.reused) == (3, 1)


def test_what_is_kept_is_bounded(device: FakeRuntime) -> None:
    staging = Staging(device, kept_bytes=3 * 4096)
    given_back(device, staging, lent(staging, (100, 4096), (100, 4096)))
    (longer,) = lent(staging, (8192, 0))
    assert (staging.counts.dropped, staging.counts.kept_bytes) == (1, 2 * 4096)
    given_back(device, staging, [longer])
    lent(staging, (1, 0))
    assert (staging.counts.dropped, staging.counts.kept_bytes) == (2, 8192)  # what was used last is kept


def test_what_is_given_back_twice_is_lent_once(device: FakeRuntime) -> None:
    staging = Staging(device)
    leases = lent(staging, (1, 1))
    stream = device.new_stream()
    for _ in range(2):
        staging.give_back(stream, device.record(stream), leases)
    stream.synchronize()
    first, second = lent(staging, (1, 1), (1, 1))
    assert first is not second
    assert staging.counts.lent_bytes == 4 * 4096


def test_more_than_the_bound_is_refused_before_it_is_lent(device: FakeRuntime) -> None:
    staging = Staging(device, most_bytes=4 * 4096)
    leases: list[Lease] = []
    with pytest.raises(MemoryError, match=r"needs 24576 bytes of pinned memory, 0 are under way, and TELEGRAD_PINNED_"):
        staging.lease([(1, 1)] * 3, leases)
    assert not leases
    with pytest.raises(MemoryError, match="TELEGRAD_PINNED_BYTES=16384 is the most: set it higher"):
        lent(staging, (4 * 4096, 1), may_wait=True)  # nothing that ends makes room for that
    assert staging.counts.lent_bytes == 0


def test_the_host_waits_for_what_ends(device: FakeRuntime) -> None:
    staging = Staging(device, most_bytes=4 * 4096)
    leases, stream, held = lent(staging, (1, 1), (1, 1)), device.new_stream(), threading.Event()
    stream.put(held.wait)
    staging.give_back(stream, device.record(stream), leases)
    found: list[Lease] = []
    waiting = threading.Thread(target=lambda: staging.lease([(1, 1)] * 3, found, may_wait=True))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert not found
    held.set()
    waiting.join(60.0)
    assert len(found) == 2  # as many as there is room for


@pytest.mark.parametrize(("given", "most"), [(None, 2 << 30), ("1000000", 1_000_000)])
def test_the_bound_of_a_process(
    device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, given: str | None, most: int
) -> None:
    monkeypatch.delenv("TELEGRAD_PINNED_BYTES", raising=False)
    if given is not None:
        monkeypatch.setenv("TELEGRAD_PINNED_BYTES", given)
    assert staging_of(device).most_bytes == most


@pytest.mark.parametrize("given", ["2GiB", "-5", "4096", ""])
def test_bounds_that_are_none(device: FakeRuntime, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TELEGRAD_PINNED_BYTES", given)
    with pytest.raises(ValueError, match=f"TELEGRAD_PINNED_BYTES='{given}' must be a number of bytes, 8192 or more"):
        staging_of(device)


def test_a_tensor_longer_than_the_bound_goes_bit_by_bit(
    device: FakeRuntime, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in threads, with memory of their own, as those of several processes have."""
    monkeypatch.setattr(transfers, "CHUNK_BYTES", CHUNK)
    comms = Communicator.local(RANKS, timeout_s=60.0)
    most, chunks = 10 * CHUNK, 12
    works: dict[int, Any] = {}

    def run(rank: int) -> None:
        with device.on(streams[rank]):
            works[rank] = comms[rank].all_reduce(tensors[rank], async_op=True)
            comms[rank].all_reduce(others[rank])
            works[rank].wait()

    made: list[Staging] = []
    monkeypatch.setattr(base, "staging_of", lambda _: [made.append(Staging(device, most_bytes=most)), made[-1]][1])
    monkeypatch.setattr(Communicator, "driver", "threads")
    tensors = [on_fake_device(values(rank, chunks * CHUNK // 4)) for rank in range(RANKS)]
    others = [on_fake_device(values(rank, chunks * CHUNK // 4)) for rank in range(RANKS)]
    seen: list[int] = []
    copy = device.copy_to_host

    def watched(*arguments: Any) -> None:
        seen.append(max(staging.counts.lent_bytes for staging in made))
        copy(*arguments)

    monkeypatch.setattr(device, "copy_to_host", watched)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    expected = sum(values(rank, chunks * CHUNK // 4) for rank in range(RANKS)).tolist()
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == others[rank].tolist() == expected
        assert len(works[rank]._requests) == chunks
    assert max(seen) <= most
    assert len(seen) == 2 * chunks * RANKS
    for comm in comms:
        comm.close()


def test_ranks_of_one_process_do_not_wait_for_each_other(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    held: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging_of(device), "most_bytes", 2 * CHUNK * RANKS)
    tensors = [on_fake_device(values(rank, 10)) for rank in range(RANKS)]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank]))
    with (
        device.on(streams[0]),
        pytest.raises(MemoryError, match="24576 are under way, and TELEGRAD_PINNED_BYTES=24576"),
    ):
        comms[0].all_reduce(tensors[0])
    held.set()
    for comm, stream in zip(comms, streams, strict=True):
        comm.synchronize()
        stream.synchronize()
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank], "max"))
    streams[0].synchronize()
    assert tensors[0].tolist() == sum(values(rank, 10) for rank in range(RANKS)).tolist()


def test_beside_a_message_nobody_waits(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer may send it once this rank has called what comes next."""
    monkeypatch.setattr(staging_of(device), "most_bytes", 3 * CHUNK)
    monkeypatch.setattr(Communicator, "driver", "threads")
    late, message = on_fake_device(torch.zeros(10)), on_fake_device(values(1, 10))
    with device.on(streams[0]):
        work = comms[0].recv(late, 1, async_op=True)
        comms[0].send(message, 1)
        with pytest.raises(MemoryError, match="some of them of messages, whose peers may wait for this rank"):
            comms[0].all_reduce(message)
        with pytest.raises(MemoryError, match="needs 8192 bytes of pinned memory, 8192 are under way"):
            comms[0].sendrecv(message, 2, on_fake_device(torch.zeros(10)), 2)
        assert work is not None
        work.wait()
    comms[1].recv(torch.zeros(10), 0)
    comms[1].send(values(5, 10), 0)
    streams[0].synchronize()
    assert late.tolist() == values(5, 10).tolist()


def test_a_message_that_is_over_forbids_no_waiting(
    device: FakeRuntime, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in threads; the sum needs twice the memory that there is, and ranks 0 and 1 had a message before."""
    monkeypatch.setattr(transfers, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(base, "staging_of", lambda _: Staging(device, most_bytes=4 * CHUNK))
    monkeypatch.setattr(Communicator, "driver", "threads")
    comms = Communicator.local(RANKS, timeout_s=60.0)
    tensors = [on_fake_device(values(rank, 4 * CHUNK // 4)) for rank in range(RANKS)]
    message = on_fake_device(torch.zeros(10))
    with device.on(streams[0]):
        comms[0].send(on_fake_device(values(0, 10)), 1)
    with device.on(streams[1]):
        comms[1].recv(message, 0)
    for comm, stream in zip(comms, streams, strict=True):
        comm.synchronize()
        stream.synchronize()

    def run(rank: int) -> None:
        with device.on(streams[rank]):
            try:
                comms[rank].all_reduce(tensors[rank])
            except BaseException as error:
                comms[rank].abort(repr(error))
                raise

    with ThreadPoolExecutor(RANKS) as threads:
        for ended in [threads.submit(run, rank) for rank in range(RANKS)]:
            ended.result(timeout=60.0)
    for rank, (comm, stream) in enumerate(zip(comms, streams, strict=True)):
        stream.synchronize()
        assert tensors[rank].tolist() == sum(values(one, 4 * CHUNK // 4) for one in range(RANKS)).tolist()
        comm.close()
    assert message.tolist() == values(0, 10).tolist()


def test_a_host_that_runs_ahead_waits_for_its_stream(
    device: FakeRuntime, streams: list[FakeStream], held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_of(device), "most_bytes", 3 * 2 * CHUNK)
    (alone,) = Communicator.local(1)
    tensors = [on_fake_device(values(at, 10)) for at in range(10)]
    called: list[int] = []

    def run() -> None:
        with device.on(streams[0]), alone:
            for at, x in enumerate(tensors):
                alone.all_reduce(x)
                called.append(at)
            alone.synchronize()
            streams[0].synchronize()

    ahead = threading.Thread(target=run)
    ahead.start()
    ahead.join(0.2)
    assert len(called) <= 3
    held.set()
    ahead.join(60.0)
    assert len(called) == 10
    assert [x.tolist() for x in tensors] == [values(at, 10).tolist() for at in range(10)]
