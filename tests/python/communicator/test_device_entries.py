"""Sums of sparse vectors of a device, over a device without hardware (fake_device.py) and Triton's interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_ranks import RANKS, on_all
from fake_device import FakeRuntime, FakeStream, on_fake_device
from triton_arrays import DEVICE

from telegrad import Communicator, DeviceEntries, SparseVector
from telegrad.communicator.cuda.staging import staging_of
from telegrad.errors import PeerFailed, TransportError
from telegrad.kernels.select import cpu
from telegrad.kernels.select.triton import queue_topk
from telegrad.tools import sim

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

N = 3000


def entries_of(rank: int, n: int, density: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(rank)
    indices = np.flatnonzero(rng.random(n) < density)
    if not dtype.is_floating_point:
        limits, name = torch.iinfo(dtype), str(dtype).removeprefix("torch.")
        drawn = rng.integers(limits.min, limits.max, indices.size, name, endpoint=True)
        return torch.from_numpy(indices), torch.from_numpy(drawn)
    values = torch.from_numpy(rng.standard_normal(indices.size)).to(dtype)
    values[::7] = -0.0
    return torch.from_numpy(indices), values


def staged(
    indices: torch.Tensor, values: torch.Tensor, n: int, *, spare: int = 5, wide: bool = False, count: int | None = None
) -> DeviceEntries:
    """With room for more, of which nothing may be seen."""
    held = indices.numel() if count is None else count
    rest = torch.full((spare,), n + 7)
    all_indices = torch.cat([indices, rest]).to(torch.int64 if wide else torch.uint32)
    nothing = float("nan") if values.is_floating_point() else 77
    all_values = torch.cat([values, torch.full((spare,), nothing, dtype=values.dtype)])
    counted = torch.tensor([held], dtype=torch.int64 if wide else torch.int32)
    return DeviceEntries(on_fake_device(all_indices), on_fake_device(all_values), on_fake_device(counted), n)


def nowhere(n: int, dtype: torch.dtype = torch.float32) -> Any:
    return on_fake_device(torch.full((n,), float("nan") if dtype.is_floating_point else 77, dtype=dtype))


def host_sums(given: list[tuple[torch.Tensor, torch.Tensor]], n: int, op: str, **options: Any) -> list[torch.Tensor]:
    """The entries of the host's sums, written over what is absent."""
    hosts = Communicator.local(len(given), timeout_s=60.0)
    works = [
        comm.all_reduce(SparseVector(indices, values, n), op, async_op=True, **options)
        for comm, (indices, values) in zip(hosts, given, strict=True)
    ]
    sums = []
    for work in works:
        work.wait()
        stream = work.result()
        if stream.is_dense:
            sums.append(stream.to_dense())
            continue
        sums.append(torch.as_tensor(stream.to_dense()))
    for comm in hosts:
        comm.close()
    return sums


def bits(x: torch.Tensor) -> list[int]:
    plain = x.as_subclass(torch.Tensor)
    return plain.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]).tolist()  # type: ignore[no-any-return]


def check(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    density: float,
    op: str = "sum",
    dtype: torch.dtype = torch.float32,
    n: int = N,
    **options: Any,
) -> None:
    given = [entries_of(rank, n, density, dtype) for rank in range(RANKS)]
    entries = [staged(*given[rank], n, wide=rank == 1, spare=5 * rank) for rank in range(RANKS)]
    outs = [nowhere(n, dtype) for _ in range(RANKS)]

    def call(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(entries[rank], op, out=outs[rank], **options)

    results = on_all(device, comms, streams, call)
    expected = host_sums(given, n, op, **options)
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert results[rank] is outs[rank]
        assert bits(outs[rank]) == bits(expected[rank])


ALGORITHMS = ("auto", "split_allgather", "split_dense_allgather", "recursive_doubling", "ring", "two_level")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.7])
def test_the_hosts_bits_by_every_algorithm(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], algorithm: str, density: float
) -> None:
    check(device, comms, streams, density, algorithm=algorithm)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max", "max_abs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_hosts_bits_of_every_reduction(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], op: str, dtype: torch.dtype
) -> None:
    check(device, comms, streams, 0.04, op, dtype, n=999)


