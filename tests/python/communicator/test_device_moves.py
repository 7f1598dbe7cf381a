"""reduce, gather, scatter, all_to_all and barrier of device tensors, over a device without hardware."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator, MismatchedCall
from telegrad.communicator.cuda import transfers

Run = Callable[[Callable[[Communicator, int], Any]], list[Any]]
COUNTS = [5, 0, *range(7, 7 + RANKS - 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint32, torch.bool, torch.complex64]


@pytest.fixture(params=[False, True], ids=["blocking", "async"])
def run(
    request: pytest.FixtureRequest, device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> Run:
    """Calls what it is given on all ranks, and gives the results once the streams are done."""

    def on_ranks(call: Callable[[Communicator, int], Any]) -> list[Any]:
        def with_work(comm: Communicator, rank: int) -> Any:
            work = call(comm, rank)
            if not request.param:
                return work
            work.wait()
            return work.result()

        found = on_all(device, comms, streams, with_work)
        for stream in streams:
            stream.synchronize()
        return found

    on_ranks.is_async = request.param  # type: ignore[attr-defined]
    return on_ranks


def options(run: Run) -> dict[str, bool]:
    return {"async_op": run.is_async}  # type: ignore[attr-defined]


def plain(x: Any) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def given(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, n, torch.int64).to(dtype) for rank in range(RANKS)]


@pytest.fixture(params=[None, 64], ids=["whole", "chunks"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(transfers, "CHUNK_BYTES", request.param)


@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_scatter(run: Run, dtype: torch.dtype, n: int) -> None:
    host, root = given(n, dtype), RANKS - 1
    found = run(lambda comm, rank: comm.gather(on_fake_device(host[rank]), root, **options(run)))
    assert found[:-1] == [None] * (RANKS - 1)
    assert torch.equal(plain(found[root]), torch.stack(host))
    outs = [on_fake_device(torch.ones(n).to(dtype)) for _ in range(RANKS)]
    blocks = on_fake_device(torch.stack(host))
    scattered = run(lambda comm, rank: comm.scatter(blocks if rank == root else None, outs[rank], root, **options(run)))
    for rank in range(RANKS):
        assert scattered[rank] is outs[rank]
        assert torch.equal(plain(outs[rank]), host[rank])


def test_blocks_of_unequal_and_of_named_equal_lengths(run: Run) -> None:
    for counts in (COUNTS, [33] * RANKS):
        host = [values(rank, count, torch.int32) for rank, count in enumerate(counts)]
        found = run(
            lambda comm, rank, host=host, counts=counts: comm.gather(
                on_fake_device(host[rank]), 0, counts=counts, **options(run)
            )
        )
        assert torch.equal(plain(found[0]), torch.cat(host))
        outs = [on_fake_device(torch.zeros(count, dtype=torch.int32)) for count in counts]
        joined = on_fake_device(torch.cat(host))
        run(
            lambda comm, rank, outs=outs, joined=joined, counts=counts: comm.scatter(
                joined if rank == 0 else None, outs[rank], 0, counts=counts, **options(run)
            )
        )
        assert all(torch.equal(plain(out), x) for out, x in zip(outs, host, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all(run: Run, dtype: torch.dtype, rows: int) -> None:
    host = [x.view(RANKS * rows, 2) for x in given(RANKS * rows * 2, dtype)]
    found = run(lambda comm, rank: comm.all_to_all(on_fake_device(host[rank]), **options(run)))
    for rank in range(RANKS):
        right = torch.cat([x[rank * rows : (rank + 1) * rows] for x in host])
        assert torch.equal(plain(found[rank]), right)


def test_all_to_all_of_unequal_lengths(run: Run) -> None:
    lengths = [[(3 * sender + 5 * receiver) % 7 for receiver in range(RANKS)] for sender in range(RANKS)]
    host = [values(rank, sum(lengths[rank])) for rank in range(RANKS)]
    found = run(
        lambda comm, rank: comm.all_to_all(
            on_fake_device(host[rank]),
            send_counts=lengths[rank],
            receive_counts=[lengths[sender][rank] for sender in range(RANKS)],
            **options(run),
        )
    )
    for rank in range(RANKS):
        right = torch.cat([host[sender].split(lengths[sender])[rank] for sender in range(RANKS)])
        assert torch.equal(plain(found[rank]), right)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("n", [0, 1, 100])
def test_reduce_in_place_and_into_another(run: Run, op: str, n: int) -> None:
    combine = {"sum": torch.sum, "prod": torch.prod, "min": torch.amin, "max": torch.amax}[op]
    host, root = given(n, torch.int64), 1
    right = combine(torch.stack(host), 0)
    tensors = [on_fake_device(x.clone()) for x in host]
    out = on_fake_device(torch.zeros(n, dtype=torch.int64))
    run(lambda comm, rank: comm.reduce(tensors[rank], root, op, out=out if rank == root else None, **options(run)))
    assert torch.equal(plain(out), right)
    assert all(torch.equal(plain(x), was) for x, was in zip(tensors, host, strict=True))
    run(lambda comm, rank: comm.reduce(tensors[rank], root, op, **options(run)))
    for rank in range(RANKS):
        assert torch.equal(plain(tensors[rank]), right if rank == root else host[rank])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8, torch.uint64, torch.complex128], ids=str)
def test_reduce_has_the_hosts_bits(run: Run, dtype: torch.dtype) -> None:
    host = given(50, dtype)
    with_host = Communicator.local(RANKS, timeout_s=60.0)
    right = [x.clone() for x in host]
    for work in [comm.reduce(right[rank], 0, async_op=True) for rank, comm in enumerate(with_host)]:
        work.wait()
    for comm in with_host:
        comm.close()
    tensors = [on_fake_device(x) for x in host]
    run(lambda comm, rank: comm.reduce(tensors[rank], 0, **options(run)))
    assert all(torch.equal(plain(x), one) for x, one in zip(tensors, right, strict=True))


def test_the_host_does_not_wait_and_a_barrier_passes_meanwhile(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    held = threading.Event()
    tensors = [on_fake_device(torch.zeros(4)) for _ in range(RANKS)]
    for rank, stream in enumerate(streams):
        stream.put(held.wait)
        stream.put(lambda rank=rank: tensors[rank].fill_(rank + 1.0))
    gathered = on_all(device, comms, streams, lambda comm, rank: comm.gather(tensors[rank], 0))
    for work in [comm.barrier(async_op=True) for comm in comms]:
        work.wait()  # of hosts: what is in streams is not waited for
    held.set()
    for stream in streams:
        stream.synchronize()
    assert plain(gathered[0]).tolist() == [[rank + 1.0] * 4 for rank in range(RANKS)]


def test_what_does_not_fit_is_refused(comms: list[Communicator], device: FakeRuntime) -> None:
    x, host = on_fake_device(torch.zeros(RANKS)), torch.zeros(RANKS)
    with pytest.raises((TypeError, ValueError), match="in one place"):
        comms[0].all_to_all(x, out=host)
    with pytest.raises((TypeError, ValueError), match="in one place"):
        comms[0].gather(x, 0, out=torch.zeros(RANKS, RANKS))
    with pytest.raises((TypeError, ValueError), match="in one place"):
        comms[0].scatter(torch.zeros(RANKS, RANKS), x, 0)
    with pytest.raises((TypeError, ValueError), match="in one place"):
        comms[0].reduce(x, 0, out=host)
    with pytest.raises(ValueError, match="shares memory"):
        comms[0].all_to_all(x, out=x)
    assert all(comm.stats()["operations"] == 0 for comm in comms)


def test_other_roots_are_different_calls(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    x = [on_fake_device(torch.zeros(3)) for _ in comms]
    on_all(device, comms, streams, lambda comm, rank: comm.reduce(x[rank], min(rank, 1)))
    for comm, stream in list(zip(comms, streams, strict=True))[:2]:  # both roots: others may have sent, and be done
        stream.synchronize()
        with device.on(stream), pytest.raises(MismatchedCall, match="root="):
            comm.synchronize()
