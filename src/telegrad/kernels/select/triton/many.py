"""Launches what passes over many residuals by as many launches as one takes: kernels of ``passes_of_many``.

A residual of ``ALONE`` elements or more has no programs in them: its passes take longer than to launch them, and there
are better ways for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from telegrad.kernels.select.triton import passes_of_many, sources
from telegrad.kernels.triton import by_parts, launch, table_of

ALONE = 1 << 25


class Reusing(NamedTuple):
    """One of the residuals that ``queue_reused`` chooses from: its elements, and how many entries are wanted of it.

    ``threshold`` (float64, at most 0 for none) and ``calls`` (int64, since it was found) are what is kept from call to
    call, one element each, on its device. ``start``: where the room of its entries begins, 2k or all there are;
    ``offset``: where its gradient begins among all, and what is added to its positions; ``place``: its own in
    ``active``.
    """

    residual: torch.Tensor
    k: int
    threshold: torch.Tensor
    calls: torch.Tensor
    start: int
    offset: int
    place: int

    @property
    def room(self) -> int:
        """The most entries that leave."""
        return min(2 * self.k, self.residual.numel())

    @property
    def is_alone(self) -> bool:
        """Whether it has no programs in launches for many."""
        return self.residual.numel() >= ALONE


def reuse_table(parts: Sequence[Reusing]) -> torch.Tensor:
    """What kernels read of them: int64, in host memory, to be copied to the device. It holds as long as all tensors
    stay where they are, and all numbers what they are. Its rows are those of ``passes_of_many``."""
    return table_of(
        [[*map(_passes, parts)], [*map(_groups, parts)], _cuts(parts), [*map(_tallies, parts)]],
        [one.residual.data_ptr() for one in parts],
        [one.residual.numel() for one in parts],
        [one.k for one in parts],
        [one.start for one in parts],
        [one.offset for one in parts],
        [one.place for one in parts],
        [one.threshold.data_ptr() for one in parts],
        [one.calls.data_ptr() for one in parts],
    )


class Passes:
    """Over the residuals of ``parts`` that are not alone, ``table``, on their device, being theirs: gradients are
    added, and what reaches each one's bound is marked, as by a ``FusedPass``. ``bounds``, ``reached``: int64, by part;
    ``active``: int64, by place."""

    def __init__(
        self,
        parts: Sequence[Reusing],
        table: torch.Tensor,
        gradient: torch.Tensor | None,
        side: sources.Side,
        bounds: torch.Tensor,
        reached: torch.Tensor,
        active: torch.Tensor | None,
    ) -> None:
        self._parts, self._side = parts, side
        self._given = by_parts(table, parts)
        self._block = sources.PASS_BLOCK
        blocks, self._groups = sum(map(_passes, parts)), sum(map(_groups, parts))
        words = self._block // 32
        self._marks = torch.empty(blocks * words, dtype=torch.uint32, device=table.device)
        self._totals = torch.empty(self._groups, dtype=torch.int64, device=table.device)
        self._grouped: dict[str, Any] = {"WORDS": words, "GROUP": sources.GROUP, "warps": sources.GROUP_WARPS}
        launch(
            passes_of_many.fused_pass_of_many,
            blocks,
            *self._given,
            table if gradient is None else gradient,
            *(bounds, self._marks, reached),
            table if active is None else active,
            FLIP=side.flip,
            MASK=side.mask,
            HELD=active is not None,
            ADD=gradient is not None,
            BLOCK=self._block,
            warps=sources.PASS_WARPS,
        )
        counted = self._marks, self._totals, reached
        launch(passes_of_many.count_marks_of_many, self._groups, *self._given, *counted, **self._grouped)

    def take(self, usable: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """What was marked leaves for each part's room, but where ``usable`` (int64, by part) is 0."""
        given = (*self._given, self._marks, self._totals, usable, indices, values)
        launch(passes_of_many.take_marked_of_many, self._groups, *given, **self._grouped)

    def move_largest(
        self,
        lengths: torch.Tensor,
        cuts: torch.Tensor,
        indices: torch.Tensor,
        values: torch.Tensor,
        moved: torch.Tensor,
    ) -> None:
        """Of the first ``lengths`` (int64, by part) elements the k largest leave. ``cuts`` (int64, of shape (parts, 2))
        becomes what ``Source.kth`` finds, ``moved`` (int64) how many they were."""
        side, programs = self._side, sum(_cuts(self._parts))
        keys: dict[str, Any] = {"FLIP": side.flip, "MASK": side.mask, "BLOCK": sources.BLOCK}
        histograms = sources.zeroed_histograms(len(self._parts), cuts)
        stride = histograms.stride(0)
        for number, (width, shift) in enumerate(sources.DIGITS):
            is_first, is_last = number == 0, number == len(sources.DIGITS) - 1
            digit: dict[str, Any] = {**keys, "LOWEST": side.lowest, "STRIDE": stride, "SHIFT": shift, "WIDTH": width}
            digit |= {"FIRST": is_first, "CUT": is_last}
            counted = (*self._given, lengths, cuts, histograms[0, number])
            launch(passes_of_many.count_digits_of_many, programs, *counted, **digit)
        tallies = torch.empty(2 * sum(map(_tallies, self._parts)), dtype=torch.int64, device=cuts.device)
        given = (*self._given, lengths, cuts, tallies)
        launch(passes_of_many.count_cut_of_many, programs, *given, **keys)
        launch(passes_of_many.move_cut_of_many, programs, *given, indices, values, moved, **keys)


def _passes(part: Reusing) -> int:
    """Programs that mark."""
    return 0 if part.is_alone else sources.blocks_of(part.residual.numel(), sources.PASS_BLOCK)


def _groups(part: Reusing) -> int:
    """Programs that take what is marked."""
    return -(-_passes(part) * sources.PASS_BLOCK // (32 * sources.GROUP))


def _tallies(part: Reusing) -> int:
    """Blocks that are cut."""
    return 0 if part.is_alone else sources.blocks_of(part.residual.numel())


def _cuts(parts: Sequence[Reusing]) -> list[int]:
    """Programs that rank and cut, by part: together about as many as of one. Mostly they have nothing to do."""
    tallies = [_tallies(part) for part in parts]
    total = max(1, sum(tallies))
    return [min(own, -(-sources.PROGRAMS * own // total)) for own in tallies]
