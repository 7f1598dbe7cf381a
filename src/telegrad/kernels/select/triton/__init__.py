"""Selection on GPUs, with Triton kernels: the functions of ``cpu``, with the same contracts, on torch tensors.

Tensors are as ``arguments`` demands, on one GPU, CUDA or HIP. Entries, their order, thresholds and what stays have the
same bits as on a CPU, but for two things: mean and deviation come from sums of doubles in another order, so that
``accumulate_normal`` may differ in the last bits, and a bound that ``accumulate_search`` makes of the mean by one unit
in its last place (k to 2k entries reach it all the same: its own entries are counted, not the CPU's); and a NaN that
the addition makes is the GPU's. Of one tensor on one kind of GPU the result is always the same, bit for bit.

Each function says how often the CPU waits for the GPU; all else is queued. Where nothing else is said it moves 12 bytes
of every element (gradient and residual read once, residual written once) and a few dozen of every chosen entry.

With ``TRITON_INTERPRET=1``, set before this is imported, kernels run on CPU tensors in Triton's interpreter: for tests.
"""

from __future__ import annotations

import math

import torch

from telegrad.kernels.select import Chosen, Sign
from telegrad.kernels.select.arguments import check_arguments, check_buckets, check_inputs
from telegrad.kernels.select.triton import launches, passes
from telegrad.kernels.select.triton.launches import (
    Candidates,
    FusedPass,
    Output,
    Reusing,
    blocks_of,
    key_of,
    launch_over,
    queue_reused,
    reuse_table,
    sample_words,
    side_of,
)
from telegrad.kernels.triton import launch, told

