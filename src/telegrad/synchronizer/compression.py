"""What a Synchronizer compresses and what waits, with the options that it shares with DDPState; and its groups of
gradients in host memory that are compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from telegrad.communicator import Communicator, Work
from telegrad.communicator.operands import on_device
from telegrad.compress import PlacedResidual
from telegrad.ddp.bucket import (
    COMPRESSIBLE,
    Bits,
    BucketLayout,
    ParameterSpan,
    bits_of,
    check_dtype,
    has_current_density,
    layout_of_members,
    parts_of,
)
from telegrad.ddp.choices import tell_of_density, tell_of_nothing_compressed, watch_choices
from telegrad.ddp.exchange import REMEDY_WITHOUT_SKIP, Exchange, Sending, correct_around, error_of, find_fault
from telegrad.ddp.gradient_scales import GradientScales
from telegrad.ddp.low_rank import FirstRound, LowRankRounds, load_remembered
from telegrad.ddp.node_ranks import NodePieces, NodeRanks
from telegrad.ddp.options import (
    QUANTISED,
    Cheapest,
    Compress,
    LowRank,
    Momentum,
    Quantised,
    TopK,
    Warmup,
    compressor_of,
    encoding_of,
    plain_options,
)
from telegrad.ddp.pass_use import PassUse, Revertible
from telegrad.ddp.rank_checks import alike_options
from telegrad.ddp.rank_state import MemoryOrder, MemoryOrders, checked_step, own_part, state_of
from telegrad.ddp.telemetry import DDPStats
from telegrad.kernels.floats import as_float32
from telegrad.synchronizer.gradient_group import Flat, GradientGroup

NONFINITE = ("raise", "send")
"""What ``nonfinite=`` can be: the plan of a pass cannot be dropped."""


class GroupCompression:
    """``compress``: a TopK: all parameters that it does not leave dense are sent sparsely; a Quantised: all of their
    values, rounded; a LowRank: as products of narrow matrices; a Cheapest: what the plan finds cheapest; ``None``: all
    go densely. ``parameters``: by name; those that are not float32 or bfloat16 go densely. ``comm``: where sums are
    made, until ``move_to`` names another one. ``delayed``: passes overlap. ``nodes``: of which pieces these are. The
    rest as for Synchronizer.

    Raises ``TypeError`` and ``ValueError`` for bad arguments.
    """

    def __init__(
        self,
        compress: Compress | None,
        comm: Communicator,
        parameters: Mapping[str, nn.Parameter],
        *,
        nodes: NodeRanks | None = None,
        momentum: Momentum | None = None,
        warmup: Warmup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        nonfinite: str = "raise",
        delayed: bool = False,
    ) -> None:
        for name, one in parameters.items():
            check_dtype(one.dtype, name, on_device=on_device(one) and compress is not None)
        self.compress, self._nodes = compress, nodes
        self._among = "" if nodes is None else ", for its node"
        held = None if nodes is None else nodes.held()
        self.names = {id(one): name for name, one in parameters.items()}
        self._parameters, self._orders = parameters, MemoryOrders(parameters)
        self._warmup = warmup or Warmup(0)
        topk, self.quantised = _entries_and_formats(compress, parameters)
        if isinstance(compress, Quantised) and self._warmup.kind != "dense":
            raise ValueError(f"warmup={warmup!r} is of entries, and Quantised sends all values: leave kind out")
        self._low_rank: LowRankRounds | None = None
        if not isinstance(compress, LowRank):
            self.compressor = compressor_of(parameters, None if compress is None else topk, momentum, optimizer, held)
        else:
            self._low_rank = LowRankRounds(comm, parameters, compress, held)
            self.compressor = self._low_rank.compressor
            if not len(self.compressor.residuals):
                tell_of_nothing_compressed(compress, rank=comm.rank)
        self._scales = GradientScales(self.compressor, parameters, optimizer)
        self.stats = DDPStats()
        self.values, self.combine = topk.values, topk.combine
        self.encoding = encoding_of(topk, parameters)
        self._nonfinite = nonfinite
        self.step = 0
        self._config = plain_options(compress, momentum, warmup, nonfinite=nonfinite)
        self._entries = {one.name: one.k for one in self.compressor.residuals}
        self._optimizer, self._delayed = optimizer, delayed
        self.move_to(comm)
        on_host = not any(map(on_device, parameters.values()))
        self._choices = watch_choices(
            parameters,
            self.compressor,
            self._warmup,
            rank=comm.rank,
            sparse=isinstance(compress, TopK),
            clipping=on_host,
        )

    def move_to(self, comm: Communicator, across: Communicator | None = None) -> None:
        """Sums are made there from now on; of pieces ``across`` nodes."""
        self._comm, sums = comm, across or comm
        if self._low_rank is not None:
            self._low_rank.move_to(sums)
        self._exchange = Exchange(sums, self.compressor, self.values, self.encoding, self.combine, self.stats)
        memory, rounds = self._memory_for(sums), self._low_rank
        keeps_all = self._exchange.topk_states is None and (rounds is None or rounds.keeps_all)
        parameters = {} if self._delayed else self._parameters  # what has an average counts as used, see ``settle``
        if self._delayed:
            memory.record(True)
        self._memory = memory
        self._use = PassUse(parameters, self.compressor, memory, self.stats, self._optimizer, keeps_all=keeps_all)

    def _memory_for(self, comm: Communicator) -> Revertible:
        """What remembers the gradients of passes, whose sums are made there."""
        return self.compressor

    @property
    def ways(self) -> tuple[str, ...]:
        """In which a group may go: ``"dense"``, ``"sparse"``, or a wire."""
        if not len(self.compressor.residuals):
            return ("dense",)
        if isinstance(self.compress, Cheapest):
            return ("dense", "sparse", *self.quantised)
        return self.quantised or ("sparse",)

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
                f"parameter {name!r} has another memory format than it had, and its residual is in that order: "
                "after such a change call load_state_dict(state_dict()) of the Synchronizer"
            )

    def description(self) -> dict[str, str]:
        """What all ranks must have alike, of nodes those at one position."""
        return alike_options(self._config, self.compressor)

    def open_pass(self) -> None:
        """A backward pass begins. Raises ``ValueError`` as ``GradientScales.rates``."""
        self._use.open()
        self.compressor.set_units(1.0, self._scales.rates())
        self.compressor.residuals.raise_density(self._warmup.least_density(self.step))

    def close_pass(self) -> None:
        """All averages of the pass are there."""
        warmed_up = not self._warmup.is_dense(self.step)
        self.step += 1
        self._use.close()
        if self._choices is not None and not self._choices.is_over:
            self._choices.averages_came(warmed_up=warmed_up)

    def decide(self) -> None:
        """Gradients that were cleared without a step leave nothing behind."""
        self._use.decide()

    def settle(self, parameters: Sequence[nn.Parameter], averaged: Set[int]) -> None:
        """With a delay, once the averages of these are there: what was sent of those that have none waits again."""
        self._memory.confirm([self.names[id(one)] for one in parameters if id(one) in averaged])
        self._memory.revert([self.names[id(one)] for one in parameters if id(one) not in averaged])

    def forget_sums(self) -> None:
        """Thresholds and factors, which all ranks have alike, begin anew, as on newcomers. Residuals stay."""
        if self._exchange.topk_states is not None:
            self._exchange.topk_states.load({})
        if self._low_rank is not None:
            self._low_rank.begin_anew()

    def start(self, layout: BucketLayout, bits: Bits, *, way: str) -> Sending | FirstRound:
        """Begins to average a group's memory: ``"sparse"``, its parts compressed; ``"dense"``, all of it, with what
        waits; or so with its parts in that wire. What is a first round goes on with ``finish``.

        Raises ``NonFiniteGradient`` if that is the policy, and ends the communicator, so that no rank waits for this.
        """
        compresses = bool(layout.parts) and not self._warmup.is_dense(self.step)
        sparse, quantised = compresses and way == "sparse", compresses and way in QUANTISED
        fault = find_fault(self.compressor, layout, bits, bool(layout.parts))
        self.stats.buckets += 1
        self.stats.elements += sum(one.size for one in layout.members)
        if fault is not None:
            self.stats.nonfinite_buckets += 1
            if self._nonfinite == "raise":
                error = error_of(fault, self._comm.rank, self.step, remedy=REMEDY_WITHOUT_SKIP, among=self._among)
                self._comm.abort(f"{type(error).__name__}: {error}")
                raise error
        dense = layout.dense if sparse else layout.members
        correct_around(self.compressor, bits, dense)
        self.stats.dense_elements += sum(one.size for one in (layout.dense if quantised else dense))
        if quantised:
            return self._exchange.send_quantised(layout, bits, way)
        if not sparse:
            return self._exchange.send_with_what_waits(layout, bits)
        self.stats.wanted += layout.wanted
        if self._low_rank is not None:
            return self._low_rank.begin(self._exchange, layout, bits, sound=fault is None)
        sending = self._exchange.send(layout, bits, sound=fault is None)
        self.stats.selected += sending.nnz
        return sending

    def finish(self, first: FirstRound) -> Sending:
        """Ends a first round, and begins the second one of that memory."""
        assert self._low_rank is not None
        sending = self._low_rank.finish(first)
        self.stats.selected += sending.nnz
        return sending

    def state_dict(self) -> dict[str, Any]:
        """See ``Synchronizer.state_dict``."""
        self.decide()
        sums = self._exchange.topk_states
        state = state_of(self._comm, self.step, self._config, self.compressor, self._orders)
        if self._low_rank is not None:
            state["factors"] = self._low_rank.state_dict()
        if self._nodes is not None:
            state["node"] = self._nodes.as_saved()
        return {**state, "sums": () if sums is None else sums.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Synchronizer.load_state_dict``."""
        step = checked_step(state, self._comm, "Synchronizer")
        node = None if self._nodes is None else self._nodes.as_saved()
        state = own_part(state, node, {} if self._low_rank is None else self._low_rank.state_dict())
        orders = MemoryOrders(self._parameters)  # as they are now
        kept = self.compressor, self._exchange.topk_states, self._low_rank
        entries, least = orders.from_rows(state["compressor"]), self._warmup.least_density(step)
        load_remembered(state, entries, *kept, least_density=least)
        self._orders, self.step = orders, step
        if self._choices is not None:
            self._choices.is_loaded = True
        tell_of_density(state, self.compressor, self._config, rank=self._comm.rank)


