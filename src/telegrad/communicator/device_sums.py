"""The choice between two ways of a dense sum of device tensors, and the one that is not the engine's: by NCCL."""

from __future__ import annotations

from functools import partial
from typing import Any

from telegrad import _core
from telegrad.communicator.cuda.nccl import NcclSums, Verdict
from telegrad.communicator.cuda.runtime import Stream, resolved_device, runtime_of
from telegrad.communicator.cuda.transfers import DeviceWork, flat
from telegrad.communicator.member import Member
from telegrad.communicator.texts import all_gather_text
from telegrad.cost import Tuning
from telegrad.cost.tuning import DEVICE_ALGORITHMS, HOST_TRANSFER, NCCL
from telegrad.cost.way import GroupCost

_SUMS = (_core.Reduction.sum, _core.Reduction.avg)


class DeviceSums(Member):
    """What a Communicator does of them."""

    _tuning: Tuning | None
    _nccl: NcclSums | None = None

    def device_algorithms(self, device: Any) -> tuple[str, ...]:
        """Those of ``"nccl"`` and ``"host_transfer"`` by which dense sums on ``device``, a ``torch.device`` of this
        rank's or its name, can go: the same on all ranks, which all call this; the first time for a device the host
        waits for them. Raises ``ValueError`` on all ranks where their ``device_algorithm`` differs or cannot be, and,
        with ``TypeError``, for a ``device`` that is none or is not there."""
        device = resolved_device(device)  # what can be wrong with it is found before other ranks wait for this one
        if self._nccl is None or self._verdict_on(device).refusal:
            return (HOST_TRANSFER,)
        return DEVICE_ALGORITHMS

    def sum_cost(self, device: Any) -> GroupCost | None:
        """Seconds by bytes of a dense sum on ``device``, a ``torch.device`` of this rank's, the way that it goes there,
        as calibration has measured it on such devices; ``None`` where it has not. The same on all ranks, which all call
        this; the host waits for them, and errors are those of ``device_algorithms``."""
        device = resolved_device(device)
        by_nccl = NCCL in self.device_algorithms(device)
        kinds = {*all_gather_text(self, runtime_of(device.type).identity(device)[0])}  # type: ignore[arg-type]
        measured = None if self._tuning is None else self._tuning.on_device
        if measured is None or kinds != {measured.device}:
            return None
        if not by_nccl:
            return measured.host_transfer
        assert self._nccl is not None
        return measured.nccl if self._nccl.always or measured.nccl is None else measured

    def _goes_by_nccl(self, x: Any, reduction: _core.Reduction, algorithm: str) -> bool:
        """The same on all ranks, which call this for the same sum; the first time for a device the host waits for all.
        Raises ``ValueError`` where ``algorithm`` demands what cannot be."""
        if algorithm not in ("auto", NCCL):
            return False
        if reduction not in _SUMS:
            if algorithm == NCCL:
                raise ValueError("algorithm='nccl' sums and averages: use 'auto' for other reductions")
            return False
        if self._nccl is None:
            if algorithm == NCCL:
                raise ValueError(
                    "algorithm='nccl' is not there: make the communicator with from_torch() of a group whose CUDA "
                    "tensors go by NCCL, and device_algorithm='auto'; or use 'auto'"
                )
            return False
        if not x.numel():
            return False
        verdict = self._verdict_on(x.device)
        if verdict.refusal:
            if algorithm == NCCL:
                raise ValueError(f"algorithm='nccl' cannot be: {verdict.refusal}")
            return False
        return algorithm == NCCL or self._nccl.chosen(x.nbytes, verdict, self._tuning) == NCCL

    def _verdict_on(self, device: Any) -> Verdict:
        assert self._nccl is not None
        gather = partial(all_gather_text, self)  # type: ignore[arg-type]
        return self._nccl.verdict_on(device, runtime_of(device.type), gather)

    def _sum_by_nccl(
        self, x: Any, target: Any, dtype: _core.DType, reduction: _core.Reduction, async_op: bool
    ) -> DeviceWork | None:
        """As ``all_reduce``. An average is the sum, divided: what NCCL calls one multiplies before it adds. The engine
        hears of the call, so that it can say who has called something else, or has left."""
        sums, core = self._nccl, self._usable()
        assert sums is not None
        averages = reduction == _core.Reduction.avg
        transfers = self._transfers_of("all_reduce", (x, target))
        runtime = runtime_of(x.device.type)
        own, into = flat(x), flat(target)

        def begin(stream: Stream) -> Any:
            if target is not x:
                runtime.launch(stream, _copy, into, own)
            return sums.group.begin_sum(into)

        def finish(stream: Stream) -> None:
            if averages:
                runtime.launch(stream, _average_of(self.world_size), into)

        if averages:
            sums.load_kernels(into, runtime)
        return transfers.run_in_group(
            "all_reduce",
            x.device,
            lambda: core.announce_all_reduce(into.numel(), dtype, reduction),
            begin,
            finish,
            (x, target),
            self.abort,
            result=target,
            async_op=async_op,
        )


def _copy(into: Any, own: Any) -> None:
    into.copy_(own)


def _average_of(ranks: int) -> Any:
    def divide(sums: Any) -> None:
        sums.mul_(1.0 / ranks)  # as the engine does it, so that the averages of equal sums have equal bits

    return divide
