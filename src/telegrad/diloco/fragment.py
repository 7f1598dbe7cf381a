"""Fragments: the layers of a replica that are exchanged together, and their exchange while it is in flight."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telegrad.communicator import Communicator, Work
from telegrad.communicator.cuda.runtime import DeviceRuntime, has_runtime, runtime_of
from telegrad.compress import Compressor
from telegrad.compress.arguments import check_gain, checked_count, checked_whole
from telegrad.ddp.bucket import ParameterSpan, layout_of_members
from telegrad.ddp.exchange import Exchange, Fault, Floats, PlacedState, Sending, TopkStates, find_fault
from telegrad.ddp.telemetry import StepRecord
from telegrad.kernels.floats import count_nonfinite


def layer_of(name: str) -> str:
    """The layer of a parameter or buffer: its name up to the first number, as ``blocks.3`` of ``blocks.3.mlp.weight``;
    without a number the module that has it."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def layers_of(names: Iterable[str]) -> dict[str, int]:
    """The layers of these parameters, numbered in their order."""
    return {layer: number for number, layer in enumerate(dict.fromkeys(map(layer_of, names)))}


@dataclass(frozen=True, slots=True)
class Streaming:
    """Exchanges layers in turn, so that fewer bytes travel at once, and trains on meanwhile. For ``telegrad.DiLoCo``.

    ``fragments``: the layers are dealt out to so many, which are exchanged one after another within ``every`` steps;
    each exchange is a round. ``None``: fragments of about three layers each. ``delay``: inner steps, less than
    ``every``, until an average is applied, also while a GPU's parameters are copied to the host; 0: training waits.
    ``mix``, in [0, 1]: the share of its own parameters that a replica keeps then; 0: it goes on with the common ones.
    Raises ``TypeError`` and ``ValueError``. Source: arXiv 2501.18512, the defaults too."""

    fragments: int | None = None
    _: KW_ONLY
    delay: int = 1
    mix: float = 0.5

    def __post_init__(self) -> None:
        if self.fragments is not None:
            checked_whole(self.fragments, "fragments", 1, None, "so many are made of the layers")
        checked_count(self.delay, "delay")
        check_gain(self.mix, "mix", "the share of its own parameters that a replica keeps")
        object.__setattr__(self, "mix", float(self.mix))

    def fitting(self, every: int, layers: Collection[str]) -> Streaming:
        """With a number of fragments. Raises ``ValueError`` where it fits no round of so many steps, or these
        layers."""
        made = self
        if self.fragments is None:
            made = replace(self, fragments=max(1, min(math.ceil(len(layers) / 3), every)))
        assert made.fragments is not None
        if made.fragments > len(layers):
            raise ValueError(
                f"fragments={made.fragments} of {len(layers)} layers ({', '.join(layers):.80}): give at most one for "
                "each layer"
            )
        if made.fragments > every or self.delay >= every:
            raise ValueError(
                f"fragments={made.fragments}, delay={self.delay} do not fit every={every}: fragments take turns, and a "
                "fragment's average is applied before its next exchange"
            )
        return made


def crc_of(tensors: Iterable[Tensor], found: int = 0) -> int:
    """CRC-32 of the bytes of tensors in host memory, after ``found``."""
    for one in tensors:
        found = zlib.crc32(one.detach().contiguous().numpy().data.cast("B"), found)
    return found


_copying: weakref.WeakKeyDictionary[Any, dict[torch.device, Any]] = weakref.WeakKeyDictionary()
"""Of a runtime, and a device: the stream that copies from it."""


def local_of(one: Tensor) -> Tensor:
    """What this rank holds of a parameter: its own shard of one that ``fully_shard`` has sharded."""
    return one.to_local() if isinstance(one, DTensor) else one