INTEGERS = (torch.int32, torch.int64, torch.uint32, torch.uint64)


@pytest.mark.parametrize("density", [0.04, 0.7])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "max_abs"])
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float64], ids=str)
def test_the_hosts_bits_of_integers_and_doubles(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    op: str,
    dtype: torch.dtype,
    density: float,
) -> None:
    if op == "max_abs" and dtype in (torch.uint32, torch.uint64):
        with pytest.raises(TypeError, match="op='max_abs' of uint"):
            comms[0].all_reduce(staged(*entries_of(0, 9, 0.5, dtype), 9), op, out=nowhere(9, dtype))
        return
    check(device, comms, streams, density, op, dtype, n=700)


Given = list[tuple[torch.Tensor, torch.Tensor]]


def in_slices(n: int, counts: list[int] | None) -> list[slice]:
    lengths = counts or [n // RANKS + (rank < n % RANKS) for rank in range(RANKS)]
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("counts", [None, [100, 0, 601]], ids=["alike", "unequal"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *INTEGERS], ids=str)
def test_slices_have_the_hosts_bits(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    op: str,
    dtype: torch.dtype,
    counts: list[int] | None,
) -> None:
    """The last rank's vector is on the host."""
    if op == "avg" and not dtype.is_floating_point:
        op = "prod"
    n = 701
    slices = in_slices(n, counts)
    for density in (0.0, 0.05, 0.8):
        given = [entries_of(rank, n, density, dtype) for rank in range(RANKS)]
        hosts = Communicator.local(RANKS, timeout_s=60.0)
        works = [
            comm.reduce_scatter(SparseVector(*given[rank], n), op, counts=counts, async_op=True)
            for rank, comm in enumerate(hosts)
        ]
        right = [work.result().to_dense()[own] for work, own in zip(works, slices, strict=True)]
        for comm in hosts:
            comm.close()
        outs = [nowhere(own.stop - own.start, dtype) for own in slices]

        def call(comm: Communicator, rank: int, given: Given = given, outs: list[Any] = outs) -> Any:
            return comm.reduce_scatter(staged(*given[rank], n), op, out=outs[rank], counts=counts)

        results = on_all(device, comms[:-1], streams[:-1], call)
        last = comms[-1].reduce_scatter(SparseVector(*given[-1], n), op, counts=counts)
        assert bits(torch.as_tensor(last.to_dense()[slices[-1]])) == bits(right[-1])
        for rank, result in enumerate(results):
            streams[rank].synchronize()
            assert result is outs[rank]
            assert bits(outs[rank]) == bits(right[rank])


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *INTEGERS], ids=str)
def test_gathered_entries_are_those_of_all_ranks(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], dtype: torch.dtype, async_op: bool
) -> None:
    """The first rank's vector is on the host. Rooms of all residues, as addresses in pinned memory hang on them."""
    for n, density in ((300, 0.0), (301, 0.1), (302, 0.4), (303, 1.0), (0, 0.0)):
        given = [entries_of(rank, n, density * (rank + 1) / RANKS, dtype) for rank in range(RANKS)]
        most = max(values.numel() for _, values in given)

        def call(comm: Communicator, rank: int, given: Given = given, n: int = n, most: int = most) -> Any:
            indices, values = given[rank + 1]
            entries = staged(indices, values, n, spare=most - values.numel(), wide=rank == 0)
            return comm.all_gather(entries, async_op=async_op)

        found = on_all(device, comms[1:], streams[1:], call)
        on_host = comms[0].all_gather(SparseVector(*given[0], n))
        for stream, works in zip(streams[1:], found, strict=True):
            with device.on(stream):
                gathered = works.result() if async_op else works
            stream.synchronize()
            for of_rank, expected, (indices, values) in zip(gathered, on_host, given, strict=True):
                held = int(of_rank.count)
                assert (of_rank.length, of_rank.nnz, held) == (n, most, indices.numel())
                assert of_rank.indices[:held].tolist() == indices.tolist() == expected.indices.tolist()
                assert bits(of_rank.values[:held]) == bits(values)


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("wire", ["packed", "bf16", "int8"])
def test_wires_of_gathers_and_slices_have_the_hosts_errors(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], operation: str, wire: str
) -> None:
    given = [entries_of(rank, N, 0.1, torch.float32) for rank in range(RANKS)]
    hosts = Communicator.local(RANKS, timeout_s=60.0)
    lost = [np.zeros(N, np.float32) for _ in range(RANKS)] if wire != "packed" else [None] * RANKS
    works = [
        getattr(comm, operation)(SparseVector(*given[rank], N), wire=wire, error=lost[rank], async_op=True)
        for rank, comm in enumerate(hosts)
    ]
    expected = [work.result() for work in works]
    for comm in hosts:
        comm.close()
    errors = [on_fake_device(torch.zeros(N)) if wire != "packed" else None for _ in range(RANKS)]
    outs = [nowhere(N // RANKS) for _ in range(RANKS)]

    def call(comm: Communicator, rank: int) -> Any:
        entries = staged(*given[rank], N, spare=400 - given[rank][0].numel())
        to = {"out": outs[rank]} if operation == "reduce_scatter" else {}
        return getattr(comm, operation)(entries, wire=wire, error=errors[rank], **to)

    found = on_all(device, comms, streams, call)
    for rank, stream in enumerate(streams):
        stream.synchronize()
        if wire != "packed":
            assert lost[rank].any()
            assert bits(errors[rank]) == bits(torch.from_numpy(lost[rank]))
        if operation == "reduce_scatter":
            assert bits(outs[rank]) == bits(expected[rank].to_dense()[in_slices(N, None)[rank]])
            continue
        for mine, right in zip(found[rank], expected[rank], strict=True):
            assert bits(mine.values[: int(mine.count)]) == bits(right.values)


def test_gathers_and_slices_that_fail(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    good = [staged(*entries_of(rank, 90, 0.2, torch.int32), 90, spare=9) for rank in range(RANKS)]
    outs = [nowhere(30, torch.int32) for _ in range(RANKS)]
    with device.on(streams[0]):
        found = comms[0].all_gather(good[0])
        comms[0].reduce_scatter(good[0], out=outs[0])
    comms[1].abort("over")
    streams[0].synchronize()
    assert [int(one.count) for one in found] == [-1] * RANKS  # which no operation takes
    assert outs[0].tolist() == [-1] * 30
    with pytest.raises(TransportError, match="over"):
        comms[0].synchronize()


def test_a_rank_without_room_for_anothers_entries(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    rooms = [2, 3, 9]
    given = [staged(torch.tensor([rank, 8]), torch.ones(2), 10, spare=room - 2) for rank, room in enumerate(rooms)]
    given[2] = staged(torch.tensor([1, 2, 3]), torch.ones(3), 10, spare=6)
    on_all(device, comms, streams, lambda comm, rank: comm.all_gather(given[rank]))
    for stream in streams:
        stream.synchronize()
    with pytest.raises(TransportError, match="rank 2 has 3 entries, but rank 0 has room for 2 of each"):
        comms[0].synchronize()


def test_what_gathers_and_slices_refuse(device: FakeRuntime, comms: list[Communicator]) -> None:
    entries = staged(torch.tensor([4]), torch.ones(1), 10)
    with pytest.raises(TypeError, match="goes into a dense tensor: give out=, of 4 elements"):
        comms[0].reduce_scatter(entries)
    with pytest.raises(ValueError, match="out has 10 elements but this rank's slice is 4"):
        comms[0].reduce_scatter(entries, out=nowhere(10))
    with pytest.raises(ValueError, match="counts add up to 9"):
        comms[0].reduce_scatter(entries, out=nowhere(3), counts=[3, 3, 3])
    with pytest.raises(TypeError, match="out is for a dense x"):
        comms[0].all_gather(entries, out=nowhere(10))
    long = staged(torch.arange(10), torch.ones(10), 10, spare=0)
    with pytest.raises(ValueError, match="error shares memory with out or the entries"):
        comms[0].all_gather(long, wire="bf16", error=long.values)
    assert comms[0].stats()["operations"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "packed"},
        {"wire": "bf16"},
        {"wire": "qsgd8", "seed": 3},
        {"slices": "balanced"},
        {"switch_factor": 0.0},
        {"switch_factor": 100.0},
    ],
)
def test_options_mean_what_they_do_on_the_host(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], options: dict[str, Any]
) -> None:
    check(device, comms, streams, 0.3, **options)


@pytest.mark.parametrize("n", [0, 1, 2, 1024, 1025])
def test_short_vectors(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], n: int) -> None:
    check(device, comms, streams, 0.5, n=n)


