"""Selection on GPUs, with Triton kernels: the functions of ``cpu``, with the same contracts, on torch tensors.

Tensors are as ``check_arguments`` demands, on one GPU, CUDA or HIP. Entries, their order, thresholds and what stays
have the same bits as on a CPU, but for two things: mean and deviation come from sums of doubles in another order, so
that ``accumulate_normal`` may differ in the last bits, and a bound that ``accumulate_search`` makes of the mean by one
unit in its last place (k to 2k entries reach it all the same: its own entries are counted, not the CPU's); and a NaN
that the addition makes is the GPU's. Of one tensor on one kind of GPU the result is always the same, bit for bit.

Each function says how often the CPU waits for the GPU; all else is queued. Where nothing else is said it moves 12 bytes
of every element (gradient and residual read once, residual written once) and a few dozen of every chosen entry.

With ``TRITON_INTERPRET=1``, set before this is imported, kernels run on CPU tensors in Triton's interpreter: for tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from telegrad.kernels.select import Chosen, Sign, check_arguments, check_buckets, check_inputs
from telegrad.kernels.select.triton import launches, passes
from telegrad.kernels.select.triton.launches import (
    Candidates,
    FusedPass,
    Output,
    Reusing,
    blocks_of,
    launch_over,
    queue_reused,
    reuse_table,
    sample_words,
    side_of,
)
from telegrad.kernels.triton import launch, numbers_on, told

__all__ = [
    "Reusing",
    "accumulate_all",
    "accumulate_buckets",
    "accumulate_normal",
    "accumulate_random",
    "accumulate_search",
    "accumulate_select",
    "accumulate_topk",
    "accumulate_trimmed",
    "prepare",
    "put_back",
    "queue_all",
    "queue_buckets",
    "queue_normal",
    "queue_random",
    "queue_reused",
    "queue_search",
    "queue_topk",
    "reuse_table",
]

# Queued selections: a kernel writes the number of moved entries to the device, and the host does not wait.
# So they can stand in a stream between the kernels that make a gradient and a sum of `DeviceEntries`. Further
# passes over the residual, for where a sample misled, are queued as well; in all other cases their kernels find that
# nothing is to be done, and read no entry.


def prepare(x: torch.Tensor) -> None:
    """Copies to the device of ``x`` what ``queue_topk`` needs there. Waits for it the first time."""
    sample_words(x.device)


def queue_topk(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    sign: Sign = 0,
    active: torch.Tensor | None = None,
) -> None:
    """As ``cpu.accumulate_topk``, but ``count`` (int32 or int64, one element) becomes the number of entries moved.

    That is k, or of one sign all there are. ``active``: int64, one element, 0 or 1; if it is 0, the residual stays as
    it is and nothing is moved. Does not wait, but for a copy of 64 KiB when a device meets its first long residual,
    unless ``prepare`` has made that.
    """
    check_arguments(residual, gradient, indices, values, k, k)
    out = Output(indices[:k], values[:k], offset)
    candidates = Candidates(residual, gradient, k, side_of(sign), moments=False, active=active)
    launches.queue_cut(candidates, launches.largest_cut(k), out, count)


def queue_search(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    tolerance: float,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    sign: Sign = 0,
    active: torch.Tensor | None = None,
) -> None:
    """As ``accumulate_search``, with ``count`` and ``active`` as of ``queue_topk``. Does not wait."""
    most = min(2 * k, residual.numel())
    check_arguments(residual, gradient, indices, values, most, k)
    out = Output(indices[:most], values[:most], offset)
    candidates = Candidates(residual, gradient, 2 * k + 1, side_of(sign), moments=True, active=active)
    launches.queue_cut(candidates, launches.search_cut(k, tolerance, candidates.moments), out, count)


def queue_normal(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    how: tuple[float, float, int],
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    active: torch.Tensor | None = None,
) -> None:
    """All entries that reach a threshold as of ``GaussianThreshold``. ``how``: so many deviations, lowered by a factor,
    so often at most. ``count`` and ``active`` as of ``queue_topk``. Does not wait."""
    most = min(2 * k, residual.numel())
    check_arguments(residual, gradient, indices, values, most, k)
    out = Output(indices[:most], values[:most], offset)
    candidates = Candidates(residual, gradient, 2 * k + 1, side_of(0), moments=False, active=active)
    numbers = torch.empty(4, dtype=torch.float64, device=residual.device)
    numbers[2].fill_(residual.numel())
    numbers[3].fill_(how[0])
    numbers[:2] = _normal_sums(residual, None)
    launches.queue_cut(candidates, launches.normal_cut(k, numbers, *how[1:]), out, count)


def queue_buckets(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    bucket: int,
    per_bucket: int,
    of_last: int,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    active: torch.Tensor | None = None,
) -> None:
    """As ``accumulate_buckets``, with ``count`` and ``active`` as of ``queue_topk``. Does not wait."""
    chosen, _ = _move_buckets(residual, gradient, (bucket, per_bucket, of_last), indices, values, offset, active)
    count.copy_(chosen.view(count.shape))


def queue_random(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    draw: tuple[int, torch.Tensor, int, int],
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    active: torch.Tensor | None = None,
) -> None:
    """As ``accumulate_random``, but the call of ``draw`` is int64 on the device, and ``count`` and ``active`` are as of
    ``queue_topk``. Fewer than k leave where twice as many draws as are almost surely enough are not. Does not wait."""
    check_arguments(residual, gradient, indices, values, k, k)
    FusedPass(residual, gradient, side_of(0), active=active)
    positions, there = _random_subset(draw, residual, k, 2 * _draws(residual.numel(), k))
    moved = there.clamp(max=k) * (1 if active is None else active)
    count.copy_(moved.view(count.shape))
    launch_over(k, passes.move_listed, residual, positions, moved, indices, values, offset)


def queue_all(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    active: torch.Tensor | None = None,
) -> None:
    """As ``cpu.accumulate_all``, with ``count`` and ``active`` as of ``queue_topk``. Does not wait."""
    size = residual.numel()
    check_arguments(residual, gradient, indices, values, size)
    positions = torch.arange(offset, offset + size, dtype=torch.int64, device=residual.device)
    indices[:size].view(torch.int32).copy_(positions)  # the bits of uint32, which torch does little with
    torch.add(residual, gradient, out=values[:size])
    if active is None:
        residual.zero_()
        count.fill_(size)
    else:
        residual.masked_fill_(active > 0, 0.0)
        count.copy_(((active > 0) * size).view(count.shape))


_MOST_OF_A_BUCKET = 8192  # entries that one program holds in registers
_LANES = 2048  # entries of smaller buckets that it takes together


def accumulate_all(
    residual: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, offset: int
) -> None:
    """Moves every entry. Does not wait."""
    queue_all(residual, gradient, indices, values, numbers_on(residual, 0), offset)


def accumulate_select(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    threshold: float,
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    sign: Sign = 0,
) -> int:
    """As ``cpu.accumulate_select``. Waits once."""
    check_arguments(residual, gradient, indices, values, 0)
    side = side_of(sign)
    made = FusedPass(residual, gradient, side, bound=launches.key_of(threshold, side))
    made.take(Output(indices, values, offset))
    (count,) = told(made.reached)
    return count


def accumulate_topk(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """As ``cpu.accumulate_topk``. Waits once; twice where a sample misled.

    Where it did, and where there is none (fewer than 32,768 elements, or a large share of them is wanted), another 24
    bytes of every element are read.
    """
    check_arguments(residual, gradient, indices, values, k, k)
    side = side_of(sign)
    candidates = Candidates(residual, gradient, k, side, moments=not side.is_both)
    return launches.accumulate_cut(candidates, launches.largest_cut(k), Output(indices[:k], values[:k], offset))


def accumulate_trimmed(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    step: float,
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """As ``cpu.accumulate_trimmed``: the entries of ``accumulate_topk``, at the same cost, whatever ``step``.

    What the ratios of RedSync's Algorithm 2 are for, that few entries need be ranked, the sample has done by then: its
    bound leaves little more than k, and mean, maximum and a count for every ratio would only cost more.
    """
    return accumulate_topk(residual, gradient, k, indices, values, offset, sign)


def accumulate_search(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    tolerance: float,
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """As ``cpu.accumulate_search``. Waits once; twice where a sample misled.

    Where it did, and where there is none, another 40 bytes of every element are read: see ``accumulate_topk``.
    """
    most = min(2 * k, residual.numel())
    check_arguments(residual, gradient, indices, values, most, k)
    out = Output(indices[:most], values[:most], offset)
    candidates = Candidates(residual, gradient, 2 * k + 1, side_of(sign), moments=True)
    return launches.accumulate_cut(candidates, launches.search_cut(k, tolerance, candidates.moments), out)


def accumulate_buckets(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    bucket: int,
    per_bucket: int,
    of_last: int,
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
) -> Chosen:
    """As ``cpu.accumulate_buckets``. Waits once. Buckets above 8,192 entries have launches of their own."""
    moved, peaks = _move_buckets(residual, gradient, (bucket, per_bucket, of_last), indices, values, offset, None)
    count, peak = told(moved, peaks.max().to(torch.int64).view(1))
    return Chosen(count, 0.0, launches.value_of(peak))


def _move_buckets(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    shape: tuple[int, int, int],
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
    active: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many entries leave, and highest keys that stay: on the device. Does not wait."""
    size, (bucket, per_bucket, of_last) = residual.numel(), shape
    check_buckets(size, *shape)
    count = size // bucket * per_bucket + of_last
    check_arguments(residual, gradient, indices, values, count)
    moved = numbers_on(residual, count) if active is None else active * count
    if bucket > _MOST_OF_A_BUCKET:
        peaks: list[torch.Tensor] = []
        for number, first in enumerate(range(0, size, bucket)):
            own = slice(first, min(first + bucket, size))
            k, place = per_bucket if own.stop - first == bucket else of_last, number * per_bucket
            out = Output(indices[place : place + k], values[place : place + k], offset + first)
            added = None if gradient is None else gradient[own]
            candidates = Candidates(residual[own], added, k, side_of(0), moments=False, active=active)
            peaks += launches.queue_cut(candidates, launches.largest_cut(k), out, torch.empty_like(moved))
        return moved, torch.cat(peaks)
    width = 1 << (bucket - 1).bit_length()
    rows = max(1, _LANES // width)
    programs = -(-size // (bucket * rows))
    highest = torch.empty(programs, dtype=torch.int32, device=residual.device)
    added, held = residual if gradient is None else gradient, moved if active is None else active
    given = (residual, added, size, *shape, indices, values, highest, offset, held)
    options: dict[str, Any] = {"ADD": gradient is not None, "HELD": active is not None, "ROWS": rows, "WIDTH": width}
    launch(passes.bucket_pass, programs, *given, **options)
    return moved, highest


def accumulate_random(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    draw: tuple[int, int, int, int],
    indices: torch.Tensor,
    values: torch.Tensor,
    offset: int,
) -> Chosen:
    """As ``cpu.accumulate_random``. Waits two or three times. Sorts somewhat more than k (or all but k) numbers."""
    check_arguments(residual, gradient, indices, values, k, k)
    seed, call, rank, stream = draw
    on_device, draws, found = numbers_on(residual, call), _draws(residual.numel(), k), -1
    while found != k:
        positions, there = _random_subset((seed, on_device, rank, stream), residual, k, draws)
        (found,), draws = told(there), 2 * draws
    moments = FusedPass(residual, gradient, side_of(0), moments=True).moments
    assert moments is not None
    launch_over(k, passes.move_listed, residual, positions, there, indices, values, offset)
    (largest,) = told(moments.largest)
    return Chosen(k, 0.0, launches.value_of(largest))


def accumulate_normal(residual: torch.Tensor, gradient: torch.Tensor | None) -> tuple[float, float]:
    """As ``cpu.accumulate_normal``, to the rounding of sums of doubles. Waits once."""
    check_inputs(residual, gradient)
    size = residual.numel()
    total, total_of_squares = _normal_sums(residual, gradient).tolist()
    mean = total / size
    variance = total_of_squares / size - mean * mean
    return mean, math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0))