__all__ = [
    "Reusing",
    "accumulate",
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
    "queue_reused",
    "queue_select",
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


def queue_select(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    threshold: float,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    sign: Sign = 0,
) -> None:
    """As ``cpu.accumulate_select``, but ``count`` (int32 or int64, one element) becomes the number of entries moved.

    Of more entries than the outputs hold the first ones are moved, and the others stay in the residual. Does not wait.
    """
    check_arguments(residual, gradient, indices, values, len(indices))
    side = side_of(sign)
    made = FusedPass(residual, gradient, side, bound=key_of(threshold, side))
    made.take(Output(indices, values, offset))
    count.copy_(made.reached.clamp(max=indices.numel()).view(count.shape))


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
    moved = candidates.source.move(candidates.source.kth(k, cuts_all=True), out, count.view(1))
    rest = candidates.rest()
    if rest is not None:
        moved.add_(rest.move(rest.kth(k, cuts_all=True), out))


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


def accumulate(residual: torch.Tensor, gradient: torch.Tensor) -> None:
    """``residual += gradient``. Does not wait."""
    check_inputs(residual, gradient)
    residual.add_(gradient)


def accumulate_all(
    residual: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, offset: int
) -> None:
    """Moves every entry. Does not wait."""
    size = residual.numel()
    check_arguments(residual, gradient, indices, values, size)
    positions = torch.arange(offset, offset + size, dtype=torch.int64, device=residual.device)
    indices[:size].view(torch.int32).copy_(positions)  # the bits of uint32, which torch does little with
    torch.add(residual, gradient, out=values[:size])
    residual.zero_()


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
    out = Output(indices[:k], values[:k], offset)
    return launches.accumulate_topk(residual, gradient, k, side_of(sign), out)


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
    """As ``cpu.accumulate_search``. Waits twice; three times where a sample misled.

    Where it did, and where there is none, another 40 bytes of every element are read: see ``accumulate_topk``.
    """
    most = min(2 * k, residual.numel())
    check_arguments(residual, gradient, indices, values, most, k)
    out = Output(indices[:most], values[:most], offset)
    return launches.accumulate_search(residual, gradient, k, tolerance, side_of(sign), out)


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
    """As ``cpu.accumulate_buckets``. Waits once; with buckets above 8,192 entries for each as ``accumulate_topk``."""
    size = residual.numel()
    check_buckets(size, bucket, per_bucket, of_last)
    whole = size // bucket
    count = whole * per_bucket + of_last
    check_arguments(residual, gradient, indices, values, count)
    if bucket > _MOST_OF_A_BUCKET:
        peak = 0.0
        for i in range(whole + (of_last > 0)):
            own = slice(i * bucket, min((i + 1) * bucket, size))
            place = slice(i * per_bucket, i * per_bucket + (per_bucket if i < whole else of_last))
            added = None if gradient is None else gradient[own]
            k, start = place.stop - place.start, offset + own.start
            chosen = accumulate_topk(residual[own], added, k, indices[place], values[place], start)
            peak = chosen.peak if math.isnan(chosen.peak) else max(peak, chosen.peak)
        return Chosen(count, 0.0, peak)
    width = 1 << (bucket - 1).bit_length()
    rows = max(1, _LANES // width)
    programs = -(-size // (bucket * rows))
    peaks = torch.empty(programs, dtype=torch.int32, device=residual.device)
    launch(
        passes.bucket_pass,
        programs,
        residual,
        residual if gradient is None else gradient,
        *(size, bucket, per_bucket, of_last, indices, values, peaks, offset),
        ADD=gradient is not None,
        ROWS=rows,
        WIDTH=width,
    )
    return Chosen(count, 0.0, launches.value_of(int(peaks.max())))


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
    positions = random_subset(draw, residual.numel(), k, residual.device)
    moments = FusedPass(residual, gradient, side_of(0), moments=True).moments
    assert moments is not None
    launch_over(k, passes.move_listed, residual, positions, k, indices, values, offset)
    (largest,) = told(moments.largest)
    return Chosen(k, 0.0, launches.value_of(largest))


def accumulate_normal(residual: torch.Tensor, gradient: torch.Tensor | None) -> tuple[float, float]:
    """As ``cpu.accumulate_normal``, to the rounding of sums of doubles. Waits once."""
    check_inputs(residual, gradient)
    size = residual.numel()
    sums, squares = torch.empty(2, blocks_of(size), dtype=torch.float64, device=residual.device)
    added = residual if gradient is None else gradient
    launch_over(size, passes.normal_pass, residual, added, size, sums, squares, ADD=gradient is not None)
    total, total_of_squares = torch.stack([sums.sum(), squares.sum()]).tolist()
    mean = total / size
    variance = total_of_squares / size - mean * mean
    return mean, math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0))


def put_back(residual: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, offset: int) -> None:
    """Undoes a move: what was taken out of ``residual`` is there again. Does not wait."""
    count = indices.numel()
    launch_over(count, passes.put_listed_back, residual, indices, values, count, offset)


# A random subset: the first different positions of a counter-based random sequence, the same ones as on a CPU.


def random_subset(draw: tuple[int, int, int, int], size: int, k: int, device: torch.device) -> torch.Tensor:
    """``k`` of the positions below ``size``, ascending, int64. Waits for the GPU once or twice.

    Of more than half of all, those that stay are drawn.
    """
    stays = k > size // 2
    drawn = _first_different(draw, size, size - k if stays else k, device)
    if not stays:
        return drawn
    left = torch.ones(size, dtype=torch.bool, device=device)
    left[drawn] = False
    return left.nonzero()[:, 0]


def _first_different(draw: tuple[int, int, int, int], size: int, wanted: int, device: torch.device) -> torch.Tensor:
    """The first ``wanted`` different positions of the sequence, ascending."""
    seed, call, rank, stream = draw
    count = _draws(size, wanted)
    while True:
        positions = torch.empty(count, dtype=torch.int64, device=device)
        key = (seed & 0xFFFFFFFF, seed >> 32)
        launch_over(count, passes.draw_positions, positions, count, size, call, rank, stream, *key)
        ascending, order = positions.sort(stable=True)  # of equal positions the first draw comes first
        is_new = torch.ones_like(ascending, dtype=torch.bool)
        is_new[1:] = ascending[1:] != ascending[:-1]
        by_draw = torch.empty_like(ascending)
        by_draw[order] = is_new.to(torch.int64)
        chosen = ascending[is_new & (by_draw.cumsum(0)[order] <= wanted)]
        if chosen.numel() == wanted:
            return chosen
        count *= 2


def _draws(size: int, wanted: int) -> int:
    """How many draws have so many different positions among them, almost surely."""
    expected = -size * math.log1p(-wanted / size)
    return math.ceil(expected + 6 * math.sqrt(expected)) + 32