def test_the_host_waits_for_nothing_and_streams_read_the_count_late(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    held = threading.Event()
    given = [entries_of(rank, N, 0.03, torch.float32) for rank in range(RANKS)]
    entries = [staged(*each, N, count=-77) for each in given]
    outs = [nowhere(N) for _ in range(RANKS)]
    for rank, stream in enumerate(streams):
        stream.put(held.wait)
        stream.put(lambda rank=rank: entries[rank].count.fill_(given[rank][0].numel()))  # a kernel that selects
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries[rank], out=outs[rank]))
    assert all(bool(out.isnan().all()) for out in outs)
    held.set()
    for rank, expected in enumerate(host_sums(given, N, "sum")):
        streams[rank].synchronize()
        assert bits(outs[rank]) == bits(expected)


def test_beside_compute(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
    given = [entries_of(rank, N, 0.03, torch.float32) for rank in range(RANKS)]
    outs = [nowhere(N) for _ in range(RANKS)]

    def call(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(staged(*given[rank], N), out=outs[rank], async_op=True)

    works = on_all(device, comms[:-1], streams[:-1], call)
    computed = threading.Event()
    streams[0].put(computed.set)
    assert computed.wait(60.0)  # the last rank has not called yet
    works += on_all(device, comms[-1:], streams[-1:], lambda comm, _: call(comm, RANKS - 1))
    on_all(device, comms, streams, lambda _, rank: works[rank].wait())
    for rank, expected in enumerate(host_sums(given, N, "sum")):
        streams[rank].synchronize()
        assert works[rank].is_completed()
        with device.on(streams[rank]):
            assert works[rank].result() is outs[rank]
        assert bits(outs[rank]) == bits(expected)


def test_host_and_device_ranks_sum_together_again_and_again(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    given = [entries_of(rank, N, 0.03, torch.float32) for rank in range(RANKS)]
    expected = host_sums(given, N, "avg")
    for _ in range(3):
        outs = [nowhere(N) for _ in range(RANKS - 1)]

        def call(comm: Communicator, rank: int, outs: list[Any] = outs) -> Any:
            return comm.all_reduce(staged(*given[rank], N), "avg", out=outs[rank])

        on_all(device, comms[:-1], streams[:-1], call)
        total = comms[-1].all_reduce(SparseVector(*given[-1], N), "avg")
        assert bits(torch.as_tensor(total.to_dense())) == bits(expected[-1])
        for rank, out in enumerate(outs):
            comms[rank].synchronize()
            streams[rank].synchronize()
            assert bits(out) == bits(expected[rank])
    counts = staging_of(device).counts
    assert (counts.allocated, counts.reused) == (2, 4)


@pytest.mark.parametrize(
    ("indices", "count", "message"),
    [
        ([1, 2, 3], 4, "the device counts 4 entries, but there is room for 0 to 3"),
        ([1, 2, 3], -1, "the device counts -1 entries"),
        ([1, 3, 3], 3, r"the device's entries are no sparse vector: indices\[2\] = 3 is not above indices\[1\] = 3"),
        ([1, 2, 10], 3, r"indices\[2\] = 10 is out of range: the dimension is 10"),
        ([1, 2, 2**40], 3, r"indices\[2\] = 4294967295 is out of range: the dimension is 10"),
        ([1, 2, -1], 3, r"indices\[2\] = 4294967295 is out of range"),
    ],
)
def test_entries_that_are_no_stream_end_the_operation_on_all_ranks(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    indices: list[int],
    count: int,
    message: str,
) -> None:
    bad = staged(torch.tensor(indices), torch.ones(3), 10, spare=0, wide=True, count=count)
    good = staged(torch.tensor([4]), torch.ones(1), 10)
    outs = [on_fake_device(torch.ones(2, 5)) for _ in range(RANKS)]
    given = [good, bad, good]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(given[rank], out=outs[rank]))
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert bool(outs[rank].isnan().all())
        with pytest.raises(TransportError, match=message) as caught:
            comms[rank].synchronize()
        assert caught.value.peer == 1


def test_what_lies_behind_the_entries_does_not_count(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    entries = staged(torch.tensor([7, 3, 2]), torch.tensor([1.0, 2.0, 3.0]), 10, count=1)
    outs = [nowhere(10) for _ in range(RANKS)]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries, out=outs[rank]))
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert outs[rank].tolist() == [0.0] * 7 + [3.0, 0.0, 0.0]


@pytest.fixture
def shut(streams: list[FakeStream]) -> Iterator[Callable[[], None]]:
    """The first stream gets nowhere until this is called."""
    held = threading.Event()
    streams[0].put(held.wait)
    yield held.set
    held.set()


def test_a_peer_that_leaves_while_the_gate_is_shut(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], shut: Callable[[], None]
) -> None:
    entries = staged(torch.tensor([4]), torch.ones(1), 10)
    outs = [on_fake_device(torch.ones(10)) for _ in range(2)]
    works = on_all(device, comms[:2], streams[:2], lambda c, rank: c.all_reduce(entries, out=outs[rank], async_op=True))
    comms[2].close()
    for rank in (1, 0):
        with pytest.raises(PeerFailed, match="rank 2 closed"):
            comms[rank].synchronize()
    shut()
    for rank in range(2):
        with device.on(streams[rank]), pytest.raises(PeerFailed, match="rank 2 closed"):
            works[rank].wait()
        streams[rank].synchronize()
        assert bool(outs[rank].isnan().all())


