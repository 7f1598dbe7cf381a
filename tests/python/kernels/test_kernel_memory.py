"""What watches the kernels of tests (kernel_memory.py) finds what is planted here, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
import triton.language as tl
from triton_arrays import DEVICE, torch

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="Triton's interpreter is watched, not a GPU")


FAR = tl.constexpr(1 << 40)  # beyond what any tensor of this process may be


@triton.jit
def all_to_one(x, BLOCK: tl.constexpr):
    tl.store(x, tl.program_id(0))


@triton.jit
def each_its_own(x, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + where, tl.load(x + where) + 1)


@triton.jit
def neighbours(x, BLOCK: tl.constexpr):
    """In place: a program loads what the next one stores."""
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + where, tl.load(x + where + 1, mask=where + 1 < BLOCK * tl.num_programs(0), other=0))


@triton.jit
def count_and_read(x, BLOCK: tl.constexpr):
    tl.atomic_add(x, 1, sem="relaxed")
    tl.store(x + 1 + tl.program_id(0), tl.load(x))


@triton.jit
def count(x, BLOCK: tl.constexpr):
    tl.atomic_add(x, 1, sem="relaxed")


@triton.jit
def beyond(x, BLOCK: tl.constexpr):
    tl.load(x + tl.arange(0, BLOCK).to(tl.int64) * FAR)


@triton.jit
def beyond_but_masked(x, BLOCK: tl.constexpr):
    where = tl.arange(0, BLOCK).to(tl.int64) * FAR
    tl.store(x, tl.sum(tl.load(x + where, mask=where < 1, other=0)))


@triton.jit
def addresses_of_others(x, BLOCK: tl.constexpr):
    tl.store(tl.load(x).to(tl.pointer_type(tl.int64)), 7)


@triton.jit
def turn_round(x, BLOCK: tl.constexpr):
    """Through memory, where the threads that load may not be those that have stored."""
    lane = tl.arange(0, BLOCK)
    tl.store(x + lane, lane)
    tl.store(x + BLOCK + lane, tl.load(x + BLOCK - 1 - lane))


@triton.jit
def turn_round_behind_a_barrier(x, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(x + lane, lane)
    tl.debug_barrier()
    tl.store(x + BLOCK + lane, tl.load(x + BLOCK - 1 - lane))


@triton.jit
def last_adds(x, BLOCK: tl.constexpr, BARRIER: tl.constexpr, SEM: tl.constexpr):
    """Every program stores one number, and who is last adds all."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(x + 2 + program, program.to(tl.int64))
    if BARRIER:
        tl.debug_barrier()
    before = tl.atomic_add(x + 1, 1, sem=SEM)
    if before == programs - 1:
        lane = tl.arange(0, BLOCK)
        tl.store(x, tl.sum(tl.load(x + 2 + lane, mask=lane < programs, other=0)))


@triton.jit
def no_other(x, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(x, tl.sum(tl.load(x + lane, mask=lane < 2)))


def launched(kernel: Any, programs: int = 4, **how: Any) -> Any:
    x = torch.zeros(64, dtype=torch.int64)
    kernel[(programs,)](x, BLOCK=8, **how)
    return x


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (all_to_one, "all_to_one: programs meet, store at .* and store at"),
        (neighbours, "neighbours: programs meet, load at .* and store at"),
        (count_and_read, "count_and_read: programs meet, (load|atomic) at .* and (load|atomic) at"),
        (beyond, "beyond: 7 addresses at .* lie in no tensor"),
        (turn_round, "turn_round: threads of a program meet, store at .* and load at .*: a barrier is missing"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_a_gpu_does_not_forgive_is_found(kernel: Any, message: str) -> None:
    with pytest.raises(Exception, match=message) as raised:
        launched(kernel, 1 if kernel is turn_round else 4)
    assert re.search(r"at test_kernel_memory\.py:\d+", str(raised.value))


@pytest.mark.parametrize(
    "kernel", [each_its_own, count, beyond_but_masked, turn_round_behind_a_barrier], ids=lambda one: one.__name__
)
def test_what_is_right_passes(kernel: Any) -> None:
    launched(kernel, 4 if kernel in (each_its_own, count) else 1)


@pytest.mark.parametrize(
    ("barrier", "sem", "right"), [(True, "acq_rel", True), (False, "acq_rel", False), (True, "relaxed", False)]
)
def test_who_is_last_reads_what_others_have_stored(barrier: bool, sem: str, right: bool) -> None:
    if right:
        assert launched(last_adds, BARRIER=barrier, SEM=sem)[0] == 0 + 1 + 2 + 3
    else:
        with pytest.raises(AssertionError, match="last_adds: programs meet, store at .* and load at"):
            launched(last_adds, BARRIER=barrier, SEM=sem)


def test_tensors_that_an_address_leads_to_are_let_in() -> None:
    x, other = torch.zeros(64, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    x[0] = other.data_ptr()
    addresses_of_others[(1,)](x, BLOCK=8)
    assert other[0] == 7
    x[0] = 8
    with pytest.raises(Exception, match="1 addresses at .* lie in no tensor"):
        addresses_of_others[(1,)](x, BLOCK=8)


def test_lanes_that_are_left_out_hold_no_zeros() -> None:
    assert launched(no_other, 1)[0] != 0


def test_tests_of_kernels_find_no_zeros_in_new_tensors() -> None:
    assert torch.empty(4).isnan().all()
    assert torch.empty(4, dtype=torch.int64).ne(0).all()
