"""Whether DistributedDataParallel hands its hook all that is trained, and whether nobody steps before it is averaged:
otherwise each rank would train alone, and replicas would drift apart without an error. Averages nothing."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from telegrad.ddp.bucket import GradBucket
from telegrad.ddp.steps_in_backward import BackwardSteps, HookedParameters, changed_error

_OWNER = "the DDP hook"
_UNFROZEN = "set requires_grad before DistributedDataParallel(model), or wrap the model and make its DDPState again"

_SHADOW = "_match_all_reduce_for_bwd_pass"
"""The method of DistributedDataParallel that calls the hook with zeros on a rank that has joined."""

_MOST_FRAMES = 16

Future = torch.futures.Future[torch.Tensor]


class BucketWatch:
    """``parameters``: those that the hook averages, by name; ``frozen``: the others of the model. ``fail``: is told of
    an error inside the backward pass before it is raised."""

    def __init__(
        self, parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor], fail: Callable[[Exception], None]
    ) -> None:
        self._parameters = parameters
        self._names = {id(one): name for name, one in parameters.items()}
        self._frozen = [(name, weakref.ref(one)) for name, one in frozen.items()]
        self._hooked = HookedParameters(parameters)
        self._steps = BackwardSteps(parameters, _OWNER, fail, self._is_averaged)
        self._seen: set[int] = set()  # of the pass that is under way
        self._task = -1  # autograd's number of it
        self._outcomes: list[tuple[frozenset[int], Future]] = []

    def look(self, bucket: GradBucket) -> None:
        """Before a bucket is averaged. Raises ``RuntimeError``, alike on all ranks whose programs do the same,
        ``TypeError`` for what is no bucket, and ``ValueError`` on a rank that has joined, where averages would be of
        the others alone."""
        if isinstance(bucket, tuple):
            raise TypeError(
                "torch._dynamo.config.optimize_ddp='python_reducer' gives hooks single gradients, and drops the "
                "averages that they return: leave it at its default (True), or use a telegrad.Synchronizer"
            )
        if bucket.index() == 0:
            self._seen, self._outcomes, self._task = set(), [], torch._C._current_graph_task_id()
            if self._task == -1:
                _check_divisor()
            self._check_frozen()
            self._hooked.look()
        members = bucket.parameters()
        self._seen.update(map(id, members))
        changed = (
            self._hooked.changed(members) if self._task != -1 else None
        )  # by hand there is no gradient to wait for
        if changed is not None:
            raise changed_error(self._names[id(changed)], _OWNER)
        if bucket.is_last() and len(self._seen) < len(self._names):
            self._check_all_seen()

    def started(self, bucket: GradBucket, outcome: Future) -> None:
        """A bucket will be the average when ``outcome`` is done."""
        self._outcomes.append((frozenset(map(id, bucket.parameters())), outcome))

    def _check_frozen(self) -> None:
        for name, found in self._frozen:
            one = found()
            if one is not None and one.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was unfrozen after its DDPState was made, and DistributedDataParallel does "
                    f"not average it: {_UNFROZEN}"
                )

    def _check_all_seen(self) -> None:
        for name, one in self._parameters.items():
            if id(one) not in self._seen and one.requires_grad and not getattr(one, "_ddp_ignored", False):
                raise RuntimeError(
                    f"parameter {name!r} is in no bucket of DistributedDataParallel, which does not average it, such "
                    f"as one that was unfrozen after the model was wrapped: {_UNFROZEN}; or leave it out of "
                    "named_parameters, if something else averages it"
                )

    def _is_averaged(self, parameter: Tensor) -> bool:
        """As where somebody's callback on a bucket's future steps."""
        if self._task != torch._C._current_graph_task_id():
            return False
        return any(id(parameter) in members and outcome.done() for members, outcome in self._outcomes)


def _check_divisor() -> None:
    """Outside a backward pass. DDP tells its hook nothing of ``Join``, but calls it from a method of its own."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == _SHADOW:
            ddp = frame.f_locals.get("self")
            if getattr(ddp, "_divide_by_initial_world_size", True) is False:
                raise ValueError(
                    "divide_by_initial_world_size=False has no effect with telegrad's hook, which divides by the "
                    "number of all ranks, also when some have no more batches: leave it out of join()"
                )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