@pytest.mark.parametrize("filled", [True, False])
def test_lengths_of_powers_of_two_take_no_more(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    monkeypatch: pytest.MonkeyPatch,
    filled: bool,
) -> None:
    """Room for 1024 entries of 8 bytes, none of them spare, and a dense vector of 4096 of 4."""
    asked: set[int] = set()
    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", lambda nbytes: [asked.add(nbytes), pinned(nbytes)][1])
    indices = torch.arange(0, 4096, 4)
    entries = staged(indices, torch.ones(1024), 4096, spare=0, count=None if filled else 0)
    outs = [nowhere(4096) for _ in comms]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries, out=outs[rank]))
    for stream, out in zip(streams, outs, strict=True):
        stream.synchronize()
        assert out.view(-1, 4).tolist() == [[float(RANKS * filled), 0.0, 0.0, 0.0]] * 1024
    assert asked == {4096, 8192, 16384}  # 4096: the words


def test_memory_that_is_not_to_be_had(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = staged(torch.tensor([4]), torch.ones(1), 10)
    out = on_fake_device(torch.ones(10))

    def pinned(_: int) -> Any:
        raise MemoryError("no more")

    with monkeypatch.context() as patched, device.on(streams[0]):
        patched.setattr(device, "pinned", pinned)
        with pytest.raises(MemoryError):
            comms[0].all_reduce(entries, out=out)
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries, out=out if rank == 0 else nowhere(10)))
    streams[0].synchronize()
    assert out.tolist() == [0.0] * 4 + [3.0] + [0.0] * 5


