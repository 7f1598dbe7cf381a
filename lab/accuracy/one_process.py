"""P ranks played by one process: one model, P gradients, and the real DDPState of each rank over
``Communicator.local``.

All replicas of a data-parallel job hold the same bits, so one of them is enough: its gradients on the ranks' samples
are taken in turn, go through each rank's own residual, selection and wire format, and meet in the collectives of the
library. What comes out is bitwise what a job of P processes with DistributedDataParallel gives, if DDP puts all
gradients into one bucket (``tests/lab/accuracy/test_real_job.py``), in a fraction of the time. Needs torch.

Running statistics of BatchNorm are those of rank 0, as in DDP: it overwrites the other ranks' with them before each
forward pass. A rank normalises by its own batch in training, so no gradient depends on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.ddp import DDPState
from telegrad.errors import NonFiniteGradient

_COUNTS = ("wanted", "selected", "dense_elements", "elements")


class _Bucket:
    """What DDPState asks of DDP's GradBucket."""

    def __init__(self, parameters: list[nn.Parameter], gradients: list[Tensor], buffer: Tensor) -> None:
        self._parameters, self._gradients, self._buffer = parameters, gradients, buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def buffer(self) -> Tensor:
        return self._buffer

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class OneProcess:
    """The ranks; use it in a ``with`` statement.

    ``take(rank)`` keeps the gradients that the model's parameters hold as that rank's; ``average()`` exchanges all of
    them and leaves the average in the parameters' ``grad``. Like DDP it lays the bucket out in the order in which the
    first backward pass makes the gradients, and for that pass in the order of the parameters. ``options`` are those of
    DDPState.
    """

    def __init__(self, model: nn.Module, ranks: int, options: Mapping[str, Any]) -> None:
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._order = list(self._parameters)
        self._arrived: list[str] = []
        self._listeners = [
            one.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: self._arrive(name)
            )
            for name, one in self._parameters.items()
        ]
        self._elements = sum(one.numel() for one in self._parameters.values())
        self._buffers = [torch.empty(self._elements) for _ in range(ranks)]
        self._lay_out()
        self.comms = Communicator.local(ranks)
        self._threads = ThreadPoolExecutor(ranks)  # LowRank waits within reduce() for all ranks
        self.states = [DDPState(comm, model, **options) for comm in self.comms]
        self._before: dict[str, Any] = {"sent_bytes": [0] * ranks, **dict.fromkeys(_COUNTS, 0)}  # of a killed job
        self._statistics = list(model.buffers())
        self._of_first: list[Tensor] = []  # rank 0's
        self._compressed = [self._parameters[name] for name in self.states[0].state_dict()["compressor"]["parameters"]]
        self.compressed_elements = sum(one.numel() for one in self._compressed)
        self.reduced_density = 1.0
        """What share of the compressed entries the last average has; 1 where nothing is compressed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown()
        for comm in self.comms:
            comm.close()

    def take(self, rank: int) -> None:
        """Keeps the gradients as ``rank``'s, and the model's buffers if it is rank 0. A parameter without one took no
        part: zeros, as in DDP."""
        if rank == 0:
            self._of_first = [one.clone() for one in self._statistics]
        for parameter, place in zip(self._in_order, self._places[rank], strict=True):
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad)

    def average(self) -> None:
        """One step's exchange. Raises what DDPState raises, and ``RuntimeError`` if the ranks disagree by a bit."""
        given = zip(self.states, self._places, self._buffers, strict=True)
        futures = [self._threads.submit(self._average_of, *one) for one in given]
        wait(futures)
        for cause in (NonFiniteGradient, Exception):  # of which other ranks' errors tell
            if errors := [error for one in futures if isinstance(error := one.exception(), cause)]:
                raise errors[0]
        averages = [one.result() for one in futures]
        for rank, average in enumerate(averages):
            if not torch.equal(average.view(torch.int32), averages[0].view(torch.int32)):
                raise RuntimeError(f"ranks 0 and {rank} hold different averages: a fault of the library, report it")
        for parameter, gradient in zip(self._in_order, self._places[0], strict=True):  # the averages are in place
            parameter.grad = gradient.to(parameter.device)
        for statistic, first in zip(self._statistics, self._of_first, strict=True):
            statistic.copy_(first)
        if self._compressed:
            filled = sum(int(torch.count_nonzero(one.grad)) for one in self._compressed if one.grad is not None)
            self.reduced_density = filled / self.compressed_elements
        if self._arrived:
            self._order = [*self._arrived, *(name for name in self._order if name not in self._arrived)]
            self._stop_listening()

    def _average_of(self, state: DDPState, places: list[Tensor], buffer: Tensor) -> Tensor:
        average: Tensor = state.reduce(_Bucket(self._in_order, places, buffer)).wait()  # type: ignore[arg-type]
        return average

    def sent_bytes(self) -> list[int]:
        """Payload bytes that each rank has sent since the start."""
        now = [int(comm.stats()["bytes_sent"]) for comm in self.comms]
        return [before + sent for before, sent in zip(self._before["sent_bytes"], now, strict=True)]

    def selected(self) -> float:
        """Entries sent by all ranks since the start, as a multiple of those that the density asks for."""
        wanted = self._count("wanted")
        return self._count("selected") / wanted if wanted else 1.0

    def travelled(self) -> tuple[int, int]:
        """Entries that all ranks have sent since the start, dense ones too, and how many gradients had."""
        return self._count("selected") + self._count("dense_elements"), self._count("elements")

    def state_dict(self) -> dict[str, Any]:
        return {
            "ranks": [state.state_dict() for state in self.states],
            "order": list(self._order),
            "sent_bytes": self.sent_bytes(),
            **{name: self._count(name) for name in _COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict()`` of as many ranks; to be called before the first step."""
        for own, saved in zip(self.states, state["ranks"], strict=True):
            own.load_state_dict(saved)
        self._order = list(state["order"])
        self._before = {name: state[name] for name in self._before}
        self._stop_listening()

    def _count(self, name: str) -> int:
        return sum((int(getattr(state.stats, name)) for state in self.states), int(self._before[name]))

    def _arrive(self, name: str) -> None:
        if name not in self._arrived:
            self._arrived.append(name)

    def _stop_listening(self) -> None:
        self._arrived = []
        for listener in self._listeners:
            listener.remove()
        self._lay_out()

    def _lay_out(self) -> None:
        self._in_order = [self._parameters[name] for name in self._order]
        sizes = [parameter.numel() for parameter in self._in_order]
        self._places = [
            [piece.view(one.shape) for piece, one in zip(torch.split(buffer, sizes), self._in_order, strict=True)]
            for buffer in self._buffers
        ]


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of their bits, by which the parameters of two models are told apart."""
    found = 0
    for one in tensors:
        found = zlib.crc32(np.ascontiguousarray(one.detach().cpu().numpy()).data.cast("B"), found)
    return found
