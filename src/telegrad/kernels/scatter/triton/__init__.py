"""Scattering on GPUs, with Triton kernels: the functions of ``cpu``, with the same bits, on torch tensors of one GPU.

Indices of a stream differ: so no two lanes write one place, and nothing here is atomic but the count of faults.
Streams are added in the order of their calls, as kernels of one CUDA or HIP stream run. A place outside ``dense`` is
never touched, also where indices were not checked.

Bytes moved, of every entry: its index (4 or 8), its value (2 or 4), and a sector of memory, 32 bytes, for each place
that no neighbour shares, read and written by ``scatter_add``, written by the others. ``faults_of`` reads the indices
twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from telegrad.kernels.scatter.triton.entries import count_faults, scatter_entries
from telegrad.kernels.triton import BLOCK, launch, numbers_on, told
from telegrad.kernels.triton.floats import KINDS, bits_of

_SET, _ADD, _CLEAR = range(3)


def faults_of(runs: Sequence[torch.Tensor], size: int, base: int) -> list[int]:
    """As ``naive.faults_of``. Waits once."""
    if not runs:
        return []
    faults = numbers_on(runs[0], *[0] * len(runs))
    for run, fault in zip(runs, faults, strict=True):
        count_in_order(run, size, base, fault)
    return told(faults)


def count_in_order(run: torch.Tensor, size: int, base: int, faults: torch.Tensor) -> None:
    """Adds to ``faults``, int64, what ``faults_of`` says of this run. Does not wait."""
    if run.numel():
        launch(count_faults, _blocks(run), run, run.numel(), size, base, faults, BLOCK=BLOCK)


def scatter_add(
    dense: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    base: int = 0,
    held: torch.Tensor | None = None,
) -> None:
    """As ``cpu.scatter_add``. Does not wait."""
    _scatter(dense, indices, values, base, held, _ADD)


def scatter_set(
    dense: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    base: int = 0,
    held: torch.Tensor | None = None,
) -> None:
    """As ``cpu.scatter_set``. Does not wait. Entries may also lie in pinned memory."""
    _scatter(dense, indices, values, base, held, _SET)


def clear(dense: torch.Tensor, indices: torch.Tensor, base: int = 0, held: torch.Tensor | None = None) -> None:
    """As ``cpu.clear``. Does not wait."""
    _scatter(dense, indices, dense, base, held, _CLEAR)


def _scatter(
    dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, base: int, held: torch.Tensor | None, how: int
) -> None:
    count = indices.numel()
    if count == 0:
        return
    arguments = (
        bits_of(dense),
        indices,
        bits_of(values),
        count,
        dense.numel(),
        base,
        indices if held is None else held,
    )
    kind = KINDS[dense.dtype]
    launch(scatter_entries, _blocks(indices), *arguments, HOW=how, KIND=kind, HELD=held is not None, BLOCK=BLOCK)


def _blocks(indices: torch.Tensor) -> int:
    return -(-indices.numel() // BLOCK)