def test_kernels_that_are_not_installed(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = staged(torch.tensor([4]), torch.ones(1), 10)
    outs = [nowhere(10) for _ in range(RANKS)]
    with monkeypatch.context() as patched, device.on(streams[0]):
        patched.setitem(sys.modules, "triton", None)
        with pytest.raises(ModuleNotFoundError, match=r"x is a tensor on privateuseone:0, .* telegrad\[gpu\]"):
            comms[0].all_reduce(entries, out=outs[0])
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries, out=outs[rank]))
    streams[0].synchronize()
    assert outs[0].tolist() == [0.0] * 4 + [3.0] + [0.0] * 5


def test_tensors_of_any_shape_that_require_gradients(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    values = on_fake_device(torch.tensor([2.0])).requires_grad_()
    entries = DeviceEntries(on_fake_device(torch.tensor([4])), values, on_fake_device(torch.tensor(1)), 6)
    outs = [on_fake_device(torch.zeros(2, 3)).requires_grad_() for _ in range(RANKS)]
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries, "prod", out=outs[rank]))
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert outs[rank].tolist() == [[1.0, 1.0, 1.0], [1.0, 8.0, 1.0]]


def test_simulated_ranks_have_no_streams(device: FakeRuntime) -> None:
    world = sim.World(1)
    with pytest.raises(ValueError, match=r"all_reduce\(\) of device tensors needs real time"):
        world.communicators[0].all_reduce(staged(torch.tensor([4]), torch.ones(1), 10), out=nowhere(10))
    world.close()


