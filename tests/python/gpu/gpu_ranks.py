"""Ranks of this process on a GPU, and what they allocate for their operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.communicator.cuda.staging import Lease, staging_of

RANKS = 2

_EVENTS = 32


def own_streams(ranks: int) -> list[torch.cuda.ExternalStream]:
    """One for each rank. Not torch's own: with the first of these torch makes all that it ever has, as many as the
    hardware has queues, and a stream that waits would hold up another rank's."""
    runtime, device = runtime_of("cuda"), torch.device("cuda", torch.cuda.current_device())
    runtime.enter(device)
    try:
        made = [runtime.new_stream(device) for _ in range(ranks)]
    finally:
        runtime.leave()
    return [stream.of_torch for stream in made]


@contextmanager
def laid_aside(streams: Sequence[torch.cuda.Stream], *sizes: tuple[int, int]) -> Iterator[None]:
    """What a rank on each of these streams allocates for its operations is there before, while no stream waits: a
    driver may not return from allocating before those that wait go on, and for the rank that one of them waits for,
    this thread is still to call. ``sizes``: bytes of input and of output of what each rank has under way at once.
    Inside nothing else is allocated."""
    runtime, device = runtime_of("cuda"), torch.device("cuda", torch.cuda.current_device())
    staging = staging_of(runtime)
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.empty(1, device="cuda")  # torch then has some MiB for small tensors of that stream
    torch.cuda.synchronize()
    leases: list[Lease] = []
    runtime.enter(device)
    try:
        current = runtime.current_stream(device)
        staging.lease(list(sizes) * len(streams), leases)
        events = [runtime.record(current) for _ in range(_EVENTS)]
        runtime.wait_on_host(events[-1])
        staging.give_back(current, events[-1], leases)
    finally:
        runtime.leave()
    del events
    allocated = staging.counts.allocated
    with mock.patch.object(staging, "MOST_BYTES", 0):  # which would be lent some of it
        yield
    assert staging.counts.allocated == allocated


def chunks(nbytes: int) -> list[tuple[int, int]]:
    """Of a dense sum of ``nbytes``: how many bytes each chunk copies to the host, and back."""
    lengths = [min(transfers.CHUNK_BYTES, nbytes - first) for first in range(0, max(nbytes, 1), transfers.CHUNK_BYTES)]
    return [(length, length) for length in lengths]
