"""Packing on GPUs, with Triton kernels: the functions of ``cpu``, with the same bytes, on torch tensors of one GPU.

Kernels and the plan of the blocks say what they move. Blocks are found by one program, from header to header: about a
microsecond each on a GPU (not measured), which messages of more than a million indices should spread over several
streams.
"""

from __future__ import annotations

import torch

from telegrad.kernels.pack.triton.bits import pack_numbers, unpack_numbers
from telegrad.kernels.pack.triton.blocks import find_blocks, read_blocks, read_runs, write_blocks
from telegrad.kernels.pack.triton.plan import plan_of
from telegrad.kernels.scatter.triton import count_in_order
from telegrad.kernels.triton import BLOCK, launch, numbers_on, told

_TILE = 1024  # bits of a high section that are looked at together


def pack_bits(numbers: torch.Tensor, width: int, out: torch.Tensor) -> None:
    """As ``cpu.pack_bits``. Does not wait."""
    if out.numel():
        programs = -(-out.numel() // BLOCK)
        launch(pack_numbers, programs, numbers, numbers.numel(), out, out.numel(), WIDTH=width, BLOCK=BLOCK)


def unpack_bits(packed: torch.Tensor, width: int, numbers: torch.Tensor) -> int:
    """As ``cpu.unpack_bits``. Waits once, for the last byte, where it has spare bits."""
    count = numbers.numel()
    if count:
        launch(unpack_numbers, -(-count // BLOCK), packed, count, numbers, WIDTH=width, BLOCK=BLOCK)
    used = count * width % 8
    return int(packed[-1].item()) >> used if used else 0


def pack_indices(indices: torch.Tensor, out: torch.Tensor) -> int:
    """As ``cpu.pack_indices``. Waits once."""
    if indices.numel() == 0:
        return 0
    wide = indices.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    plan = plan_of(wide)
    (total,) = told(plan.ends[-1:])
    words = torch.zeros(-(-total // 4), dtype=torch.int32, device=indices.device)
    fields = (plan.counts, plan.breaks, plan.widths, plan.runs, plan.payloads, plan.ends)
    launch(write_blocks, plan.counts.numel(), wide, wide.numel(), *fields, words)
    out[:total].copy_(words.view(torch.uint8)[:total])
    return total


def unpack_indices(packed: torch.Tensor, indices: torch.Tensor) -> int:
    """How many faults there are. Waits twice."""
    length, count = packed.numel(), indices.numel()
    room = min(count, length // 8)
    if room == 0:
        return int(length > 0 or count > 0)
    begins, starts = torch.empty(2, room, dtype=torch.int64, device=indices.device)
    found = numbers_on(indices, 0, 0)
    launch(find_blocks, 1, packed, length, count, room, begins, starts, found)
    blocks, faults = told(found)
    if faults:
        return faults
    missing, present = torch.empty(2, count, dtype=torch.int32, device=indices.device).view(torch.uint32)
    wrong = numbers_on(indices, 0)
    read = (packed, begins, starts, indices, missing, present, wrong)
    launch(read_blocks, blocks, *read, TILE=_TILE)
    launch(read_runs, blocks, *read)
    count_in_order(indices, 2**32, 0, wrong)
    return told(wrong)[0]
