"""The communication hook for torch's DistributedDataParallel: ``ddp.register_comm_hook(DDPState(...), ddp_hook)``.

DDP calls the hook with each bucket when its gradients are ready, in the same order on all ranks. A bucket becomes at
most two operations: one dense sum of its small tensors and one sparse sum of all others over the bucket's index
space. DDP asks a hook for its annotations, so this file must not postpone their evaluation.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from telegrad.comm import Communicator, Work
from telegrad.comm.work import future_of_all
from telegrad.compress import Compressor
from telegrad.ops.nonfinite.naive import as_float32
from telegrad.stream import SparseStream
from telegrad.train import nonfinite as nonfinite_values
from telegrad.train.agreement import AgreedStep
from telegrad.train.arguments import check_choice, checked_count, checked_parameters
from telegrad.train.bucket import (
    Bits,
    BucketLayout,
    GradBucket,
    bits_of,
    identity_of,
    layout_of,
    rounded_to_bf16,
    tensor_of,
)

MODES = ("sparse", "dense")
_VERSION = 1


@dataclass(slots=True)
class DDPStats:
    """Sums over all buckets so far, of this rank. Bytes on the wire are in ``Communicator.stats()``."""

    buckets: int = 0
    elements: int = 0  # of all buckets
    dense_elements: int = 0  # reduced densely
    wanted: int = 0  # entries at exactly the density (the sum of k)
    selected: int = 0  # entries that were sent sparsely
    nonfinite_buckets: int = 0  # had NaN or infinity in them here, or made a residual overflow
    skipped_steps: int = 0  # dropped on all ranks (nonfinite="skip")
    hook_s: float = 0.0  # time in the hook on the thread of the backward pass, most of it selection

    @property
    def selected_to_wanted(self) -> float:
        """selected / wanted; 1 for exact top-k."""
        return self.selected / self.wanted if self.wanted else 1.0


class DDPState:
    """What ``ddp_hook`` needs to know and to remember.

    ``comm``: a Communicator of the same ranks as DDP. ``named_parameters``: ``ddp.named_parameters()``; those that do
    not require a gradient are left out. ``mode``: ``"sparse"``, or ``"dense"`` for plain averaging. ``density``: the
    share of each large parameter's entries that is sent. ``selection``: ``"reused"`` or ``"topk"``; ``interval``:
    calls from one exact threshold to the next (reused). ``small_tensor_elements``: parameters of at most that many
    stay dense. ``warmup_steps``: dense steps at first. ``group``: the process group that DDP was given (``None``: the
    whole job), which must have the ranks of ``comm``.

    ``nonfinite``, the same on all ranks, says what happens when a gradient of a rank holds NaN or infinity, or when a
    finite one makes its residual overflow. No residual ever holds such a value.

    - ``"raise"``: NonFiniteGradient on that rank, naming rank, step and parameter, and TransportError with its text
      on the others. The bucket at fault has changed nothing.
    - ``"skip"``: all ranks drop the whole step: all averages are zero, and all of ``state_dict()`` is bitwise as if
      the step had never been. No rank raises. Write ``if not state.skipped: optimizer.step()``: a gradient of zeros
      still moves an optimiser with momentum or weight decay. Costs one sum of a single number per step, and memory
      for a copy of the residuals.
    - ``"send"``: the optimisers of all ranks see it; an overflow arrives as infinity.

    Only what a rank contributes is looked at: finite gradients whose sum over the ranks overflows give infinity.

    A step that fails in another way, such as with a TransportError, leaves residuals that are finite. With
    ``"skip"`` they are as before that step. Otherwise they hold a part of it, and what they gave to the step is lost:
    go on from a ``state_dict()`` that was taken before. DDP reports a failed operation as a RuntimeError with its
    text; the error itself is then in ``failure``.

    Gradients are float32 or bfloat16, on the CPU. Averages are over all ranks. Residuals belong to a rank: save each
    rank's. Raises ``TypeError`` and ``ValueError`` for bad arguments.
    """

    def __init__(
        self,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        mode: str = "sparse",
        density: float = 0.01,
        selection: str = "reused",
        interval: int = 8,
        small_tensor_elements: int = 2048,
        warmup_steps: int = 0,
        nonfinite: str = "raise",
        group: Any = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        check_choice(mode, "mode", MODES)
        check_choice(nonfinite, "nonfinite", nonfinite_values.POLICIES)
        small_tensor_elements = checked_count(small_tensor_elements, "small_tensor_elements")
        warmup_steps = checked_count(warmup_steps, "warmup_steps")
        self._parameters = checked_parameters(named_parameters)  # alive, so that their ids stay theirs
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        large = {
            name: parameter.numel()
            for name, parameter in self._parameters.items()
            if mode == "sparse" and parameter.numel() > small_tensor_elements
        }
        self._compressor = Compressor(large, density=density, selection=selection, interval=interval)
        self._comm = comm
        self._group = group
        self._mode = mode
        self._warmup_steps = warmup_steps
        self._nonfinite = nonfinite
        self._config = {
            "mode": mode,
            "density": self._compressor.residuals.density,
            "selection": selection,
            "interval": int(interval),
            "small_tensor_elements": small_tensor_elements,
            "warmup_steps": warmup_steps,
            "nonfinite": nonfinite,
        }
        self._layouts: dict[int, BucketLayout] = {}
        self._step = 0
        self._agreed: AgreedStep | None = None  # the last step, or the one that is under way
        self._skipped = False
        self.stats = DDPStats()
        self.failure: Exception | None = None

    @property
    def step(self) -> int:
        """Backward passes that were synchronised so far, without those that were dropped."""
        return self._step

    @property
    def skipped(self) -> bool:
        """True if the last synchronised backward pass was dropped on all ranks (``nonfinite="skip"``)."""
        return self._skipped

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that training needs to go on bitwise.

        Residuals (flat float32 tensors), thresholds and calls by parameter, the step, and the options. See the class
        for what it says after a failed step.
        """
        if self._agreed is not None and self._agreed.closed:
            self._agreed.leave()
        state = self._compressor.state_dict()
        for entry in state["parameters"].values():
            entry["residual"] = torch.from_numpy(entry["residual"])
        return {"version": _VERSION, "step": self._step, "config": dict(self._config), "compressor": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict()`` of the same model and rank gave.

        Options stay as they are here; with another density the thresholds are evaluated anew. Raises ``ValueError``
        naming missing, unknown or misshapen parameters; then nothing is changed.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state is a {type(state).__name__}: it must come from DDPState.state_dict()")
        if state.get("version") != _VERSION or "compressor" not in state or "step" not in state:
            raise ValueError(
                f"state has version {state.get('version')!r} and keys {sorted(map(str, state))}: it must come from "
                f"DDPState.state_dict() of version {_VERSION}"
            )
        step = checked_count(state["step"], "state['step']")
        self._leave_step()
        self._compressor.load_state_dict(state["compressor"])
        self._step, self._skipped = step, False

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the sum of one bucket; the future gives its buffer with the average in it."""
        started_s = time.perf_counter()
        try:
            if self._nonfinite == "skip" and (self._agreed is None or self._agreed.closed or bucket.index() == 0):
                self._leave_step()
                self._agreed = AgreedStep(self._compressor, self._settled, self._failed)
            outcome = self._start(bucket)
            if bucket.is_last():
                if self._agreed is not None:
                    self._agreed.close(self._comm)
                else:
                    self._step += 1
        except Exception as error:
            # This rank leaves the step: the others must not wait for it.
            self.failure = error
            self._comm.abort(f"{type(error).__name__}: {error}")
            self._leave_step(error)
            raise
        self.stats.hook_s += time.perf_counter() - started_s
        return outcome

    def _start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self._layouts:
            self._check_ranks()
        buffer = bucket.buffer()
        bits = bits_of(buffer, self._names.get(id(bucket.parameters()[0]), "unknown"))
        layout = self._layout(bucket)
        sparse = bool(layout.parts) and self._step >= self._warmup_steps
        fault = nonfinite_values.find_fault(self._compressor, layout, bits, sparse)
        self.stats.buckets += 1
        self.stats.elements += bits.size
        if fault is not None:
            self.stats.nonfinite_buckets += 1
            if self._nonfinite == "raise":
                raise nonfinite_values.error_of(fault, self._comm.rank, self._step)
        if self._agreed is not None:
            self._agreed.unsound |= fault is not None
            if self._agreed.unsound:
                bits.fill(0)  # the others wait for this bucket; for zeros nothing is compressed
                fault = None
        if not sparse:
            self.stats.dense_elements += bits.size
            return self._future([self._comm.all_reduce(buffer, "avg", async_op=True)], layout, bits, None)
        works: list[Work] = []
        small = None
        if layout.small:
            small = np.concatenate([bits[run] for run in layout.small])
            self.stats.dense_elements += small.size
            works.append(self._comm.all_reduce(tensor_of(small), "avg", async_op=True))
        stream = self._compress(layout, bits, fault is None)
        self.stats.wanted += layout.wanted
        self.stats.selected += stream.nnz
        work = self._comm.all_reduce_into(stream, buffer, "avg", async_op=True)
        assert work is not None
        works.append(work)
        return self._future(works, layout, bits, small)

    def _check_ranks(self) -> None:
        if not torch.distributed.is_initialized():
            return  # no DDP without it: somebody calls the hook by hand
        rank, size = torch.distributed.get_rank(self._group), torch.distributed.get_world_size(self._group)
        if (rank, size) != (self._comm.rank, self._comm.world_size):
            raise ValueError(
                f"comm is rank {self._comm.rank} of {self._comm.world_size}, but this process is rank {rank} of {size} "
                "in DDP's process group: make comm with Communicator.from_torch(group) and give DDPState the same group"
            )

    def _compress(self, layout: BucketLayout, bits: Bits, sound: bool) -> SparseStream:
        if sound:
            indices, values = layout.scratch()
            count = self._compressor.compress(layout.parts, as_float32(bits), indices, values)
            indices, values = indices[:count], values[:count]
        else:
            indices, values = nonfinite_values.compress_around(self._compressor, layout, bits)
        if bits.dtype == np.float32:
            return SparseStream.trusted(indices, values, bits.size, of_torch=True)
        rounded = rounded_to_bf16(values)
        with np.errstate(invalid="ignore"):  # what is infinite is sent so: nothing of it is lost
            lost = np.where(np.isfinite(as_float32(rounded)), values - as_float32(rounded), np.float32(0))
        self._compressor.keep(layout.parts, indices, lost)
        return SparseStream.trusted(indices, rounded, bits.size, of_torch=True)

    def _future(
        self, works: list[Work], layout: BucketLayout, bits: Bits, small: Bits | None
    ) -> torch.futures.Future[torch.Tensor]:
        def finish(dropped: bool = False) -> torch.Tensor:
            if dropped:
                bits.fill(0)
            elif small is not None:  # the sparse sum has written zeros there
                start = 0
                for run in layout.small:
                    size = run.stop - run.start
                    bits[run] = small[start : start + size]
                    start += size
            return tensor_of(bits)

        if self._agreed is not None:
            layout.outcome = self._agreed.outcome(works, finish)
        else:
            layout.outcome = future_of_all(works, finish, self._failed)
        return layout.outcome

    def _leave_step(self, error: Exception | None = None) -> None:
        if self._agreed is not None:
            self._agreed.leave(error)
            self._agreed = None

    def _settled(self, dropped: bool) -> None:
        self._skipped = dropped
        self.stats.skipped_steps += dropped
        self._step += not dropped

    def _failed(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error

    def _layout(self, bucket: GradBucket) -> BucketLayout:
        layout = self._layouts.get(bucket.index())
        if layout is None or layout.identity != identity_of(bucket):
            layout = layout_of(bucket, self._names, self._compressor)
            self._layouts[bucket.index()] = layout
        return layout


def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over all ranks as ``state`` says.

    Register it with ``ddp.register_comm_hook(state, telegrad.ddp_hook)``.
    """
    return state.reduce(bucket)
