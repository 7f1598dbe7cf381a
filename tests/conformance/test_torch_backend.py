"""The conformance suite's shapes through the torch backend: every operation of a ProcessGroup against torch's own sums,
bits compared across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from telegrad import Communicator  # noqa: E402
from telegrad.torch_backend import ProcessGroup  # noqa: E402

SIZES = (1, 2, 3, 5, 8)  # of more, test_collectives.py sees the same communicator
COUNTS = (0, 1, 63, 1000)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64)
_AS_FLOAT = {"SUM": torch.sum, "PRODUCT": torch.prod, "MIN": torch.amin, "MAX": torch.amax}


@pytest.fixture(params=SIZES)
def groups(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroup]]:
    """A ProcessGroup for every rank, all in this process."""
    made = [ProcessGroup(communicator) for communicator in Communicator.local(request.param, timeout_s=60.0)]
    yield made
    for group in made:
        group.shutdown()


def sizes_dtypes_and_operations() -> Iterator[tuple[int, torch.dtype, str]]:
    """Among three ranks each dtype with each operation; among other numbers each dtype, in turn with each operation."""
    for at, size in enumerate(SIZES):
        for number, dtype in enumerate((*FLOATS, *INTEGERS)):
            for turn, op in enumerate(_AS_FLOAT):
                if size == 3 or turn == (at + number) % len(_AS_FLOAT):
                    yield size, dtype, op


def options(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def inputs(size: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Integers so small that every dtype holds their sums and products of few."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, 3 if size < 5 else 2, (count,), generator=generator).to(dtype) for _ in range(size)]


def on_all(groups: list[ProcessGroup], begin: Callable[[int, ProcessGroup], Any]) -> None:
    """Begins on every rank, last ones first, and waits for all."""
    for work in [begin(rank, groups[rank]) for rank in reversed(range(len(groups)))]:
        work.wait()


@pytest.mark.parametrize(("groups", "dtype", "op"), sizes_dtypes_and_operations(), indirect=["groups"], ids=str)
def test_allreduce_and_reduce(groups: list[ProcessGroup], dtype: torch.dtype, op: str) -> None:
    size = len(groups)
    for count in COUNTS:
        given = inputs(size, count, dtype)
        right = _AS_FLOAT[op](torch.stack(given).double(), 0).to(dtype)
        how = options(reduceOp=getattr(dist.ReduceOp, op), rootRank=size - 1)
        tensors = [x.clone() for x in given]
        on_all(groups, lambda rank, group: group.allreduce([tensors[rank]], how))  # noqa: B023
        assert all(torch.equal(x, right) for x in tensors)
        tensors = [x.clone() for x in given]
        on_all(groups, lambda rank, group: group.reduce([tensors[rank]], how))  # noqa: B023
        assert torch.equal(tensors[-1], right)
        assert all(torch.equal(x, was) for x, was in zip(tensors[:-1], given, strict=False))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bitwise_reductions(groups: list[ProcessGroup], op: str, dtype: torch.dtype) -> None:
    size = len(groups)
    drawn = [
        torch.randint(-99, 99, (64 * size,), generator=torch.Generator().manual_seed(rank)) for rank in range(size)
    ]
    wide = drawn[0].clone()  # torch has no such operation of its wide unsigned integers
    for x in drawn[1:]:
        wide = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op](wide, x)
    given, right = [x.to(dtype) for x in drawn], wide.to(dtype)
    how = options(reduceOp=getattr(dist.ReduceOp, op), rootRank=0)
    tensors, reduced = [x.clone() for x in given], [x.clone() for x in given]
    blocks = [torch.empty(64, dtype=dtype) for _ in range(size)]
    on_all(groups, lambda rank, group: group.allreduce([tensors[rank]], how))
    on_all(groups, lambda rank, group: group.reduce([reduced[rank]], how))
    on_all(groups, lambda rank, group: group.reduce_scatter_single(blocks[rank], given[rank], how))
    assert all(torch.equal(x, right) for x in tensors)
    assert torch.equal(torch.cat(blocks), right)
    assert torch.equal(reduced[0], right)
    assert all(torch.equal(x, was) for x, was in zip(reduced[1:], given[1:], strict=True))


def test_averages_complex_numbers_and_booleans(groups: list[ProcessGroup]) -> None:
    size = len(groups)
    mean = [torch.full((5,), float(rank)) for rank in range(size)]
    on_all(groups, lambda rank, group: group.allreduce([mean[rank]], options(reduceOp=dist.ReduceOp.AVG)))
    assert all(torch.allclose(x, torch.full((5,), (size - 1) / 2)) for x in mean)
    plane = [torch.full((3,), rank + 2j * rank, dtype=torch.complex64) for rank in range(size)]
    on_all(groups, lambda rank, group: group.allreduce([plane[rank]], options(reduceOp=dist.ReduceOp.SUM)))
    total = size * (size - 1) / 2
    assert all(torch.equal(x, torch.full((3,), total + 2j * total, dtype=torch.complex64)) for x in plane)
    for op, right in (("SUM", [True, True, False]), ("PRODUCT", [size == 1, True, False])):  # or, and: as with Gloo
        flags = [torch.tensor([rank == 0, True, False]) for rank in range(size)]
        how = options(reduceOp=getattr(dist.ReduceOp, op))
        on_all(groups, lambda rank, group: group.allreduce([flags[rank]], how))  # noqa: B023
        assert all(x.tolist() == right for x in flags)
    flags = [torch.tensor([rank == 0, True, False]) for rank in range(size)]
    on_all(groups, lambda rank, group: group.allreduce([flags[rank]], options(reduceOp=dist.ReduceOp.MAX)))
    assert all(x.tolist() == [True, True, False] for x in flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_moves(groups: list[ProcessGroup], dtype: torch.dtype) -> None:
    size = len(groups)
    root = size // 2
    for count in COUNTS:
        given = [(x + rank).to(dtype) for rank, x in enumerate(inputs(size, count, torch.int64))]
        tensors = [x.clone() for x in given]
        on_all(groups, lambda rank, group: group.broadcast([tensors[rank]], options(rootRank=root)))  # noqa: B023
        assert all(torch.equal(x, given[root]) for x in tensors)
        listed = [[torch.empty_like(x) for x in given] for _ in range(size)]
        on_all(groups, lambda rank, group: group.allgather([listed[rank]], [given[rank]]))  # noqa: B023
        joined = [torch.empty(size * count, dtype=dtype) for _ in range(size)]
        on_all(groups, lambda rank, group: group.all_gather_single(joined[rank], given[rank]))  # noqa: B023
        at_root = [torch.empty_like(x) for x in given]
        on_all(
            groups,
            lambda rank, group: group.gather(
                [at_root] if rank == root else [],  # noqa: B023
                [given[rank]],  # noqa: B023
                options(rootRank=root),
            ),
        )
        for found in (*listed, at_root):
            assert all(torch.equal(x, was) for x, was in zip(found, given, strict=True))
        assert all(torch.equal(x, torch.cat(given)) for x in joined)
        out = [torch.empty_like(given[0]) for _ in range(size)]
        on_all(
            groups,
            lambda rank, group: group.scatter(
                [out[rank]],  # noqa: B023
                [given] if rank == root else [],  # noqa: B023
                options(rootRank=root),
            ),
        )
        assert all(torch.equal(x, was) for x, was in zip(out, given, strict=True))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.complex64, torch.complex128], ids=str)
def test_reduce_scatter(groups: list[ProcessGroup], dtype: torch.dtype) -> None:
    size = len(groups)
    how = options(reduceOp=dist.ReduceOp.SUM)
    for count in COUNTS:
        given = inputs(size, count * size, dtype)
        right = torch.stack(given).to(torch.complex128).sum(0)
        right = (right if dtype.is_complex else right.real).to(dtype).view(size, count)
        out = [torch.empty(count, dtype=dtype) for _ in range(size)]
        on_all(groups, lambda rank, group: group.reduce_scatter_single(out[rank], given[rank], how))  # noqa: B023
        assert all(torch.equal(x, block) for x, block in zip(out, right, strict=True))
    lengths = [3 * rank % 5 for rank in range(size)]  # blocks of unequal lengths
    given = inputs(size, sum(lengths), dtype)
    whole = torch.stack(given).to(torch.complex128).sum(0)
    right_blocks = (whole if dtype.is_complex else whole.real).to(dtype).split(lengths)
    out = [torch.empty(length, dtype=dtype) for length in lengths]
    on_all(groups, lambda rank, group: group.reduce_scatter([out[rank]], [list(given[rank].split(lengths))], how))
    assert all(torch.equal(x, block) for x, block in zip(out, right_blocks, strict=True))


def test_all_to_all(groups: list[ProcessGroup]) -> None:
    size = len(groups)
    blocks = [[torch.full((rank + to, 2), 100 * rank + to) for to in range(size)] for rank in range(size)]
    out = [[torch.empty(source + rank, 2, dtype=torch.int64) for source in range(size)] for rank in range(size)]
    on_all(groups, lambda rank, group: group.alltoall(out[rank], blocks[rank]))
    for rank in range(size):
        assert all(torch.equal(out[rank][source], blocks[source][rank]) for source in range(size))
    joined = [torch.empty_like(torch.cat(one)) for one in out]
    on_all(
        groups,
        lambda rank, group: group.all_to_all_single(
            joined[rank],
            torch.cat(blocks[rank]),
            [source + rank for source in range(size)],
            [rank + to for to in range(size)],
        ),
    )
    assert all(torch.equal(x, torch.cat(one)) for x, one in zip(joined, out, strict=True))
    equal = [torch.full((size, 3), float(rank)) for rank in range(size)]
    dealt = [torch.empty(size, 3) for _ in range(size)]
    on_all(groups, lambda rank, group: group.all_to_all_single(dealt[rank], equal[rank], [], []))
    assert all(x[:, 0].tolist() == list(map(float, range(size))) for x in dealt)


def test_messages_and_barrier(groups: list[ProcessGroup]) -> None:
    size = len(groups)
    on_all(groups, lambda rank, group: group.barrier())
    if size == 1:
        return
    got, anybody = [torch.empty(4) for _ in range(size)], torch.empty(size - 1, 4)
    works = [group.recv([got[rank]], (rank - 1) % size, 3) for rank, group in enumerate(groups)]
    works += [groups[0].recv_anysource([anybody[i]], 9) for i in range(size - 1)]
    works += [group.send([torch.full((4,), float(rank))], (rank + 1) % size, 3) for rank, group in enumerate(groups)]
    works += [group.send([torch.full((4,), float(rank))], 0, 9) for rank, group in enumerate(groups) if rank > 0]
    for work in works:
        work.wait()
    assert [x[0].item() for x in got] == [(rank - 1) % size for rank in range(size)]
    senders = [work._source_rank() for work in works[size : 2 * size - 1]]
    assert sorted(senders) == list(range(1, size))
    assert anybody[:, 3].tolist() == senders
