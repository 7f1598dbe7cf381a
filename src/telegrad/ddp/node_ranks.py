"""Nodes of several ranks: gradients are summed inside a node first, and then between nodes.

Each rank of a node works on its own pieces of the gradient, about as large as those of the others, and talks to the
ranks at its position in the other nodes. Inside a node pieces go over telegrad in host memory, and over torch's process
group, such as NCCL's, on devices. Source: Renggli et al., SC 2019, §8.4, whose nodes have several GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import LateRead, runtime_of
from telegrad.communicator.operands import on_device
from telegrad.ddp.backward_pass import Buckets, Future, clip_tensors
from telegrad.ddp.bucket import GradBucket, ParameterSpan, identity_of, members_of, parts_of
from telegrad.ddp.options import AUTO, Compress, LowRank, compressions_by
from telegrad.ddp.rank_state import Piece, SavedNode
from telegrad.ddp.telemetry import DDPStats

_LEAST = 256  # elements of a piece, where a parameter is cut
_SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class NodeLayout:
    """The places of a buffer's pieces: in the buffer, and in memory by position. ``sizes``: of each position.
    ``own``: this rank's pieces, in its part of that memory."""

    sizes: list[int]
    moves: list[tuple[slice, int, slice]] = field(default_factory=list)  # in the buffer; the position, and there
    own: list[ParameterSpan] = field(default_factory=list)

    def add(self, source: slice, position: int) -> int:
        """A piece for that position. Returns where it is there."""
        start = self.sizes[position]
        self.sizes[position] += source.stop - source.start
        self.moves.append((source, position, slice(start, self.sizes[position])))
        return start


