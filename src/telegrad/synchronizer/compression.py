"""What a Synchronizer compresses, and what waits: the options that it shares with DDPState, and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from telegrad.communicator import Communicator
from telegrad.communicator.operands import on_device
from telegrad.ddp.arguments import check_choice, encoding_of_wire
from telegrad.ddp.bucket import COMPRESSIBLE, Bits, BucketLayout, check_dtype
from telegrad.ddp.exchange import REMEDY_WITHOUT_SKIP, Exchange, Sending, correct_around, error_of, find_fault
from telegrad.ddp.pass_use import Revertible, use_of
from telegrad.ddp.rank_state import MemoryOrder, MemoryOrders, checked_step, state_of
from telegrad.ddp.settings import (
    SPARSE_DEFAULTS,
    SparseOptions,
    compressed_by,
    compressor_of,
    correct_momentum,
    policy_of,
    warm_up_of,
)
from telegrad.ddp.telemetry import DDPStats
from telegrad.ddp.units import Units, check_moves_by_rates

KINDS = ("topk", "quantised", "auto")
QUANTISED = ("bf16", "int8", "qsgd8", "qsgd4")
"""Wires of dense sums whose rounding errors error feedback bears, and in which no finite float32 overflows."""
NONFINITE = ("raise", "send")


class CompressionOptions(SparseOptions, total=False):
    """As for DDPState; ``compression_warmup_steps`` and ``compression_warmup`` are its ``warmup_steps`` and
    ``warmup``, ``nonfinite`` is ``"raise"`` or ``"send"``. ``quantised``: wires in which all values of a group may go,
    of ``QUANTISED``; what rounding loses waits. One name or several, none with ``compression="topk"``."""

    quantised: str | Sequence[str]
    compression_warmup_steps: int
    compression_warmup: str
    optimizer: torch.optim.Optimizer | None
    momentum: float
    nesterov: bool
    masking: bool
    nonfinite: str


_DEFAULTS: CompressionOptions = {
    **SPARSE_DEFAULTS,
    "quantised": (),
    "compression_warmup_steps": 0,
    "compression_warmup": "dense",
    "optimizer": None,
    "momentum": 0.0,
    "nesterov": False,
    "masking": True,
    "nonfinite": "raise",
}

_OF_ENTRIES = {
    *("density", "selection", "interval", "large_tensor_elements", "large_selection", "same_sign", "output", "wire"),
    *("collective", "compression_warmup"),
}


def check_options(options: Mapping[str, Any], compression: str | None) -> None:
    """Raises ``TypeError`` for an option that does not exist, ``ValueError`` for one that is not used."""
    for name, value in options.items():
        if name not in _DEFAULTS:
            raise TypeError(f"Synchronizer has no argument {name!r}: its options are those of CompressionOptions")
        if compression is None:
            kinds = "'quantised' or 'auto'" if name == "quantised" else "'topk' or 'auto'"
            raise ValueError(f"{name}={value!r} is an option of compression: give compression={kinds} too")
        if compression == "quantised" and name in _OF_ENTRIES and value != _DEFAULTS[name]:  # type: ignore[literal-required]
            raise ValueError(
                f"{name}={value!r} is not used with compression='quantised', which sends all values in its own wire: "
                "leave it out, or use 'topk' or 'auto'"
            )


class Compression:
    """``kind``: ``"topk"``, all of the parameters that the policy does not leave dense are sent sparsely;
    ``"quantised"``: all of their values in a wire of ``quantised``; ``"auto"``: what the plan finds cheapest.
    ``parameters``: by name; those that are not float32 or bfloat16 go densely. ``options``: see ``CompressionOptions``.
    ``comm``: where sums are made, until ``move_to`` names another one.

    Raises ``TypeError`` and ``ValueError`` for bad arguments.
    """

    def __init__(
        self, kind: str, comm: Communicator, parameters: Mapping[str, nn.Parameter], options: CompressionOptions
    ) -> None:
        check_choice(kind, "compression", KINDS)
        given: CompressionOptions = {**_DEFAULTS, **options}
        check_choice(given["nonfinite"], "nonfinite", NONFINITE)
        for name, one in parameters.items():
            check_dtype(one.dtype, name, on_device=on_device(one))
        self.kind = kind
        self.names = {id(one): name for name, one in parameters.items()}
        self._parameters, self._orders = parameters, MemoryOrders(parameters)
        self._warm_up = warm_up_of(
            given["compression_warmup_steps"], given["compression_warmup"], prefix="compression_"
        )
        policy = policy_of(
            given["policy"],
            density=given["density"],
            selection=given["selection"],
            interval=given["interval"],
            small_tensor_elements=given["small_tensor_elements"],
            large_tensor_elements=given["large_tensor_elements"],
            large_selection=given["large_selection"],
            same_sign=given["same_sign"],
        )
        feedback, optimizer = given["feedback"], given["optimizer"]
        density = given["density"]
        self.compressor = compressor_of(parameters, policy, given["output"], feedback=feedback, density=density)
        correct_momentum(
            self.compressor,
            parameters,
            optimizer,
            momentum=given["momentum"],
            nesterov=given["nesterov"],
            masking=given["masking"],
        )
        if feedback == "steps":
            check_moves_by_rates(optimizer)
        self._units = Units(parameters, optimizer, None)
        self._units.rates_of(self.compressor)  # an optimizer of other parameters is refused now
        self.stats = DDPStats()
        self.wire, self.collective = given["wire"], given["collective"]
        self.quantised = _checked_wires(given["quantised"], kind, parameters)
        self.encoding = encoding_of_wire(self.wire, parameters)
        self._nonfinite = given["nonfinite"]
        self.step = 0
        kept = [name for name in _DEFAULTS if name not in ("policy", "output", "optimizer")]
        self._config = {"compression": kind, **{name: _plain(given[name]) for name in kept}}  # type: ignore[literal-required]
        self._entries = {one.name: one.k for one in self.compressor.residuals}
        self._optimizer = optimizer
        self.move_to(comm)

    def move_to(self, comm: Communicator) -> None:
        """Sums are made there from now on."""
        self._comm = comm
        self._exchange = Exchange(comm, self.compressor, self.wire, self.encoding, self.collective, self.stats)
        memory, keeps_all = self._memory, self._exchange.topk_states is None
        self._use = use_of(self._parameters, self.compressor, memory, self.stats, self._optimizer, keeps_all=keeps_all)

    @property
    def _memory(self) -> Revertible:
        """What remembers the gradients of passes."""
        return self.compressor

    @property
    def ways(self) -> tuple[str, ...]:
        """In which a group may go: ``"dense"``, ``"sparse"``, or a wire."""
        if not len(self.compressor.residuals):
            return ("dense",)
        return {"topk": ("sparse",), "quantised": self.quantised, "auto": ("dense", "sparse", *self.quantised)}[
            self.kind
        ]

    @property
    def density(self) -> float:
        """Of all parameters that may be sent sparsely together, without the warm-up; 0 where there are none."""
        elements = sum(one.values.size for one in self.compressor.residuals)
        return sum(self._entries.values()) / elements if elements else 0.0

    def compresses(self, name: str) -> bool:
        """Whether this parameter may be sent sparsely."""
        return name in self.compressor.residuals

    def check_order(self, parameter: nn.Parameter) -> None:
        """Raises ``RuntimeError`` where the elements of one that is compressed lie in another order than at first, in
        which its residual is."""
        name = self.names[id(parameter)]
        if self.compresses(name) and not self._orders.has(name, MemoryOrder.of_gradient(parameter)):
            raise RuntimeError(
                f"parameter {name!r} has another memory format than it had, and what waits for it is in that order: "
                "after such a change call load_state_dict(state_dict()) of the Synchronizer"
            )

    def description(self) -> dict[str, str]:
        """What all ranks must have alike."""
        chosen = str(compressed_by(self.compressor))
        return {**{name: str(value) for name, value in self._config.items()}, "what is compressed": chosen}

    def open_pass(self) -> None:
        """A backward pass begins. Raises ``ValueError`` as ``Units.rates_of``."""
        self._use.open()
        self.compressor.set_units(1.0, self._units.rates_of(self.compressor))
        self.compressor.residuals.raise_density(self._warm_up.least_density(self.step))

    def close_pass(self) -> None:
        """All averages of the pass are there."""
        self.step += 1
        self._use.close()

    def decide(self) -> None:
        """Gradients that were cleared without a step leave nothing behind."""
        self._use.decide()

    def start(self, layout: BucketLayout, bits: Bits, *, way: str) -> Sending:
        """Begins to average a group's memory: ``"sparse"``, its parts compressed; ``"dense"``, all of it, with what
        waits; or so with its parts in that wire.

        Raises ``NonFiniteGradient`` if that is the policy, and ends the communicator, so that no rank waits for this.
        """
        compresses = bool(layout.parts) and not self._warm_up.is_dense(self.step)
        sparse, quantised = compresses and way == "sparse", compresses and way in QUANTISED
        fault = find_fault(self.compressor, layout, bits, bool(layout.parts))
        self.stats.buckets += 1
        self.stats.elements += sum(one.size for one in layout.members)
        if fault is not None:
            self.stats.nonfinite_buckets += 1
            if self._nonfinite == "raise":
                remedy = REMEDY_WITHOUT_SKIP
                error = error_of(fault, self._comm.rank, self.step, remedy=remedy)
                self._comm.abort(f"{type(error).__name__}: {error}")
                raise error
        dense = layout.dense if sparse else layout.members
        correct_around(self.compressor, bits, dense)
        self.stats.dense_elements += sum(one.size for one in (layout.dense if quantised else dense))
        if quantised:
            return self._exchange.send_quantised(layout, bits, way)
        if not sparse:
            return self._exchange.send_with_what_waits(layout, bits)
        sending = self._exchange.send(layout, bits, sound=fault is None)
        self.stats.wanted += layout.wanted
        self.stats.selected += sending.nnz
        return sending

    def state_dict(self) -> dict[str, Any]:
        """See ``Synchronizer.state_dict``."""
        self.decide()
        sums = self._exchange.topk_states
        state = state_of(self._comm, self.step, self._config, self.compressor, self._orders)
        return {**state, "sums": () if sums is None else sums.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Synchronizer.load_state_dict``."""
        step = checked_step(state, self._comm, "Synchronizer")
        sums = self._exchange.topk_states
        fitting = {} if sums is None else sums.fitting(state.get("sums", ()))
        orders = MemoryOrders(self._parameters)  # as they are now
        compressor = orders.from_rows(state["compressor"])
        self.compressor.load_state_dict(compressor, least_density=self._warm_up.least_density(step))
        if sums is not None:
            sums.load(fitting)
        self._orders, self.step = orders, step


def _checked_wires(given: str | Sequence[str], kind: str, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Raises ``TypeError`` and ``ValueError`` for what is no wire of dense sums, or does not go with the rest."""
    wires = (given,) if isinstance(given, str) else tuple(given)
    for one in wires:
        check_choice(one, "quantised", QUANTISED)
    if len({*wires}) < len(wires):
        raise ValueError(f"quantised={given!r} names a wire twice")
    if kind == "topk" and wires:
        raise ValueError(f"quantised={given!r} is not used with compression='topk': give 'quantised' or 'auto'")
    if kind == "quantised" and not wires:
        raise ValueError(f"compression='quantised' needs quantised=, one or more of {', '.join(QUANTISED)}")
    for name, parameter in parameters.items():
        if wires and parameter.dtype in COMPRESSIBLE and parameter.dtype != torch.float32:
            raise TypeError(f"quantised={given!r} is for float32 gradients, and that of {name!r} is {parameter.dtype}")
    return wires


def _plain(value: object) -> object:
    """What a checkpoint may hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
