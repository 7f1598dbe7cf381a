"""``nonfinite="skip"``: one backward pass that all ranks keep, or all drop.

After its last bucket each rank says in one tiny sum whether it met NaN or infinity. Until that sum is known none of the
pass's futures completes (DDP waits for all of them at the end of the backward pass anyway), and what the pass did to
residuals and to the thresholds of sums can still be undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from telegrad.communicator import Communicator, Work
from telegrad.communicator.work import future_of_all


class Undoable(Protocol):
    """What remembers something from step to step, as a Compressor does."""

    def begin(self) -> None:
        """Opens a step that can be undone."""

    def keep_step(self) -> None:
        """Closes the open step."""

    def drop_step(self) -> None:
        """Undoes the open step, if there is one."""


class AgreedStep:
    """One backward pass. It keeps the step of what is ``undoable``, or undoes it: dropped, failed or abandoned passes
    are undone.

    ``settled`` gets the verdict, dropped or not, before any future completes; ``failed`` the error of an operation.
    Both run on the completion thread.
    """

    def __init__(
        self, undoable: Sequence[Undoable], settled: Callable[[bool], None], failed: Callable[[Exception], None]
    ) -> None:
        self.unsound = False  # this rank wants the step to be dropped
        self._undoable = undoable
        self._settled = settled
        self._failed = failed
        self._works: list[Work] = []
        self._keeps: list[Callable[[], None]] = []
        self._gate: torch.futures.Future[None] = torch.futures.Future()  # done when the verdict or the error is known
        self._verdict: torch.futures.Future[None] | None = None
        self._dropped = False
        self._error: Exception | None = None
        for one in undoable:
            one.begin()

    def _drop(self) -> None:
        for one in self._undoable:
            one.drop_step()

    @property
    def closed(self) -> bool:
        """True once it has had its last bucket."""
        return self._verdict is not None

    def outcome(
        self, works: list[Work], finish: Callable[[bool], torch.Tensor], keep: Callable[[], None]
    ) -> torch.futures.Future[torch.Tensor]:
        """A future of ``finish(dropped)`` for one bucket, which takes these ``works``; ``keep`` runs before the verdict
        is known to anybody, unless the pass is dropped."""
        self._works += works
        self._keeps.append(keep)

        def conclude(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._error is not None:
                raise self._error
            return finish(self._dropped)

        return self._gate.then(conclude)

    def close(self, comm: Communicator) -> None:
        """Asks all ranks, after the last bucket."""
        flag = np.array([self.unsound], np.float32)
        works = [*self._works, comm.all_reduce(flag, "sum", async_op=True)]

        def settle() -> None:
            self._dropped = bool(flag[0])
            if self._dropped:
                self._drop()
            else:
                for keep in self._keeps:
                    keep()
                for one in self._undoable:
                    one.keep_step()
            self._settled(self._dropped)

        def fail(error: Exception) -> None:
            self._error = error
            self._drop()
            self._failed(error)

        self._verdict = future_of_all(works, settle, fail)
        self._verdict.then(lambda _: self._gate.set_result(None))

    def leave(self, error: Exception | None = None) -> None:
        """Returns when the pass is over. One without its last bucket ends here, undone, its futures with ``error``.

        Raises nothing.
        """
        if self._verdict is not None:
            with contextlib.suppress(Exception):
                self._verdict.wait()
        elif not self._gate.done():
            for work in self._works:  # the network may still read the buckets' memory
                with contextlib.suppress(Exception):
                    work.wait()
            self._drop()
            self._error = error or RuntimeError("the backward pass ended before its last bucket: the step is dropped")
            self._gate.set_result(None)
