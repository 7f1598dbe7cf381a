"""Elastic: training that goes on when ranks are lost, and takes in others.

A step is one backward pass with its averages, an agreement that all ranks have them, and the optimizer's step. A rank
that steps knows that all others have their averages. So if a rank is lost, survivors that have not stepped either step
too, because another one has, or all repeat the step.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.compress.arguments import checked_count
from telegrad.errors import TransportError
from telegrad.synchronizer.synchronizer import Synchronizer

MakeSynchronizer = Callable[[nn.Module, Communicator], Synchronizer]
OnChange = Callable[[int, int], None]
_MOST_ATTEMPTS = 20  # at one step, or one change of ranks


class Elastic:
    """Trains ``model`` on ranks that may be lost and come: call ``step()`` in place of the backward pass and the
    optimizer's step.

    - ``model``: as for Synchronizer, not inside of DistributedDataParallel, whose process group cannot change.
    - ``optimizer``: steps all trained parameters.
    - ``comm``: of ``telegrad.join()``, or the job's first of ``from_torch()``. It changes in place, and is this
      object's until ``close()``: nothing else may be called on it.
    - ``synchronizer``: makes one for a model and a communicator, after each change anew. ``compress`` on the CPU only.
      Thresholds of Ok-Topk, and factors of LowRank, begin anew then, and residuals stay.
    - ``on_change``: called after each change with the numbers of ranks before and now, such as to scale a rate.
    - ``state``: objects with ``state_dict()`` and ``load_state_dict()``, by name, which newcomers take over too, such
      as a scheduler. ``step``: how many steps a loaded checkpoint has behind it, the same on all ranks.

    All begin with rank 0's parameters, buffers, optimizer, ``state`` and step, as later newcomers do. A step is on all
    ranks or on none. If a rank is lost, the others repeat at most the step under way; its average is over those who
    take part. The residual of a lost rank is lost: a ``RuntimeWarning`` names ranks and norm, and ``lost_residuals``
    adds up. A rank that was frozen for longer than ``liveness_timeout_s`` takes a peer's state over, with a warning.

    Raises ``TypeError`` and ``ValueError`` for bad arguments. ``step()`` raises ``RendezvousError`` if the store is
    gone as a rank is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Communicator,
        *,
        synchronizer: MakeSynchronizer = Synchronizer,
        on_change: OnChange | None = None,
        state: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.join()")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give one, as AdamW(model.parameters())")
        if not callable(synchronizer):
            raise TypeError(f"synchronizer={synchronizer!r} must make a Synchronizer of a model and a communicator")
        self._membership = comm._checked_membership("Elastic")
        if not comm._can_grow:
            raise ValueError("comm must be the first communicator of all ranks of the job, or of telegrad.join()")
        self._step = checked_count(step, "step")
        self._model, self._optimizer, self._comm = model, optimizer, comm
        self._make, self._on_change, self._state = synchronizer, on_change, dict(state or {})
        self._synchronizer: Synchronizer | None = None
        self._is_member = self._is_prepared = self._is_wanted = self._is_closed = self._told_of_store = False
        self._norms = self._told_norms = np.zeros(comm.world_size)
        self._unsent: dict[str, Any] | None = None  # of the last Synchronizer
        self._before: tuple[Tensor, list[Tensor]] | None = None  # the step under way
        self._repeated, self._lost = 0, 0.0
        parameters = {name: (str(one.dtype), tuple(one.shape)) for name, one in model.state_dict().items()}
        self._alike = zlib.crc32(repr([parameters, type(optimizer).__name__, sorted(self._state)]).encode())
        self._membership.stay()
        try:
            self._align()
        except TransportError as error:
            self._change(error)

    @property
    def comm(self) -> Communicator:
        """The communicator of the present ranks."""
        return self._comm

    @property
    def synchronizer(self) -> Synchronizer:
        """The present one."""
        assert self._synchronizer is not None
        return self._synchronizer

    @property
    def rank(self) -> int:
        """This rank among the present ones, after the last change."""
        return self._comm.rank

    @property
    def world_size(self) -> int:
        """The number of present ranks."""
        return self._comm.world_size

    @property
    def steps(self) -> int:
        """How many steps were taken, the same on all ranks: the number of the next one."""
        return self._step

    @property
    def repeated(self) -> int:
        """How many steps this rank has begun again, after a loss."""
        return self._repeated

    @property
    def lost_residuals(self) -> float:
        """The norms of all residuals that lost ranks had not sent, added up."""
        return self._lost

    def step(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Takes one step on all ranks, and returns this rank's loss.

        ``loss_of``: computes it; called again if the step is repeated, so it asks for ``steps``, ``rank`` and
        ``world_size`` itself. Buffers and torch's CPU generator are as before then. Raises what ``loss_of`` raises, on
        the other ranks ``TransportError``; and ``RendezvousError`` as the store is gone."""
        if self._is_closed:
            raise ValueError("this Elastic is closed: make another")
        if self._is_wanted:
            self._change()
        for _ in range(_MOST_ATTEMPTS):
            self._before = torch.get_rng_state(), [one.detach().clone() for one in self._model.buffers()]
            try:
                self._optimizer.zero_grad()
                loss = loss_of()
                loss.backward()  # type: ignore[no-untyped-call]
                self._is_prepared = True
                self._agree()
            except TransportError as error:
                if self._change(error):
                    return loss.detach()
                self._repeated += 1
            except BaseException as error:
                self._leave(f"{type(error).__name__}: {error}")
                raise
            else:
                self._commit()
                return loss.detach()
        raise self._given_up(f"step {self._step}")

    def close(self) -> None:
        """Waits until all ranks have taken their last step, and leaves them; the model is free then. Close ``comm``,
        too. Called twice it does nothing."""
        if self._is_closed:
            return
        self._before = None
        with contextlib.suppress(TransportError):
            for _ in range(_MOST_ATTEMPTS):
                try:
                    self._comm.barrier()
                except TransportError as error:
                    self._change(error)
                else:
                    break
        self._is_closed = True
        self._membership.leave(ends=True)
        self._close_synchronizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(f"{type(error).__name__}: {error}")

    def _agree(self) -> None:
        """All ranks have the averages, or this raises."""
        wanted = self._comm.rank == 0 and self._membership.wanted()
        norm = np.float64(_norm_of(self.synchronizer)).view(np.int64)
        told = self._comm.all_gather(np.array([wanted, norm], np.int64)).reshape(-1, 2)
        self._is_wanted, self._told_norms = bool(told[:, 0].any()), told[:, 1].view(np.float64)
        if self._membership.store_error and not self._told_of_store:
            self._told_of_store = True
            text = "training goes on, but nobody can come, and a loss of one rank ends all: save a checkpoint"
            warnings.warn(f"{self._membership.store_error}: {text}", RuntimeWarning, stacklevel=3)

    def _commit(self) -> None:
        self._optimizer.step()
        self._step += 1
        self._is_prepared, self._norms, self._before = False, self._told_norms, None

    def _discard(self) -> None:
        """All is as before the step under way."""
        self._is_prepared = False
        compression = None if self._synchronizer is None else self._synchronizer._compression
        if compression is not None:
            compression.compressor.drop_step()
            compression.compressor.revert(compression.compressor.unconfirmed())
        before, self._before = self._before, None
        if before is not None:
            torch.set_rng_state(before[0])
            with torch.no_grad():
                for one, values in zip(self._model.buffers(), before[1], strict=True):
                    one.copy_(values)

    def _change(self, error: TransportError | None = None) -> bool:
        """Goes on with the ranks that are left after ``error``; without one, also with those that wait. Returns whether
        this rank has taken the step under way, which it may have before yet another one is lost."""
        self._is_wanted = False
        before, number, places = self._norms, self._step, [*range(len(self._norms))]
        admit, blamed = error is None, None if error is None else error.peer
        for _ in range(_MOST_ATTEMPTS):
            try:
                kept, was_member = self._comm._regroup(admit=admit, blamed=blamed, rejoins=True)
            except BaseException:
                self._leave("the ranks do not find each other")
                raise
            places = [places[rank] if rank >= 0 else -1 for rank in kept] if was_member and places else []
            self._is_member = self._is_member and was_member
            try:
                self._align()
            except TransportError:
                admit, blamed = False, None
                continue
            self._tell(before, places, number)
            return bool(places) and self._step > number
        raise self._given_up("a change of ranks")

    def _tell(self, norms: np.ndarray[Any, Any], places: list[int], number: int) -> None:
        """``places``: by rank the rank before the change; empty: this one was away. ``norms``: of residuals then."""
        if not places:
            text = f"this rank was away from step {number} to {self._step}, and takes a peer's state over"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        elif lost := [rank for rank in range(len(norms)) if rank not in places]:
            norm = float(norms[lost].sum())
            self._lost += norm
            text = f"lost in step {number}, and with them residuals of norm {norm:.3g}: {len(places)} ranks go on"
            warnings.warn(f"ranks {lost} of {len(norms)} were {text}", RuntimeWarning, stacklevel=4)
        if self._on_change is not None and len(norms) != self._comm.world_size:
            self._on_change(len(norms), self._comm.world_size)

    def _align(self) -> None:
        """All ranks end the step that one of them has ended, or nobody; those that come take over what rank 0 has."""
        own = [self._step if self._is_member else -1, self._is_prepared, self._alike]
        told = self._comm.all_gather(np.array(own, np.int64)).reshape(-1, 3)
        last, lacks = int(told[:, 0].max()), told[:, 0] < 0
        if self._is_member and self._is_prepared and self._step < last:
            self._commit()
        else:
            self._discard()
        if told[self._comm.rank, 2] != told[0, 2]:
            self._leave("another model")
            raise ValueError("this rank's model, optimizer or state= differ from those of rank 0: give it the same")
        if not self._is_member:
            self._membership.note_parameters(are_there=last >= 0)
        self._close_synchronizer()
        if lacks.any():
            held = {"step": self._step, "optimizer": self._optimizer.state_dict()}
            held["state"] = {name: one.state_dict() for name, one in self._state.items()}
            held = self._comm.broadcast_state(held if self._comm.rank == 0 else None, 0)
            if not self._is_member and self._comm.rank != 0:
                self._step = held["step"]
                self._optimizer.load_state_dict(held["optimizer"])
                for name, one in self._state.items():
                    one.load_state_dict(held["state"][name])
        made = self._make(self._model, self._comm)
        try:
            self._take(made)
            self._told_norms = self._comm.all_gather(np.array([_norm_of(made)])).reshape(-1)
        except BaseException:
            made.close()
            raise
        self._norms, self._synchronizer, self._unsent, self._is_member = self._told_norms, made, None, True

    def _take(self, made: Any) -> None:
        """Of the last Synchronizer what waits. Raises ``TypeError`` and ``ValueError`` for one that cannot repeat."""
        if not isinstance(made, Synchronizer):
            raise TypeError(f"synchronizer made a {type(made).__name__}: it must return a telegrad.Synchronizer")
        compression = made._compression
        if made._waits_elsewhere:
            raise ValueError(
                "synchronizer has wait_in= or delay=, and a step is agreed on before the optimizer steps: leave it out"
            )
        if compression is None:
            return
        if made._is_on_device:
            raise ValueError("compress= on a GPU keeps what a repeated step could not undo: leave it out")
        if self._unsent is not None and self._is_member:
            here = {"rank": self._comm.rank, "world_size": self._comm.world_size, "step": self._step}
            made.load_state_dict({**self._unsent, **here})
        compression.step = self._step

    def _close_synchronizer(self) -> None:
        made, self._synchronizer = self._synchronizer, None
        if made is not None:
            if made._compression is not None:
                made._compression.forget_sums()
                self._unsent = made.state_dict()
            made.close()

    def _leave(self, why: str) -> None:
        """The others go on without this rank."""
        if not self._is_closed:
            self._is_closed = True
            self._membership.leave()
            self._comm.abort(why)
            self._close_synchronizer()

    def _given_up(self, what: str) -> TransportError:
        text = f"{what} failed {_MOST_ATTEMPTS} times: look at the warnings of all ranks"
        self._leave(text)
        return TransportError(text, rank=self._comm.rank, operation="Elastic.step")


def _norm_of(synchronizer: Synchronizer) -> float:
    """Of all that waits on this rank."""
    compression = synchronizer._compression
    if compression is None:
        return 0.0
    return math.hypot(*(float(np.linalg.norm(one.values)) * one.unit for one in compression.compressor.residuals))