ON_DEVICE = {
    "indices": on_fake_device(torch.tensor([1, 4])),
    "values": on_fake_device(torch.ones(2)),
    "count": on_fake_device(torch.tensor([2])),
    "length": 10,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indices": np.array([1, 4])}, TypeError, "indices is a ndarray: it must be a torch tensor on a device"),
        ({"values": torch.ones(2)}, TypeError, "values is on cpu: entries on the host are a SparseVector"),
        ({"indices": on_fake_device(torch.tensor([1, 4]).int())}, TypeError, "torch.int32: use uint32 or int64"),
        ({"values": on_fake_device(torch.ones(2).short())}, TypeError, "use float32, .* uint64 or bfloat16"),
        ({"count": on_fake_device(torch.ones(1))}, TypeError, "count has dtype torch.float32: use int32 or int64"),
        ({"values": on_fake_device(torch.ones(1, 2))}, ValueError, r"values has 2 dimensions: .* use .reshape\(-1\)"),
        ({"indices": on_fake_device(torch.arange(4))[::2]}, ValueError, r"not contiguous: use .contiguous\(\)"),
        ({"values": on_fake_device(torch.ones(3))}, ValueError, "there are 2 indices but 3 values: give one for each"),
        ({"count": on_fake_device(torch.tensor([1, 2]))}, ValueError, "count has 2 elements: give one"),
        ({"length": 10.0}, TypeError, "length=10.0 must be an int"),
        ({"length": 2**32}, ValueError, r"length=4294967296 is not in \[0, 2\*\*32\): split the vector"),
        ({"length": -1}, ValueError, r"length=-1 is not in \[0, 2\*\*32\)"),
    ],
)
def test_what_entries_refuse(device: FakeRuntime, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DeviceEntries(**(ON_DEVICE | change))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "goes into a dense tensor: give out=, of 10 elements on privateuseone:0"),
        ({"out": torch.zeros(10)}, TypeError, "x is on privateuseone:0 but out on the host"),
        ({"out": nowhere(10).half()}, TypeError, "out has dtype torch.float16 but the values have torch.float32"),
        ({"out": nowhere(9)}, ValueError, "out has 9 elements but the entries' length is 10"),
        ({"out": nowhere(10), "error": np.zeros(10, "f4")}, TypeError, "error is not on privateuseone:0, where the"),
        ({"out": nowhere(10), "error": nowhere(9)}, ValueError, "error has 9 elements but the entries' length is 10"),
        ({"out": nowhere(10), "error": nowhere(10).half()}, TypeError, "error has dtype torch.float16: give a float32"),
        ({"out": nowhere(10), "op": "xor"}, ValueError, "op='xor' is not supported"),
        ({"out": nowhere(10), "algorithm": "rabenseifner"}, ValueError, "algorithm='rabenseifner' does not exist"),
        ({"out": nowhere(10), "wire": "bf16", "op": "max"}, ValueError, "'max' is not supported with wire='bf16'"),
    ],
)
def test_what_sums_of_entries_refuse(
    device: FakeRuntime, comms: list[Communicator], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        comms[0].all_reduce(DeviceEntries(**ON_DEVICE), **options)


@pytest.mark.parametrize("wire", ["bf16", "packed-f16", "int8", "qsgd4", "packed-codebook2", "sums-qsgd8"])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.7])
@pytest.mark.parametrize("async_op", [False, True])
def test_what_rounding_loses_is_added_as_on_the_host(
    device: FakeRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    wire: str,
    density: float,
    async_op: bool,
) -> None:
    """As entries, and as a dense vector where these would be longer."""
    given = [entries_of(rank, N, density, torch.float32) for rank in range(RANKS)]
    before = [torch.randn(N, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    expected = [np.array(one) for one in before]
    hosts = Communicator.local(RANKS, timeout_s=60.0)
    for _ in range(2):
        lost = [np.zeros(N, np.float32) for _ in range(RANKS)]  # the device's is summed up before it is added
        works = [
            comm.all_reduce(SparseVector(*given[rank], N), "avg", wire=wire, error=lost[rank], async_op=True)
            for rank, comm in enumerate(hosts)
        ]
        for work in works:
            work.wait()
        expected = [one + own for one, own in zip(expected, lost, strict=True)]
    for comm in hosts:
        comm.close()
    errors = [on_fake_device(one) for one in before]

    def call(comm: Communicator, rank: int) -> None:
        out = nowhere(N)
        for _ in range(2):
            entries = staged(*given[rank], N)
            work = comm.all_reduce(entries, "avg", out=out, wire=wire, error=errors[rank], async_op=async_op)
            if async_op:
                work.wait()

    on_all(device, comms, streams, call)
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert bits(errors[rank]) == bits(torch.from_numpy(expected[rank]))
        assert np.array_equal(expected[rank], before[rank].numpy()) == (density == 0.0)


def test_a_sum_that_fails_loses_nothing(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    error = on_fake_device(torch.ones(N))
    entries = staged(*entries_of(0, N, 0.1, torch.float32), N)
    with device.on(streams[0]):
        comms[0].all_reduce(entries, out=nowhere(N), wire="bf16", error=error)
    comms[1].abort("over")
    streams[0].synchronize()
    assert bool((error.as_subclass(torch.Tensor) == 1).all())
    with pytest.raises(TransportError, match="over"):
        comms[0].synchronize()


def test_an_output_that_is_an_input(device: FakeRuntime, comms: list[Communicator]) -> None:
    both = nowhere(12)
    entries = DeviceEntries(ON_DEVICE["indices"], both[:2], ON_DEVICE["count"], 10)
    with pytest.raises(ValueError, match="out shares memory with the entries: give it memory of its own"):
        comms[0].all_reduce(entries, out=both[1:11])
    with pytest.raises(ValueError, match="error shares memory with out or the entries: give it memory of its own"):
        comms[0].all_reduce(entries, out=nowhere(10), wire="bf16", error=both[1:11])
    comms[0].abort("over")


def test_from_gradient_to_sum_without_the_host(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    k = 40
    rng = np.random.default_rng(5)
    gradients = [rng.standard_normal((2, N)).astype(np.float32) for _ in range(RANKS)]
    residuals = [torch.zeros(N) for _ in range(RANKS)]
    entries = [staged(torch.zeros(k), torch.zeros(k), N, spare=0) for _ in range(RANKS)]
    outs = [nowhere(N) for _ in range(RANKS)]
    expected = [np.zeros(N, np.float32) for _ in range(RANKS)]
    for step in range(2):
        for rank, stream in enumerate(streams):
            gradient, one = torch.from_numpy(gradients[rank][step]), entries[rank]

            def choose(residual: torch.Tensor, gradient: torch.Tensor, *out: Any) -> None:
                queue_topk(residual, gradient, k, *(one.as_subclass(torch.Tensor) for one in out), 0)

            device.launch(stream, choose, residuals[rank], gradient, one.indices, one.values, one.count)
        on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(entries[rank], "avg", out=outs[rank]))
        given = []
        for rank in range(RANKS):
            indices, values = np.empty(k, np.uint32), np.empty(k, np.float32)
            cpu.accumulate_topk(expected[rank], gradients[rank][step], k, indices, values, 0)
            given.append((torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(values)))
        sums = host_sums(given, N, "avg")
        for rank, stream in enumerate(streams):
            stream.synchronize()
            assert bits(outs[rank]) == bits(sums[rank])
            assert residuals[rank].numpy().tobytes() == expected[rank].tobytes()
