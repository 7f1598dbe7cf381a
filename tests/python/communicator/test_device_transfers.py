"""Operations on device tensors, over a device without hardware (fake_device.py)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator, Work
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.staging import staging_of
from telegrad.errors import PeerFailed, TransportError
from telegrad.tools import sim


def host_sum(op: str, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    with_host = Communicator.local(RANKS, timeout_s=60.0)
    tensors = [values(rank, n, dtype) for rank in range(RANKS)]
    works = [comm.all_reduce(tensors[rank], op, async_op=True) for rank, comm in enumerate(with_host)]
    for work in works:
        work.wait()
    for comm in with_host:
        comm.close()
    return tensors


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max", "max_abs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_all_reduce_gives_the_hosts_bits(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], op: str, dtype: torch.dtype
) -> None:
    tensors = [on_fake_device(values(rank, 1000, dtype)) for rank in range(RANKS)]
    assert on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank], op)) == [None] * RANKS
    for rank, expected in enumerate(host_sum(op, 1000, dtype)):
        streams[rank].synchronize()
        assert torch.equal(tensors[rank].as_subclass(torch.Tensor), expected)


def test_tensors_that_require_gradients(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors = [on_fake_device(values(rank, 6).view(2, 3)).requires_grad_() for rank in range(RANKS)]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank]))
    gathered = on_all(device, comms, streams, lambda comm, rank: comm.all_gather(tensors[rank]))
    expected = sum(values(rank, 6) for rank in range(RANKS)).view(2, 3).tolist()
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == expected
        assert gathered[rank].tolist() == [expected] * RANKS
        assert not gathered[rank].requires_grad


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_integers_and_out(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], n: int) -> None:
    given = [on_fake_device(values(rank, n, torch.int64)) for rank in range(RANKS)]
    taken = [on_fake_device(torch.zeros(n, dtype=torch.int64)) for _ in range(RANKS)]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(given[rank], out=taken[rank]))
    for rank in range(RANKS):
        streams[rank].synchronize()
        assert given[rank].tolist() == values(rank, n, torch.int64).tolist()
        assert taken[rank].tolist() == sum(values(other, n, torch.int64) for other in range(RANKS)).tolist()


def test_the_host_is_not_blocked(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
    held = threading.Event()
    tensors = [on_fake_device(torch.zeros(10)) for _ in range(RANKS)]
    for rank, stream in enumerate(streams):
        stream.put(held.wait)
        stream.put(lambda rank=rank: tensors[rank].fill_(rank + 1.0))  # a kernel that makes the gradient
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank]))
    # Returned, though no stream has come to it; and the host goes on with other operations meanwhile.
    arrays = [np.ones(4, np.float32) for _ in range(RANKS)]
    works = [comm.all_reduce(arrays[rank], async_op=True) for rank, comm in enumerate(comms)]
    for work in works:
        work.wait()
    assert [array.tolist() for array in arrays] == [[3.0] * 4] * RANKS
    assert tensors[0].tolist() == [0.0] * 10
    held.set()
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == [6.0] * 10


def test_compute_goes_on_beside_a_non_blocking_operation(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors = [on_fake_device(torch.full((10,), rank + 1.0)) for rank in range(RANKS)]
    works: list[Work] = []
    computed = threading.Event()
    for rank in range(RANKS - 1):
        with device.on(streams[rank]):
            works.append(comms[rank].all_reduce(tensors[rank], async_op=True))
    streams[0].put(computed.set)
    assert computed.wait(60.0)  # the last rank has not called yet
    assert not works[0].is_completed()
    assert not {id(stream) for _, stream in device.kept} & {id(stream) for stream in streams}
    with device.on(streams[-1]):
        works.append(comms[-1].all_reduce(tensors[-1], async_op=True))
    seen: list[list[float]] = []
    for rank, work in enumerate(works):
        with device.on(streams[rank]):
            assert work.wait() is True
            assert work.result() is tensors[rank]
        streams[rank].put(lambda rank=rank: seen.append(tensors[rank].tolist()))
        streams[rank].synchronize()
    assert seen == [[6.0] * 10] * RANKS
    assert all(work.is_completed() for work in works)
    spans = [work.span_s() for work in works]
    assert all(span is not None and span[0] <= span[1] for span in spans)
    with pytest.raises(ValueError, match="timeout_s=0 must be above 0"):
        works[0].wait(0)


def test_a_future_is_complete_at_once_and_makes_the_stream_wait(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors = [on_fake_device(torch.full((10,), rank + 1.0)) for rank in range(RANKS)]
    futures = []
    for rank in range(RANKS - 1):
        with device.on(streams[rank]):
            futures.append(comms[rank].all_reduce(tensors[rank], async_op=True).get_future())
    assert all(future.done() for future in futures)  # though the last rank has not called
    seen: list[list[float]] = []
    with device.on(streams[0]):
        assert futures[0].wait() is tensors[0]
        streams[0].put(lambda: seen.append(tensors[0].tolist()))
    assert not seen
    with device.on(streams[-1]):
        comms[-1].all_reduce(tensors[-1])
    streams[0].synchronize()
    assert seen == [[6.0] * 10]


def test_what_is_computed_behind_an_operation_is_a_part_of_it(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors = [on_fake_device(torch.full((10,), rank + 1.0)) for rank in range(RANKS)]
    halves = [on_fake_device(torch.zeros(10)) for _ in range(RANKS)]
    works = on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank], async_op=True))
    for rank, work in enumerate(works):

        def halve(rank: int = rank) -> None:
            with torch.no_grad():
                stream = device.current_stream(tensors[rank].device)
                stream.put(lambda: halves[rank].copy_(tensors[rank] / 2))

        work.then(halve, [halves[rank]])
        kept = [id(tensor) for tensor, stream in device.kept if stream is not streams[rank]]
        assert id(halves[rank]) in kept
        with device.on(streams[rank]):
            work.wait()
        assert work.communicated()
        streams[rank].synchronize()
        assert halves[rank].tolist() == [3.0] * 10


def test_a_non_blocking_operation_waits_for_the_callers_stream(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    held = threading.Event()
    tensors = [on_fake_device(torch.zeros(5)) for _ in range(RANKS)]
    for rank, stream in enumerate(streams):
        stream.put(held.wait)
        stream.put(lambda rank=rank: tensors[rank].fill_(rank + 1.0))
    works = on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank], async_op=True))
    assert not any(work.is_completed() for work in works)
    held.set()
    on_all(device, comms, streams, lambda comm, rank: works[rank].wait())
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == [6.0] * 5


def test_large_tensors_go_in_chunks(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 4096)
    tensors = [on_fake_device(torch.zeros(5000)) for _ in range(RANKS)]
    held = threading.Event()
    for rank, stream in enumerate(streams):
        stream.put(held.wait)
        stream.put(lambda rank=rank: tensors[rank].copy_(values(rank, 5000)))
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank]))
    assert len(device.streams) == 2 * RANKS  # copies to the host have streams of their own
    held.set()
    for rank, expected in enumerate(host_sum("sum", 5000, torch.float32)):
        streams[rank].synchronize()
        assert torch.equal(tensors[rank].as_subclass(torch.Tensor), expected)
        assert comms[rank].stats()["operations"] == 5


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
def test_moves(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", chunk_bytes)
    own = [on_fake_device(values(rank, 34, torch.int32).view(2, 17)) for rank in range(RANKS)]
    gathered = on_all(device, comms, streams, lambda comm, rank: comm.all_gather(own[rank]))
    whole = [on_fake_device(values(rank, 6 * 17).view(6, 17)) for rank in range(RANKS)]
    blocks = on_all(device, comms, streams, lambda comm, rank: comm.reduce_scatter(whole[rank], "max"))
    copied = [on_fake_device(values(rank, 50, torch.int16)) for rank in range(RANKS)]
    works = on_all(device, comms, streams, lambda comm, rank: comm.broadcast(copied[rank], 1, async_op=True))
    on_all(device, comms, streams, lambda comm, rank: works[rank].wait())
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert (
            gathered[rank].tolist() == torch.stack([values(r, 34, torch.int32).view(2, 17) for r in range(3)]).tolist()
        )
        assert blocks[rank].tolist() == values(2, 6 * 17).view(6, 17)[2 * rank : 2 * rank + 2].tolist()
        assert copied[rank].tolist() == values(1, 50, torch.int16).tolist()


def test_blocks_of_unequal_lengths(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
    counts = [2, 0, 5]
    own = [on_fake_device(values(rank, counts[rank])) for rank in range(RANKS)]
    gathered = on_all(device, comms, streams, lambda comm, rank: comm.all_gather(own[rank], counts=counts))
    whole = [on_fake_device(values(rank, 7)) for rank in range(RANKS)]
    blocks = on_all(device, comms, streams, lambda comm, rank: comm.reduce_scatter(whole[rank], counts=counts))
    expected = sum(values(rank, 7) for rank in range(RANKS))
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert gathered[rank].tolist() == [*values(0, 2).tolist(), *values(2, 5).tolist()]
        first = sum(counts[:rank])
        assert blocks[rank].tolist() == expected[first : first + counts[rank]].tolist()


def test_messages_between_device_and_host(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    sent, got = on_fake_device(values(0, 9)), np.zeros(9, np.float32)
    with device.on(streams[0]):
        assert comms[0].send(sent, 1, tag=3) is None
    assert comms[1].recv(got, 0, tag=3) == 0
    assert got.tolist() == values(0, 9).tolist()
    back = on_fake_device(torch.zeros(9))
    with device.on(streams[0]):
        work = comms[0].recv(back, tag=4, async_op=True)
    comms[1].send(got * 2, 0, tag=4)
    with device.on(streams[0]):
        work.wait()
    streams[0].synchronize()
    assert back.tolist() == (2 * values(0, 9)).tolist()
    assert work.source() == 1


def test_sendrecv_round_a_ring(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
    given = [on_fake_device(values(rank, 2000)) for rank in range(RANKS)]
    taken = [on_fake_device(torch.zeros(2000)) for _ in range(RANKS)]

    def shift(comm: Communicator, rank: int) -> None:
        comm.sendrecv(given[rank], (rank + 1) % RANKS, taken[rank], (rank - 1) % RANKS)

    on_all(device, comms, streams, shift)
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert taken[rank].tolist() == values((rank - 1) % RANKS, 2000).tolist()


def test_host_and_device_calls_keep_their_order_and_buffers_are_used_again(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    counts = staging_of(device).counts
    for round_ in range(5):
        tensors = [on_fake_device(torch.full((100,), float(round_ + rank))) for rank in range(RANKS)]
        arrays = [np.full(3, float(rank), np.float32) for rank in range(RANKS)]
        on_all(device, comms, streams, lambda comm, rank, x=tensors: comm.all_reduce(x[rank]))
        works = [comm.all_reduce(arrays[rank], "max", async_op=True) for rank, comm in enumerate(comms)]
        for rank, comm in enumerate(comms):
            works[rank].wait()
            comm.synchronize()
            streams[rank].synchronize()
            assert tensors[rank].tolist() == [3.0 * round_ + 3.0] * 100
            assert arrays[rank].tolist() == [2.0] * 3
    assert counts.allocated == RANKS
    assert counts.reused == 4 * RANKS


def test_several_communicators_on_one_stream_each(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    others = Communicator.local(RANKS, timeout_s=60.0)
    tensors = [on_fake_device(values(rank, 10)) for rank in range(RANKS)]
    for group in (comms, others, comms):
        on_all(device, group, streams, lambda comm, rank: comm.all_reduce(tensors[rank], "max"))
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == values(2, 10).tolist()
    for comm in others:
        comm.close()


def test_ranks_in_threads(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
    tensors = [on_fake_device(values(rank, 300)) for rank in range(RANKS)]

    def run(rank: int) -> None:
        with device.on(streams[rank]):
            for _ in range(10):
                comms[rank].all_reduce(tensors[rank], "avg")
                works = [comms[rank].broadcast(tensors[rank], root, async_op=True) for root in range(RANKS)]
                for work in works:
                    work.wait()
            comms[rank].synchronize()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    expected = sum(values(rank, 300) for rank in range(RANKS)) / RANKS
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert torch.allclose(tensors[rank].as_subclass(torch.Tensor), expected)


def test_a_failure_in_flight_lets_streams_go_on_with_nan(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors = [on_fake_device(values(rank, 10)) for rank in range(RANKS)]
    integers = [on_fake_device(values(rank, 10, torch.int32)) for rank in range(RANKS)]
    for rank in (0, 1):
        with device.on(streams[rank]):
            comms[rank].all_reduce(tensors[rank])
            comms[rank].all_reduce(integers[rank])
    comms[2].close()
    for rank in (0, 1):
        streams[rank].synchronize()
        assert bool(torch.isnan(tensors[rank]).all())
        assert integers[rank].tolist() == [-1] * 10
        for call in (
            comms[rank].synchronize,
            lambda rank=rank: comms[rank].all_reduce(tensors[rank]),
            lambda rank=rank: comms[rank].broadcast(tensors[rank], 0, async_op=True),
        ):
            with device.on(streams[rank]), pytest.raises(PeerFailed, match="rank 2 closed") as caught:
                call()
            assert caught.value.rank == rank
            assert caught.value.peer == 2
            assert "allreduce" in str(caught.value.operation)
        with pytest.raises(TransportError, match="failed earlier"):
            comms[rank].all_reduce(np.ones(3, np.float32))


def test_a_works_wait_raises_what_is_known(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensor = on_fake_device(values(0, 10))
    with device.on(streams[0]):
        work = comms[0].all_reduce(tensor, async_op=True)
        comms[1].abort("enough")
        with pytest.raises(TransportError, match="enough"):
            comms[0].synchronize()
        with pytest.raises(TransportError, match="enough"):
            work.wait()
        with pytest.raises(TransportError, match="enough"):
            work.result()


def test_close_with_a_stream_that_has_not_come_to_it(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    held = threading.Event()
    tensor = on_fake_device(values(0, 10))
    streams[0].put(held.wait)
    with device.on(streams[0]):
        comms[0].all_reduce(tensor)
    comms[0].close()
    held.set()
    streams[0].synchronize()
    assert bool(torch.isnan(tensor).all())


OTHER = on_fake_device(torch.zeros(3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, x: c.all_reduce(x, out=torch.zeros(3)), TypeError, "x is on privateuseone:0 but out on the host"),
        (lambda c, x: c.all_reduce(torch.zeros(3), out=x), TypeError, "out is on privateuseone:0, and this call"),
        (lambda c, x: c.all_gather(x, out=torch.zeros(3, 3)), TypeError, "out on the host: give both in one place"),
        (lambda c, x: c.sendrecv(x, 1, torch.zeros(3), 1), TypeError, "out on the host: give both in one place"),
        (lambda c, x: c.all_reduce(OTHER.bool(), "avg"), TypeError, "avg.* bool|bool.* avg"),
    ],
)
def test_what_device_calls_refuse(
    device: FakeRuntime, comms: list[Communicator], call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(comms[0], on_fake_device(torch.zeros(3)))


def test_simulated_ranks_have_no_streams(device: FakeRuntime) -> None:
    world = sim.World(1)
    with pytest.raises(ValueError, match=r"all_reduce\(\) of device tensors needs real time"):
        world.communicators[0].all_reduce(on_fake_device(torch.zeros(3)))
    world.close()


def test_synchronize_of_a_closed_communicator() -> None:
    (alone,) = Communicator.local(1)
    alone.synchronize()
    alone.close()
    with pytest.raises(ValueError, match="is closed: make a new one"):
        alone.synchronize()


def test_messages_that_cross_wait_for_nobody(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    first = [on_fake_device(values(rank, 5)) for rank in range(2)]
    taken = [on_fake_device(torch.zeros(5)) for _ in range(2)]

    def call(comm: Communicator, rank: int) -> list[Any]:
        return [
            comm.recv(taken[rank], 1 - rank, async_op=True),
            comm.send(first[rank], 1 - rank, async_op=True),
        ]

    for rank, works in enumerate(on_all(device, comms[:2], streams[:2], call)):
        with device.on(streams[rank]):
            assert all(work.wait() for work in works)
    for rank in range(2):
        streams[rank].synchronize()
        assert taken[rank].tolist() == values(1 - rank, 5).tolist()


def test_operations_in_another_order_than_the_peers_messages(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors = [on_fake_device(values(rank, 5)) for rank in range(RANKS)]
    message = on_fake_device(torch.zeros(5))

    def call(comm: Communicator, rank: int) -> list[Any]:
        works = [comm.recv(message, 1, async_op=True)] if rank == 0 else []
        works.append(comm.all_reduce(tensors[rank], async_op=True))
        if rank == 1:
            works.append(comm.send(on_fake_device(values(7, 5)), 0, async_op=True))
        return works

    for rank, works in enumerate(on_all(device, comms, streams, call)):
        with device.on(streams[rank]):
            assert all(work.wait() for work in works)
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == sum(values(other, 5) for other in range(RANKS)).tolist()
    assert message.tolist() == values(7, 5).tolist()