class Reading:
    """Tensors as they are when their device's stream comes to here. Copies to the host have a stream of their own, and
    the device overwrites nothing before."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._events: list[tuple[Any, Any]] = []
        given = [one.detach() for one in tensors]
        for device in {one.device for one in given}:
            if (runtime := _runtime_of(device)) is None:
                continue
            current, streams = runtime.current_stream(device), _copying.setdefault(runtime, {})
            if (copying := streams.get(device)) is None:
                copying = streams[device] = runtime.new_stream(device)
            own = {place: one.contiguous() for place, one in enumerate(given) if one.device == device}
            runtime.wait_event(copying, runtime.record(current))
            for place, one in own.items():
                given[place] = _pinned_like(one, runtime)
                if one.numel():
                    runtime.copy(copying, given[place], one)
            self._events.append((runtime, event := runtime.record(copying)))
            runtime.wait_event(current, event)
        self._values = [one.cpu() for one in given]

    def is_over(self) -> bool:
        """Whether ``values()`` would not wait."""
        return all(runtime.passed(event) for runtime, event in self._events)

    def values(self) -> list[Tensor]:
        """In host memory; those of the host themselves."""
        for runtime, event in self._events:
            runtime.wait_on_host(event)
        return self._values


def on_host(one: Tensor) -> Tensor:
    """Its values, for which this waits; one in host memory itself."""
    return Reading([one]).values()[0]


def on_device_of(own: Tensor, values: Tensor) -> Tensor:
    """``values`` of host memory where ``own`` is, once its stream comes to here."""
    if (runtime := _runtime_of(own.device)) is None:
        return values.to(own.device)
    made = torch.empty_like(own, dtype=values.dtype).contiguous()
    if values.numel():
        runtime.copy(runtime.current_stream(own.device), made, _pinned_like(values, runtime).copy_(values))
    return made


def _runtime_of(device: torch.device) -> DeviceRuntime | None:
    """``None``: torch itself copies, and the host waits, as for ROCm."""
    if has_runtime(device.type):
        with contextlib.suppress(ImportError, TypeError):
            return runtime_of(device.type)
    return None


def _pinned_like(one: Tensor, runtime: Any) -> Tensor:
    if not one.numel():
        return torch.empty(one.shape, dtype=one.dtype)
    held: Tensor = runtime.pinned(one.numel() * one.element_size()).view(one.dtype).view(one.shape)
    return held


@dataclass(slots=True)
class Flight:
    """An exchange that was started. ``left``: inner steps until the average is applied."""

    left: int
    sending: Sending | None  # None: the average is there
    buffers: Tensor | None  # their average
    work: Work | None = None  # of the buffers
    record: StepRecord | None = None
    own: Floats | None = None  # the replica's move, where it is recorded
    began_s: float = field(default_factory=time.monotonic)


class Fragment:
    """Some of a replica's parameters, and the exchange of how far they have moved.

    ``offset``: the inner step of a round after which it is exchanged. ``common``: the parameters that all replicas
    have alike; ``own``: those of this replica. ``buffers`` returns its floating-point buffers. ``selects``: residuals
    keep what is not sent, of entries or of all values in the format ``wire``.
    """

    def __init__(
        self,
        offset: int,
        common: Mapping[str, nn.Parameter],
        own: Mapping[str, nn.Parameter],
        buffers: Callable[[], Mapping[str, Tensor]],
        compressor: Compressor,
        *,
        selects: bool,
        wire: str | None,
        decay: float,
    ) -> None:
        self.offset, self.common = offset, common
        self._own, self._buffers = own, buffers
        self._compressor, self._selects, self._wire, self._decay = compressor, selects, wire, decay
        self._spans, end = [], 0
        for name, one in common.items():
            self._spans.append(ParameterSpan(name, end, one.numel()))
            end += one.numel()
        self._moved = np.zeros(end, np.float32)
        self._layout = layout_of_members(self._spans, end, compressor)
        self._exchange: Exchange | None = None
        self._reading, self._seen = Reading(()), list[Tensor]()  # of the buffers
        self.has_moved = False  # since the replica took the common parameters over
        self.flight: Flight | None = None

    def connect(self, comm: Communicator, exchange: Exchange) -> None:
        """Exchanges by these from now on."""
        self._comm, self._exchange, self._layout.topk = comm, exchange, None

    @property
    def sums(self) -> TopkStates | None:
        """What sums that keep a part leave to the next one."""
        return self._exchange.topk_states if self._exchange else None

    def state_dict(self) -> dict[str, Any]:
        """A copy, with the average of what is in flight and over."""
        flight = self.flight
        average = {name: self._moved[offset : offset + size].copy() for name, offset, size in self._spans if flight}
        return {
            "has_moved": self.has_moved,
            "left": None if flight is None else flight.left,
            "average": {name: torch.from_numpy(one) for name, one in average.items()},
            "buffers": None if flight is None or flight.buffers is None else flight.buffers.clone(),
        }

    def fits(self, state: Mapping[str, Any], delay: int) -> bool:
        """Whether ``state`` is of such a fragment."""
        if state["left"] is None:
            return True
        sizes = {name: one.numel() for name, one in state["average"].items()}
        return state["left"] <= delay and sizes == {name: size for name, _, size in self._spans}

    def load_state_dict(self, state: Mapping[str, Any], sums: Mapping[frozenset[str], PlacedState]) -> None:
        """Takes over what ``fits``, and of ``sums`` its own. What was in flight, and has come, is lost."""
        self.flight, self.has_moved, self._layout.topk = None, state["has_moved"], None
        if self.sums is not None:
            self.sums.load({names: held for names, held in sums.items() if names <= self.common.keys()})
        if state["left"] is not None:
            for name, offset, size in self._spans:
                self._moved[offset : offset + size] = state["average"][name].numpy()
            self.flight = Flight(state["left"], None, None if state["buffers"] is None else state["buffers"].clone())

    @torch.no_grad()
    def look(self) -> None:
        """The replica is exchanged as it is now, or as its device has it when its stream comes to here."""
        self._reading = Reading([*(local_of(self._own[name]) for name in self.common), *self._buffers().values()])

    def is_seen(self) -> bool:
        """Whether ``find_fault`` need not wait for a device."""
        return self._reading.is_over()

    @torch.no_grad()
    def find_fault(self) -> Fault | None:
        """How far the parameters have moved, before anything is sent or changed. ``start`` or ``look`` follows."""
        found = iter(self._reading.values())
        for (name, offset, size), own in zip(self._spans, found, strict=False):
            moved = torch.from_numpy(self._moved[offset : offset + size]).view_as(self.common[name])
            moved.copy_(own)
            begun = self.common[name].to(own.dtype)  # rounded: what bfloat16 has no bits for is no move of the replica
            torch.sub(begun, moved, out=moved)
            if count := count_nonfinite(self._moved[offset : offset + size]):
                return Fault(name, f"{count} of {size} entries of {name!r} have become NaN or infinite in training")
        self._reading, self._seen = Reading(()), [*found]
        for name, one in zip(self._buffers(), self._seen, strict=True):
            if count := int(torch.isnan(one).sum()):
                return Fault(
                    name, f"{count} of {one.numel()} values of the buffer {name!r} have become NaN in training"
                )
        return find_fault(self._compressor, self._layout, self._moved, self._selects)

    def start(self, left: int, record: StepRecord | None = None) -> None:
        """Sends what ``find_fault`` has seen, without waiting. ``record`` is filled in."""
        exchange, began_s = self._exchange, time.monotonic()
        assert exchange is not None
        own = None if record is None else self._moved.copy()
        if record is not None:
            self._compressor.observer = record.tensors.append
            record.add(self._moved, self._layout.dense if self._selects else self._layout.members)
        for one in exchange.undoable:
            one.begin()
        try:
            if not self._spans:
                sending = Sending([])
            elif not self._selects:
                sending = exchange.send_densely(self._moved)
            else:
                self._decay_residuals()
                if self._wire is None or not self._layout.parts:
                    sending = exchange.send(self._layout, self._moved, sound=True)
                else:
                    sending = exchange.send_quantised(self._layout, self._moved, self._wire)
            flat, self._seen = _exactly_summed(self._seen), []
            work = None if flat is None else self._comm.all_reduce(flat, "avg", async_op=True)
        except BaseException:
            self.drop()
            raise
        finally:
            self._compressor.observer = None
        self.flight = Flight(left, sending, flat, work, record, own, began_s)

    def complete(self) -> None:
        """Waits until the average is there; ``keep`` or ``drop`` follows. Where that fails, it is dropped."""
        flight = self.flight
        assert flight is not None
        if flight.sending is None:
            return
        waits_s = time.monotonic()
        try:
            for work in (*flight.sending.works, *((flight.work,) if flight.work else ())):
                work.wait()
            flight.sending.write()
            flight.sending.keep()
        except BaseException:
            self.drop()
            raise
        flight.sending = flight.work = None
        if flight.record is not None and flight.own is not None:
            norms = {"move": flight.own, "average": self._moved, "drift": flight.own - self._moved}
            flight.record.round = {name: float(np.linalg.norm(one)) for name, one in norms.items()}
            now_s = time.monotonic()
            flight.record.round |= {"seconds": now_s - flight.began_s, "waited": now_s - waits_s}
        if flight.buffers is not None:
            upper, lower = flight.buffers[0], flight.buffers[-1]
            flight.buffers = upper if len(flight.buffers) == 1 else torch.where(lower == 0, upper, upper + lower)

    def keep(self) -> None:
        """What was sent has left the residuals."""
        self._compressor.confirm(self._names)
        for one in self._exchange.undoable if self._exchange else ():
            one.keep_step()

    def drop(self) -> None:
        """Residuals are as before ``start``, and nothing is in flight."""
        self.flight = None
        self._compressor.revert(self._names)
        for one in self._exchange.undoable if self._exchange else ():
            one.drop_step()

    def apply(self, outer: torch.optim.Optimizer) -> None:
        """Moves the common parameters by the average."""
        for name, offset, size in self._spans:
            self.common[name].grad = torch.from_numpy(self._moved[offset : offset + size]).view_as(self.common[name])
        try:
            outer.step()  # parameters without a gradient, those of other fragments, keep their momentum
        finally:
            for one in self.common.values():
                one.grad = None

    @torch.no_grad()
    def take_over(self, mix: float) -> None:
        """The replica goes on with the common parameters, and with ``mix`` of its own."""
        flight, self.flight = self.flight, None
        pairs: list[tuple[Tensor, Tensor]] = [(local_of(self._own[name]), one) for name, one in self.common.items()]
        if flight is not None and flight.buffers is not None:
            found = self._buffers().values()
            pairs += zip(found, torch.split(flight.buffers, [one.numel() for one in found]), strict=True)
        for own, common in pairs:
            common = on_device_of(own, common.view(own.shape))
            if mix:
                mixed = common.lerp(own.detach().to(common.dtype), mix)
                stays = mixed.isnan() | (mixed == common)  # of two infinities, as in a mask, or two zeros
                common = torch.where(stays, common, mixed)
            own.copy_(common)
        self.has_moved = mix > 0

    def checksum(self, *, with_average: bool = False) -> int:
        """CRC-32 of the common parameters' bytes, and of the average that has come."""
        return crc_of(self.common.values(), zlib.crc32(self._moved.data.cast("B")) if with_average else 0)

    def residual_norm(self) -> float:
        return math.hypot(*(float(np.linalg.norm(part.entry.values)) for part in self._layout.parts))

    @property
    def _names(self) -> list[str]:
        return [*self.common]

    def _decay_residuals(self) -> None:
        if self._decay == 1:
            return
        for entry in (part.entry for part in self._layout.parts):
            self._compressor.residuals.about_to_change(entry)
            entry.values *= np.float32(self._decay)
            entry.peak *= self._decay


def _exactly_summed(buffers: Collection[Tensor]) -> Tensor | None:
    """Rows whose sum over the rows they are. In float64 a sum of equal float32 values, and so their average, is exact;
    a float64 value is divided into two with few bits each."""
    if not buffers:
        return None
    flat = torch.cat([one.double().reshape(-1) for one in buffers])
    if all(one.dtype != torch.float64 for one in buffers):
        return flat[None]
    upper = (flat.view(torch.int64) & -(1 << 27)).view(torch.float64)
    return torch.stack([upper, torch.where(flat.isfinite(), flat - upper, 0.0)])