class NodeRanks:
    """The ranks of this rank's node: their number ``size``, this one's ``position``, and which ``pieces`` it has.

    ``node``: their process group, or ``"auto"``: the ranks of ``comm`` with the same number in ``comm.nodes``.
    ``sends``: how gradients are compressed. Raises ``TypeError`` and ``ValueError``."""

    def __init__(
        self, node: Any, comm: Communicator, parameters: Mapping[str, nn.Parameter], sends: Compress | None
    ) -> None:
        self._parameters = parameters
        self._group = None if node == AUTO else checked_node_group(node)
        self._members = [rank for rank, number in enumerate(comm.nodes) if number == comm.nodes[comm.rank]]
        if self._group is not None:
            self.size, self.position = self._group.size(), self._group.rank()
        else:
            counts = sorted(np.unique(comm.nodes, return_counts=True)[1].tolist())
            if counts[0] != counts[-1]:
                raise ValueError(
                    f"node='auto' needs as many ranks on each node, and there are {counts}: leave node= out, or start "
                    "as many on each"
                )
            self.size, self.position = len(self._members), self._members.index(comm.rank)
        chosen = compressions_by(sends.per_parameter, parameters) if isinstance(sends, LowRank) else {}
        matrices = {name: one.rank for name, one in chosen.items() if one.rank is not None}
        self._cuts = cuts_of(parameters, self.size, matrices)
        self.pieces = {
            name: Piece(cut[self.position], cut[self.position + 1], one.numel())
            for (name, cut), one in zip(self._cuts.items(), parameters.values(), strict=True)
            if cut[self.position] < cut[self.position + 1]
        }

    def as_saved(self) -> SavedNode:
        """As a state has it: plain values in lists, as JSON gives them back."""
        return [self.size, self.position, {name: [*piece] for name, piece in self.pieces.items()}]

    def is_cut(self, name: str) -> bool:
        """Whether several ranks have a piece of it."""
        return self._cuts[name][1] not in (0, self._parameters[name].numel())

    def layout_of(self, members: Iterable[ParameterSpan], tail: slice = slice(0)) -> NodeLayout:
        """Of a buffer with these members. All ranks of the node get its ``tail``, behind their pieces."""
        made = NodeLayout([0] * self.size)
        for name, offset, size in members:
            parts = size // max(1, self._parameters[name].numel())
            for position, (start, stop) in enumerate(pairwise(self._cuts[name])):
                if start < stop:
                    at = made.add(slice(offset + parts * start, offset + parts * stop), position)
                    if position == self.position:
                        made.own.append(ParameterSpan(name, at, parts * (stop - start)))
        for position in range(self.size) if tail.stop else ():
            made.add(tail, position)
        return made

    def held(self) -> dict[str, Tensor]:
        """This rank's part of each parameter, as a tensor without memory: whole rows of those that are cut."""
        shapes = {}
        for name, (start, stop, elements) in self.pieces.items():
            shape = self._parameters[name].shape
            shapes[name] = shape if stop - start == elements else ((stop - start) * shape[0] // elements, *shape[1:])
        return {
            name: torch.empty(shape, dtype=self._parameters[name].dtype, device="meta")
            for name, shape in shapes.items()
        }

    def connect(self, comm: Communicator) -> Communicator:
        """The communicator of the ranks at this position, which ends with ``comm``, that of all ranks; all of them
        call this. On devices the host waits. Raises ``ValueError`` unless nodes have as many ranks, and on devices
        where ``"auto"`` has no torch.distributed to make a group with."""
        like, first = next(iter(self._parameters.values())).detach(), self._members[0]
        if self._group is None and on_device(like):
            self._group = _group_of(comm, self._members)
        if self._group is not None:
            ranks = like.new_zeros(self.size, dtype=torch.int64)
            own = torch.full_like(ranks[:1], comm.rank)
            dist.all_gather([*torch.split(ranks, 1)], own, group=self._group)
            first = int((LateRead(ranks).values() if on_device(ranks) else ranks)[0])
        check_places(comm, first, self.position, self.size, "node")
        across, inside = comm.split(self.position, first), comm.split(first, self.position)
        assert across is not None
        assert inside is not None
        comm._dependents.update((across, inside))
        self._across, self._inside = across, inside
        return across

    def close(self) -> None:
        """Closes what ``connect`` has made."""
        self._across.close()
        self._inside.close()


def _group_of(comm: Communicator, members: list[int]) -> Any:
    """Torch's process group of these ranks of ``comm``, all of which call this."""
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else -1
    ranks: list[int] = comm.all_gather(np.array([own])).reshape(-1).tolist()
    if min(ranks) < 0:
        raise ValueError(
            "node='auto' on a GPU makes process groups, and torch.distributed is not initialised on all ranks: call "
            "init_process_group() before"
        )
    return dist.new_group([ranks[one] for one in members], use_local_synchronization=True)


class _SumInside:
    """Of a device's pieces: what all ranks have for this one comes first, and then their mean into ``own``."""

    def __init__(self, given: Tensor, sizes: list[int], own: Tensor, group: Any) -> None:
        self._own, self._received = own, own.new_empty(group.size(), own.numel())
        width = own.element_size()
        coming, leaving = [own.numel() * width] * len(sizes), [size * width for size in sizes]
        into, out_of = self._received.view(-1).view(torch.uint8), given.view(torch.uint8)
        self._work = dist.all_to_all_single(into, out_of, coming, leaving, group=group, async_op=True)

    def is_completed(self) -> bool:
        """The stream waits, and the host does not."""
        return True

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            summed = self._received.float() if self._own.dtype in _SUMMED_IN_FLOAT32 else self._received
            self._own.copy_(summed.sum(0).div_(len(summed)))


class NodePieces:
    """The pieces of a buffer in a node: ``send`` starts their averages inside the node. After its ``work`` ``memory``
    has this rank's own. When these are averages of all nodes, ``gather`` starts to share them, and ``write`` puts all
    pieces into the buffer. Ranks of a node start these in one order.

    ``memory`` has at least one element. It is kept from pass to pass; on a device only where ``write`` has ended the
    pass before, as streams may still have work with it."""

    def __init__(self, ranks: NodeRanks, layout: NodeLayout, whole: Tensor) -> None:
        self._ranks, self.layout, self.whole = ranks, layout, whole
        self.work: Any = None
        self._given: Tensor | None = None
        self._is_over = True

    @property
    def elements(self) -> int:
        """Of this rank's pieces, and the tail."""
        return int(self.layout.sizes[self._ranks.position])

    def send(self) -> None:
        layout, ranks = self.layout, self._ranks
        if self.work is not None and not on_device(self.whole):  # of a pass that was broken off
            with contextlib.suppress(Exception):
                self.work.wait()
        with torch.no_grad():
            if self._given is None or not (self._is_over or self.whole.device.type == "cpu"):
                self._given = _memory_like(self.whole, sum(layout.sizes))
                self.memory = _memory_like(self.whole, max(1, *layout.sizes)).zero_()
            self._is_over = False
            parts = torch.split(self._given, layout.sizes)
            for source, position, place in layout.moves:
                parts[position][place] = self.whole[source]
        own = self.memory[: self.elements]
        if on_device(own):
            self.work = _SumInside(self._given, layout.sizes, own, ranks._group)
        else:
            self.work = ranks._inside.reduce_scatter(self._given, "avg", counts=layout.sizes, out=own, async_op=True)

    def gather(self) -> None:
        layout, ranks = self.layout, self._ranks
        if on_device(self.memory):
            rows = self.memory.new_empty(ranks.size, self.memory.numel())
            self._parts = [*rows.unbind()]
            into = [*rows.view(torch.uint8).unbind()]
            self.work = dist.all_gather(into, self.memory.view(torch.uint8), group=ranks._group, async_op=True)
            return
        assert self._given is not None
        self._parts = [*torch.split(self._given, layout.sizes)]
        own = self.memory[: self.elements]
        self.work = ranks._inside.all_gather(own, out=self._given, counts=layout.sizes, async_op=True)

    def write(self) -> None:
        self.work.wait()
        with torch.no_grad():
            for source, position, place in self.layout.moves:
                self.whole[source] = self._parts[position][place]
        self._is_over = True


def _memory_like(one: Tensor, elements: int) -> Tensor:
    """NumPy's on the host, which asks for huge pages: ranks of a node copy from each other page by page."""
    if on_device(one):
        return one.new_empty(elements)
    return torch.from_numpy(np.empty(elements * one.element_size(), np.uint8)).view(one.dtype)


def checked_node_group(node: Any) -> Any:
    """Raises ``TypeError`` and ``ValueError`` for what is no process group with this rank in it."""
    if node is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("node= is a process group without this rank: give each rank that of its own node")
    if not isinstance(node, dist.ProcessGroup):
        raise TypeError(
            f"node={node!r} must be 'auto', the torch.distributed.ProcessGroup of this rank's node, or None"
        )
    return node


def check_places(comm: Communicator, first: int, position: int, size: int, what: str) -> npt.NDArray[np.int64]:
    """Of each rank the first one of its group and its position there. Raises ``ValueError`` on all ranks of ``comm``
    unless each of them is in one group of ``size``. ``what``: the name of such a group."""
    places: npt.NDArray[np.int64] = comm.all_gather(np.array([first, position])).reshape(-1, 2)
    firsts, counts = np.unique(places[:, 0], return_counts=True)
    if len(np.unique(places, axis=0)) != comm.world_size or {*counts.tolist()} != {size}:
        raise ValueError(
            f"{what}= has {size} ranks, and comm {sorted(counts.tolist())} of {len(firsts)} {what}s: "
            f"give each rank the process group of its own {what}, and a comm of all their ranks"
        )
    return places


def cuts_of(parameters: Mapping[str, nn.Parameter], size: int, matrices: Mapping[str, int]) -> dict[str, list[int]]:
    """The borders of each parameter's pieces. Parameters of many elements are cut by rows into ``size`` pieces.
    Others belong to a rank as a whole, in turn, since neighbours are in one bucket. ``matrices`` as well, as pieces of
    them send more numbers, unless one is a large part of the model."""
    total, loads, cuts = sum(one.numel() for one in parameters.values()), [0] * size, {}
    for name, one in parameters.items():
        elements, rows = one.numel(), one.shape[0] if one.dim() else 1
        is_cut = rows >= size and elements >= _LEAST * size and one.is_contiguous()
        if is_cut and name in matrices:
            rank, columns = matrices[name], elements // rows
            words = rank * (rows + columns * size)
            is_cut = elements * 4 * size > total and 2 * words <= elements and rows // size >= rank
        if is_cut:
            cuts[name] = [rows * place // size * (elements // rows) for place in range(size + 1)]
        else:
            owner = int(np.argmin(loads))
            loads[owner] += elements
            cuts[name] = [0] * (owner + 1) + [elements] * (size - owner)
    return cuts


class _PieceBucket(NodePieces):
    """Stands for DDP's bucket, with this rank's pieces of it."""

    def __init__(
        self, bucket: GradBucket, ranks: NodeRanks, members: list[ParameterSpan], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(ranks, ranks.layout_of(members), bucket.buffer())
        self.identity, self._number = identity_of(bucket), bucket.index()
        self._parameters = [parameters[name] for name, _, _ in self.layout.own]
        self.gradients_by_name = {name: slice(offset, offset + size) for name, offset, size in members}

    def begin(self, bucket: GradBucket) -> None:
        """In a pass."""
        self.whole, self.last = bucket.buffer(), bucket.is_last()
        on = runtime_of(self.whole.device.type) if on_device(self.whole) else None
        self.future: Future = Future() if on is None else on.future(self.whole.device)
        self.outcome: Future | None = None

    def end(self) -> None:
        """``whole`` has the averages, on a device where the current stream comes to here."""
        if on_device(self.whole):
            runtime = runtime_of(self.whole.device.type)
            runtime.complete(self.future, runtime.current_stream(self.whole.device), self.whole)
        else:
            self.future.set_result(self.whole)

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self.memory[: max(1, self.elements)]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Complex ones at the places and of the sizes that DDP gives them (``members_of``)."""
        spans = zip(map(parts_of, self._parameters), self.layout.own, strict=True)
        return [self.memory[at // parts : (at + size) // parts] for parts, (_, at, size) in spans]


class NodeBuckets:
    """As ``Buckets``. ``inner`` averages the pieces between nodes, over ``across``. ``most_norm``: to which this rank
    scales its own gradients down before they are summed inside the node. ``unit_of``: what 1 in gradients like a tensor
    is worth to that. ``failure``: the error of an operation, if there was one.

    Operations of a node start in the same order on all its ranks: in a pass first the sums of all buckets, then all
    results. On the host the last call waits, as DDP would then. On a device a stream waits."""

    def __init__(
        self,
        inner: Buckets,
        ranks: NodeRanks,
        across: Communicator,
        parameters: Mapping[str, nn.Parameter],
        most_norm: float | None,
        unit_of: Callable[[Tensor], Tensor | None],
        stats: DDPStats,
        failure: Callable[[], Exception | None],
    ) -> None:
        self._inner, self._ranks, self._across, self._parameters = inner, ranks, across, parameters
        self.settle, self.save, self.forget, self.prepare = inner.settle, inner.save, inner.forget, inner.prepare
        self._names = {id(one): name for name, one in parameters.items()}
        self._most_norm, self._unit_of, self._stats, self._failure = most_norm, unit_of, stats, failure
        self._buckets: dict[int, _PieceBucket] = {}
        self._held: list[_PieceBucket] = []
        self._taken, self._is_open = 0, False

    def take(self, bucket: GradBucket) -> Future:
        """Raises what has gone wrong in the node, or between nodes, and what ``inner`` raises."""
        if not self._is_open or bucket.index() == 0:
            if self._is_open:
                self.leave()
            self._taken, self._is_open = 0, True
        held = self._buckets.get(bucket.index())
        if held is None or held.identity != identity_of(bucket) or held.whole.device != bucket.buffer().device:
            held = self._buckets[bucket.index()] = self._made(bucket)
        held.begin(bucket)
        self._held.append(held)
        if self._most_norm is None:
            held.send()
        if held.last:
            self._finish()
        elif self._most_norm is None:
            for one in self._held[self._taken : -1]:
                if not one.work.is_completed():
                    break
                self._average(one)
        return held.future

    def synchronize(self) -> None:
        self._across.synchronize()
        self._inner.synchronize()

    def leave(self, error: Exception | None = None) -> None:
        self._is_open = False
        held, self._held = self._held, []
        for one in held:
            if not one.future.done():  # nobody else completes it
                ended = error or RuntimeError("the backward pass ended before its last bucket")
                one.future.set_exception(cast(Any, ended))
        self._inner.leave(error)

    def _made(self, bucket: GradBucket) -> _PieceBucket:
        members = members_of(bucket, self._names)
        for parameter, (name, _, _) in zip(bucket.parameters(), members, strict=True):
            if self._ranks.is_cut(name) and not parameter.is_contiguous():
                raise ValueError(
                    f"parameter {name!r} has another memory format than when DDPState was made: convert the model "
                    "before, or leave node= out"
                )
        return _PieceBucket(bucket, self._ranks, members, self._parameters)

    def _average(self, held: _PieceBucket) -> None:
        """Waits for the sum inside the node, and starts the average between nodes."""
        held.work.wait()
        self._taken += 1
        held.outcome = self._inner.take(cast(GradBucket, held))

    def _finish(self) -> None:
        if self._most_norm is not None:
            self._clip(self._most_norm)
            for one in self._held:
                one.send()
        for one in self._held[self._taken :]:
            self._average(one)
        for one in self._held:
            assert one.outcome is not None
            try:
                one.outcome.wait()
            except Exception as error:
                raise self._failure() or error from None
            one.gather()
        for one in self._held:
            one.write()
            one.end()
        self._is_open, self._held = False, []

    def _clip(self, most: float) -> None:
        """In the order of names, as DDP rebuilds its buckets and a restored state must clip as the one before."""
        gradients = {name: held.whole[one] for held in self._held for name, one in held.gradients_by_name.items()}
        ordered = [gradients[name] for name in sorted(gradients) if gradients[name].numel()]
        factor = clip_tensors(ordered, most, self._unit_of(self._held[0].whole))
        if not on_device(factor):
            self._stats.clipped_steps += float(factor) < 1