def _entries_and_formats(
    compress: Compress | None, parameters: Mapping[str, nn.Parameter]
) -> tuple[TopK, tuple[str, ...]]:
    """What says which parameters are compressed, and the formats in which all of their values may go. Raises
    ``TypeError`` for gradients that have none of these."""
    if compress is None or isinstance(compress, TopK):
        return compress or TopK(), ()
    if isinstance(compress, LowRank):
        return compress.as_topk(parameters), ()
    formats = tuple(compress.values)
    for name, parameter in parameters.items():
        if formats and parameter.dtype in COMPRESSIBLE and parameter.dtype != torch.float32:
            raise TypeError(
                f"values={compress.values!r} is for float32 gradients, and that of {name!r} is {parameter.dtype}"
            )
    return compress.topk if isinstance(compress, Cheapest) else compress.as_topk(), formats


# Gradients that travel together, those of large parameters as their largest entries with error feedback.


class _EarlierAverage(NamedTuple):
    """What a parameter still has from an earlier pass, and no gradient of this one has joined; on a device it may be
    nothing."""

    flat: Flat
    number: int  # of its flag
    part: PlacedResidual | None  # of a node, if there is none
    place: Any  # in the group's memory, as an array or a tensor
    values: Any  # None: there is nothing


class CompressedGroup(GradientGroup):
    """As a GradientGroup. ``way``: how parameters that ``compression`` compresses are sent, see
    ``GroupCompression.start``. Flags, the number of the pass, and parameters that are not compressed always go densely.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], compression: GroupCompression, *, way: str) -> None:
        self._compression = compression  # first: the group's views ask
        super().__init__(parameters)
        self.way = way
        self._layouts: dict[int, BucketLayout] = {}
        self._sendings: list[Sending | FirstRound] = []
        self._held: list[_EarlierAverage] = []

    def _make_view(self, parameter: nn.Parameter) -> Tensor:
        self._compression.check_order(parameter)
        return super()._make_view(parameter)

    def launch(self, comm: Communicator, earlier: set[int], number: int) -> list[Work]:
        """As a GradientGroup's. Raises ``NonFiniteGradient`` as ``GroupCompression.start``."""
        self._sendings, self._held = [], []
        return super().launch(comm, earlier, number)

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        self._set_aside(flat, self._layout_of(flat), self._elements(flat, flat.buffer), present)
        return self._start(flat, flat.buffer)

    def _start(self, flat: Flat, memory: Tensor) -> list[Work]:
        """Begins to average ``memory``, which has what is sent of ``flat``."""
        sending = self._compression.start(self._layout_of(flat), self._elements(flat, memory), way=self.way)
        self._sendings.append(sending)
        return sending.works

    def _elements(self, flat: Flat, memory: Tensor) -> Any:
        """As compression takes them."""
        return bits_of(memory, self._compression.names[id(flat.parameters[0])])

    def launch_second(self) -> list[Work]:
        """As a GradientGroup's. Errors are those of the first round."""
        works = []
        for number, one in enumerate(self._sendings):
            if isinstance(one, FirstRound):
                second = self._sendings[number] = self._compression.finish(one)
                works += second.works
        return works

    def receive(self) -> None:
        """After the works: what the network did not write is written, and what it lost goes back to the residuals."""
        sendings, self._sendings = self._sendings, []
        for sending in sendings:
            assert isinstance(sending, Sending)
            sending.keep()
            sending.write()

    def finish(self) -> None:
        """As a GradientGroup's."""
        super().finish()
        held, self._held = self._held, []
        flags = {id(one.flat): self._flags_of(one.flat) for one in held}
        for one in held:
            if flags[id(one.flat)][one.number] == 0:
                one.place[:] = one.values
            elif one.part is None:
                if not self._has_something(one.values):
                    continue
                name = self._compression.names[id(one.flat.parameters[one.number])]
                raise RuntimeError(
                    f"parameter {name!r} has an average of an earlier pass here, and a gradient on another rank, which "
                    "node= cannot add up: call zero_grad() before each backward pass"
                )
            else:  # others have sent theirs: this rank's share follows
                self._keep(PlacedResidual(one.part.entry, 0), one.values)

    def _set_aside(self, flat: Flat, layout: BucketLayout, memory: Any, present: Set[int]) -> None:
        """What is compressed, or sent with what waits, cannot be had back if no rank has a gradient for it."""
        parts = {part.entry.name: part for part in layout.parts}
        for number, one in enumerate(flat.parameters):
            part = parts.get(self._compression.names[id(one)])
            if part is None or id(one) in present:
                continue
            own = memory[part.offset : part.offset + part.entry.size]
            self._hold(_EarlierAverage(flat, number, part, own, self._copied(own)))

    def _hold(self, one: _EarlierAverage) -> None:
        if one.values is not None:
            self._held.append(one)
            one.place[:] = 0

    def _copied(self, own: Any) -> Any:
        """``None`` where it is known that there is nothing in it."""
        return own.copy() if own.any() else None

    def _has_something(self, values: Any) -> bool:
        return bool(values.any())

    def _keep(self, part: PlacedResidual, values: Any) -> None:
        finite = np.nan_to_num(as_float32(values), posinf=0, neginf=0)
        self._compression.compressor.keep_all((part,), finite)

    def _layout_of(self, flat: Flat) -> BucketLayout:
        layout = self._layouts.get(id(flat))
        if layout is None or not has_current_density(layout):
            tail, (members, elements) = (len(flat.parameters) + 1) * parts_of(flat.buffer), self._sent_of(flat)
            layout = layout_of_members(members, elements, self._compression.compressor, tail=tail)
            self._layouts[id(flat)] = layout
        return layout

    def _sent_of(self, flat: Flat) -> tuple[list[ParameterSpan], int]:
        """Which gradients lie where in the memory that is averaged, and how many elements it has."""
        parts, names, starts = parts_of(flat.buffer), self._compression.names, flat.starts
        spans = [(names[id(one)], starts[id(one)] * parts, one.numel() * parts) for one in flat.parameters]
        return [*starmap(ParameterSpan, spans)], flat.buffer.numel() * parts


