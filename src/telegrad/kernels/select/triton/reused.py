"""The policy "reused" for many residuals, their thresholds and how often these were used on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from telegrad.kernels.select import TINY
from telegrad.kernels.select.arguments import check_arguments
from telegrad.kernels.select.triton import reuse
from telegrad.kernels.select.triton.many import Passes, Reusing
from telegrad.kernels.select.triton.ranked import room_of, sample_rank, sampled_bound
from telegrad.kernels.select.triton.sources import FusedPass, Output, Source, launch_over, side_of

_PARTS = 128  # residuals that one program decides for


def queue_reused(
    parts: Sequence[Reusing],
    table: torch.Tensor,
    gradient: torch.Tensor | None,
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    *,
    interval: int,
    gain: float,
    active: torch.Tensor | None = None,
) -> None:
    """Of each residual all entries at or above its threshold, if these are k/2 to 2k; otherwise, and at every
    ``interval``-th call, as ``queue_topk``, and the threshold is the lowest magnitude moved. In between it follows the
    count: threshold *= (count / k) ** ``gain``.

    ``table``: ``reuse_table`` of the parts, on their device, so that all of them go by as many launches as one does,
    but for those that are alone. ``gradient``: of all parts, each from its offset on; ``None``: nothing is added.
    ``indices`` and ``values``: of all parts, each in its room; ``counts``: int64, by part; ``active``: int64, by place:
    where it is 0, the residual and what is kept stay as they are, and nothing is moved. Does not wait. Source: RedSync
    §3.2; the entries are those of ``ReusedThreshold`` on a CPU. Raises as ``check_arguments``, of the part that ends
    last, and of k.
    """
    if not parts:
        return
    _check(parts, gradient, indices, values)
    side, number = side_of(0), len(parts)
    rows = torch.empty(6, number + number % 2, dtype=torch.int64, device=table.device)  # rows at multiples of 16 bytes
    bounds, reuses, reached, usable, listed, lengths = rows
    takes_part, held = reached if active is None else active, {"HELD": active is not None}

    def decide(kernel: Any, *tensors: Any, **options: Any) -> None:
        launch_over(number, kernel, table, number, *tensors, **options, block=_PARTS, warps=1)

    decide(reuse.set_bounds, bounds, reuses, interval, BEYOND=reuse.BEYOND)
    together = None
    alone = {place: _Alone(one, gradient, bounds[place : place + 1]) for place, one in enumerate(parts) if one.is_alone}
    if len(alone) < number:
        together = Passes(parts, table, gradient, side, bounds, reached, active)
    for place, by_itself in alone.items():
        by_itself.mark(reached[place : place + 1], active)
    decide(reuse.decide_reuse, reuses, reached, takes_part, usable, listed, lengths, **held)
    cuts = torch.empty(number, 2, dtype=torch.int64, device=table.device)
    if together is not None:
        together.take(usable, indices, values)
        together.move_largest(lengths, cuts, indices, values, counts)
    for place, by_itself in alone.items():
        own = slice(place, place + 1)
        by_itself.take(indices, values, usable[own])
        by_itself.move_largest(lengths[own], listed[own], cuts[place], counts[own])
    decide(reuse.follow_reuse, usable, cuts, takes_part, counts, GAIN=gain, TINY=TINY, **held)


class _Alone:
    """One of so many elements that its passes take longer than to launch them. A threshold is found anew among entries
    that reach a bound of a sample, if one is taken: to rank all of 2**26 elements, in every eighth call, takes 2 ms on
    an H200."""

    def __init__(self, part: Reusing, gradient: torch.Tensor | None, bound: torch.Tensor) -> None:
        size = part.residual.numel()
        self._part, self._bound, self._side = part, bound, side_of(0)
        self._gradient = None if gradient is None else gradient[part.offset : part.offset + size]
        rank = sample_rank(size, part.k)
        self._samples = rank is not None
        if rank is not None:
            sampled_bound(part.residual, self._gradient, self._side, rank, bound)

    def mark(self, reached: torch.Tensor, active: torch.Tensor | None) -> None:
        """Adds the gradient."""
        place = self._part.place
        self._made = FusedPass(
            self._part.residual,
            self._gradient,
            self._side,
            bound=self._bound,
            active=None if active is None else active[place : place + 1],
            reached=reached,
        )

    def take(self, indices: torch.Tensor, values: torch.Tensor, usable: torch.Tensor) -> None:
        """What was marked leaves, unless ``usable`` is 0."""
        room = slice(self._part.start, self._part.start + self._part.room)
        self._out = Output(indices[room], values[room], self._part.offset)
        self._made.take(self._out, usable)

    def move_largest(self, length: torch.Tensor, listed: torch.Tensor, cut: torch.Tensor, moved: torch.Tensor) -> None:
        """As ``Passes.move_largest``, of ``length`` elements, or of as many marked entries as ``listed`` says."""
        residual, k = self._part.residual, self._part.k
        source = Source(residual, residual, length, self._side)
        source.move(source.kth(k, cut, cuts_all=True), self._out, moved)
        if self._samples:  # where one of the two has nothing to rank, it cuts and moves 0
            cut_of_listed, of_listed = self._rank_listed(listed)
            cut.add_(cut_of_listed)
            moved.add_(of_listed)

    def _rank_listed(self, listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual, k = self._part.residual, self._part.k
        room, device = room_of(residual.numel(), k), residual.device
        positions = torch.empty(room, dtype=torch.uint32, device=device)
        values = torch.empty(room, dtype=torch.float32, device=device)
        self._made.copy(Output(positions, values, 0), listed)
        source = Source(residual, values, listed, self._side, positions)
        cut = source.kth(k, cuts_all=True)
        return cut, source.move(cut, self._out)


def _check(
    parts: Sequence[Reusing], gradient: torch.Tensor | None, indices: torch.Tensor, values: torch.Tensor
) -> None:
    room = max(one.start + one.room for one in parts)
    for one in parts:
        check_arguments(one.residual, None, indices, values, room, one.k)
    if gradient is not None:
        last = max(parts, key=lambda one: one.offset + one.residual.numel())
        size = last.residual.numel()
        check_arguments(last.residual, gradient[last.offset : last.offset + size], indices, values, room)