def _normal_sums(residual: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Of residual + gradient and of their squares, float64."""
    size = residual.numel()
    sums = torch.empty(2, blocks_of(size), dtype=torch.float64, device=residual.device)
    added = residual if gradient is None else gradient
    launch_over(size, passes.normal_pass, residual, added, size, sums[0], sums[1], ADD=gradient is not None)
    return sums.sum(1)


def put_back(residual: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, offset: int) -> None:
    """Undoes a move: what was taken out of ``residual`` is there again. Does not wait."""
    count = indices.numel()
    launch_over(count, passes.put_listed_back, residual, indices, values, count, offset)


# A random subset: the first different positions of a counter-based random sequence, the same ones as on a CPU.


def _random_subset(
    draw: tuple[int, torch.Tensor, int, int], residual: torch.Tensor, k: int, draws: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``k`` of the positions of the residual, ascending, int64, and how many there are: another number than ``k`` where
    so many ``draws`` have too few different ones among them. Of more than half of all, those that stay are drawn."""
    size, device = residual.numel(), residual.device
    stays = k > size // 2
    seed, call, rank, stream = draw
    drawn = torch.empty(draws, dtype=torch.int64, device=device)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    launch_over(draws, passes.draw_positions, drawn, draws, size, call, rank, stream, *key)
    ascending, order = drawn.sort(stable=True)  # of equal positions the first draw comes first
    is_new = torch.ones_like(ascending, dtype=torch.bool)
    is_new[1:] = ascending[1:] != ascending[:-1]
    by_draw = torch.empty_like(ascending)
    by_draw[order] = is_new.to(torch.int64)
    is_wanted = is_new & (by_draw.cumsum(0)[order] <= (size - k if stays else k))
    flags = torch.zeros(size + 1, dtype=torch.bool, device=device)
    flags.scatter_(0, ascending.masked_fill(is_wanted.logical_not(), size), torch.ones_like(is_wanted))
    leaves = flags[:size].logical_not() if stays else flags[:size]
    ends = leaves.cumsum(0)
    places = (ends - 1).masked_fill(leaves.logical_not(), k).clamp_(max=k)  # the last is of those that do not leave
    positions = torch.empty(k + 1, dtype=torch.int64, device=device)
    return positions.scatter_(0, places, torch.arange(size, device=device)), ends[-1:]


def _draws(size: int, k: int) -> int:
    """How many draws have so many different positions among them, or as many as stay, almost surely."""
    wanted = min(k, size - k)
    expected = -size * math.log1p(-wanted / size)
    return math.ceil(expected + 6 * math.sqrt(expected)) + 32