class NodeGroup(CompressedGroup):
    """As a CompressedGroup, of ``nodes`` of several ranks: ``launch`` starts its sums inside the node, ``go_on`` those
    of this rank's pieces between nodes, and ``finish`` ends what ``receive`` has started, to share the averages."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], compression: GroupCompression, nodes: NodeRanks, *, way: str
    ) -> None:
        super().__init__(parameters, compression, way=way)
        self._pieces: dict[int, NodePieces] = {}  # of a Flat, by its id
        self._across: list[list[Work]] = []  # of the pass, by Flat
        for flat in self._flats:
            whole = torch.view_as_real(flat.buffer).view(-1) if flat.buffer.is_complex() else flat.buffer
            members, elements = super()._sent_of(flat)
            tail = slice(elements - flat.tail.numel() * parts_of(flat.buffer), elements)
            self._pieces[id(flat)] = NodePieces(nodes, nodes.layout_of(members, tail), whole)

    def _sent_of(self, flat: Flat) -> tuple[list[ParameterSpan], int]:
        layout = self._pieces[id(flat)].layout
        return layout.own, self._pieces[id(flat)].elements

    def launch(self, comm: Communicator, earlier: set[int], number: int) -> list[Work]:
        """As a GradientGroup's."""
        self._across = []
        return super().launch(comm, earlier, number)

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        pieces, parts = self._pieces[id(flat)], parts_of(flat.buffer)
        for number, one in enumerate(flat.parameters):
            if id(one) not in present:
                start = flat.starts[id(one)] * parts
                own = self._elements(flat, pieces.whole[start : start + one.numel() * parts])
                self._hold(_EarlierAverage(flat, number, None, own, self._copied(own)))
        pieces.send()
        return []

    def go_on(self, *, waits: bool) -> bool:
        """As a GradientGroup's. Raises ``NonFiniteGradient`` as ``GroupCompression.start``."""
        for flat in self._flats[len(self._across) :]:
            pieces = self._pieces[id(flat)]
            if not (waits or pieces.work.is_completed()):
                return False
            pieces.work.wait()
            self._across.append(self._start(flat, pieces.memory[: pieces.elements]))
        return True

    def launch_second(self) -> list[Work]:
        """As a CompressedGroup's, with the works of ``go_on``."""
        second = super().launch_second()
        return [*(work for works in self._across for work in works), *second]

    def receive(self) -> None:
        """As a GradientGroup's, of flags and the number of the pass only."""
        super().receive()
        for flat in self._flats:
            pieces, tail = self._pieces[id(flat)], flat.tail.numel() * parts_of(flat.buffer)
            pieces.whole[-tail:] = pieces.memory[pieces.elements - tail : pieces.elements]
            pieces.gather()

    def finish(self) -> None:
        """As a GradientGroup's. Raises ``RuntimeError`` where an average is left of an earlier pass, and gradients of
        other ranks have come."""
        for pieces in self._pieces.values():
            pieces.write()
        super().finish()
