"""Nodes of several ranks: gradients are summed inside a node by torch's process group, and between nodes by telegrad.

Each rank of a node works on its own pieces of the gradient, about as large as those of the others, and talks to the
ranks at its position in the other nodes. Source: Renggli et al., SC 2019, §8.4, whose nodes have several GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.communicator.operands import on_device
from telegrad.communicator.work import future_of_all
from telegrad.ddp.backward_pass import Buckets, Future, clip_tensors
from telegrad.ddp.bucket import GradBucket, identity_of, members_of, parts_of
from telegrad.ddp.rank_state import Piece, SavedNode
from telegrad.ddp.telemetry import DDPStats
from telegrad.errors import TransportError

AUTO = "auto"
_LEAST = 256  # elements of a piece, where a parameter is cut
_ENDED = 7_061  # tag of the messages that say that a rank has ended its pass
_PATIENCE_S = 5.0  # after an error of torch: until telegrad says which rank was lost
_SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)


class NodeRanks:
    """The ranks of this rank's node: their number ``size``, this one's ``position``, and which ``pieces`` it has.

    ``node``: their process group, or ``"auto"``: the ranks of ``comm`` with the same number in ``comm.nodes``.
    ``matrices``: of which rank parameters travel that are sent as matrices. Raises ``TypeError`` and ``ValueError``."""

    def __init__(
        self, node: Any, comm: Communicator, parameters: Mapping[str, nn.Parameter], matrices: Mapping[str, int]
    ) -> None:
        self._comm, self._parameters, self.rank = comm, parameters, comm.rank
        self._group = None if node == AUTO else checked_node_group(node)
        if self._group is not None:
            self.size, self.position = self._group.size(), self._group.rank()
        else:
            if not dist.is_initialized():
                raise ValueError("node='auto' makes a process group, so call init_process_group() before, or give one")
            members = self._members()
            counts = sorted(np.unique(comm.nodes, return_counts=True)[1].tolist())
            if counts[0] != counts[-1]:
                raise ValueError(
                    f"node='auto' needs as many ranks on each node, and there are {counts}: leave node= out, or start "
                    "as many on each"
                )
            self.size, self.position = len(members), members.index(comm.rank)
        self._cuts = cuts_of(parameters, self.size, matrices)
        self.pieces = {
            name: Piece(cut[self.position], cut[self.position + 1], one.numel())
            for (name, cut), one in zip(self._cuts.items(), parameters.values(), strict=True)
            if cut[self.position] < cut[self.position + 1]
        }

    def _members(self) -> list[int]:
        own = self._comm.nodes[self._comm.rank]
        return [rank for rank, node in enumerate(self._comm.nodes) if node == own]

    def as_saved(self) -> SavedNode:
        """As a state has it: plain values in lists, as JSON gives them back."""
        return [self.size, self.position, {name: [*piece] for name, piece in self.pieces.items()}]

    def cut(self, name: str, position: int) -> tuple[int, int]:
        """The elements of a parameter that the rank at ``position`` has."""
        start, stop = self._cuts[name][position : position + 2]
        return start, stop

    def is_cut(self, name: str) -> bool:
        """Whether several ranks have a piece of it."""
        return self._cuts[name][1] not in (0, self._parameters[name].numel())

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

    def connect(self, group: Any) -> Communicator:
        """The communicator of the ranks at this position, which ends with that of all ranks; all of them call this.
        ``group``: the process group of DDP. Raises ``ValueError`` unless nodes have as many ranks each."""
        if self._group is None:
            all_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            members = [all_ranks[rank] for rank in self._members()]
            self._group = dist.new_group(members, use_local_synchronization=True)
        device = next(iter(self._parameters.values())).device
        ranks = torch.empty(self.size, dtype=torch.int64, device=device)
        dist.all_gather([*ranks.unbind()], torch.tensor(self._comm.rank, device=device), group=self._group)
        self._others = [rank for rank in ranks.tolist() if rank != self._comm.rank]
        first = int(ranks[0])
        check_places(self._comm, first, self.position, self.size, "node")
        across = self._comm.split(self.position, first)
        assert across is not None
        self._comm._dependents.add(across)
        return across

    def expect_ends(self, failed: Callable[[Exception], None]) -> Future:
        """Is done when the other ranks of the node have ended their passes, or ``comm`` has ``failed``."""
        works = [self._comm.recv(np.zeros(1, np.uint8), one, tag=_ENDED, async_op=True) for one in self._others]
        return future_of_all(cast(Any, works), lambda: None, failed)

    def tell_end(self) -> None:
        """To the other ranks of the node."""
        for one in self._others:
            self._comm.send(np.zeros(1, np.uint8), one, tag=_ENDED, async_op=True)

    def exchange(self, given: Tensor, sizes: list[int], received: Tensor) -> Any:
        """Starts it: ``given`` has something for each rank of the node, of these sizes, and ``received`` gets what they
        have for this one."""
        width = given.element_size()
        own = received.numel() * width // self.size
        return dist.all_to_all_single(
            received.view(torch.uint8),
            given.view(torch.uint8),
            [own] * self.size,
            [size * width for size in sizes],
            group=self._group,
            async_op=True,
        )

    def gather(self, own: Tensor, into: Tensor) -> Any:
        """Starts it: each rank's ``own`` in a row of ``into``."""
        rows = [*into.view(torch.uint8).unbind()]
        return dist.all_gather(rows, own.view(torch.uint8), group=self._group, async_op=True)


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


@dataclass(slots=True)
class _NodeLayout:
    """The places of a bucket's pieces: in the bucket, and in memory by position. ``sizes``: of each
    position. ``own``: this rank's pieces."""

    identity: tuple[int, ...]
    whole: dict[str, slice]  # by name, where its gradient lies in the bucket
    sizes: list[int]
    moves: list[tuple[slice, int, slice]]  # in the bucket; the position, and where in its part
    parameters: list[nn.Parameter]
    own: list[slice]


@dataclass(slots=True)
class _PieceBucket:
    """Stands for DDP's bucket, with this rank's pieces of it."""

    number: int
    last: bool
    layout: _NodeLayout
    whole: Tensor  # DDP's buffer
    future: Future
    given: Tensor = field(init=False)
    received: Tensor = field(init=False)
    work: Any = None
    memory: Tensor = field(init=False)
    outcome: Future | None = None

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self.memory[: max(1, self.received.numel() // len(self.layout.sizes))]

    def parameters(self) -> list[nn.Parameter]:
        return self.layout.parameters

    def gradients(self) -> list[Tensor]:
        """Complex ones at the places and of the sizes that DDP gives them (``members_of``)."""
        spans = zip(map(parts_of, self.layout.parameters), self.layout.own, strict=True)
        return [self.memory[own.start // parts : own.stop // parts] for parts, own in spans]


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
        names: Mapping[int, str],
        most_norm: float | None,
        unit_of: Callable[[Tensor], Tensor | None],
        stats: DDPStats,
        failure: Callable[[], Exception | None],
    ) -> None:
        self._inner, self._ranks, self._across, self._names = inner, ranks, across, names
        self._most_norm, self._unit_of, self._stats, self._failure = most_norm, unit_of, stats, failure
        self._layouts: dict[int, _NodeLayout] = {}
        self._held: list[_PieceBucket] = []
        self._taken, self._is_open = 0, False
        self._ends: Future | None = None

    def take(self, bucket: GradBucket) -> Future:
        """Raises what has gone wrong in the node, or between nodes, and what ``inner`` raises."""
        if not self._is_open or bucket.index() == 0:
            self._begin()
        whole = bucket.buffer()
        future: Future = runtime_of(whole.device.type).future(whole.device) if on_device(whole) else Future()
        held = _PieceBucket(bucket.index(), bucket.is_last(), self._layout(bucket), whole, future)
        self._held.append(held)
        if self._most_norm is None:
            self._send(held)
        if not held.last:
            for one in self._held[self._taken : -1]:
                if one.work is None or not (on_device(whole) or one.work.is_completed()):
                    break
                self._average(one)
        else:
            self._finish()
        return future

    def synchronize(self) -> None:
        self._across.synchronize()
        self._inner.synchronize()

    def settle(self) -> None:
        self._inner.settle()

    def save(self) -> None:
        self._inner.save()

    def leave(self, error: Exception | None = None) -> None:
        self._is_open = False
        held, self._held = self._held, []
        for one in held:
            if not one.future.done():  # nobody else completes it
                ended = error or RuntimeError("the backward pass ended before its last bucket")
                one.future.set_exception(cast(Any, ended))
        self._inner.leave(error)

    def forget(self) -> None:
        self._inner.forget()

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        self._inner.prepare(tensors)

    def _begin(self) -> None:
        if self._is_open:
            self.leave()
        self._held, self._taken, self._is_open = [], 0, True
        self._lost: list[Exception] = []
        self._ends = self._ranks.expect_ends(self._lost.append)

    def _layout(self, bucket: GradBucket) -> _NodeLayout:
        layout = self._layouts.get(bucket.index())
        if layout is None or layout.identity != identity_of(bucket):
            layout = self._layouts[bucket.index()] = self._made(bucket)
        return layout

    def _made(self, bucket: GradBucket) -> _NodeLayout:
        ranks = self._ranks
        layout = _NodeLayout(identity_of(bucket), {}, [0] * ranks.size, [], [], [])
        for parameter, member in zip(bucket.parameters(), members_of(bucket, self._names), strict=True):
            name, parts = member.name, parts_of(parameter)
            if ranks.is_cut(name) and not parameter.is_contiguous():
                raise ValueError(
                    f"parameter {name!r} has another memory format than when DDPState was made: convert the model "
                    "before, or leave node= out"
                )
            layout.whole[name] = slice(member.offset, member.offset + member.size)
            for position in range(ranks.size):
                start, stop = (member.offset + parts * end for end in ranks.cut(name, position))
                if start < stop:
                    place = slice(layout.sizes[position], layout.sizes[position] + stop - start)
                    layout.moves.append((slice(start, stop), position, place))
                    layout.sizes[position] = place.stop
                    if position == ranks.position:
                        layout.parameters.append(cast(nn.Parameter, parameter))
                        layout.own.append(place)
        return layout

    def _send(self, held: _PieceBucket) -> None:
        """Starts the sum inside the node."""
        layout, ranks = held.layout, self._ranks
        starts = [0, *np.cumsum(layout.sizes).tolist()]
        with torch.no_grad():
            held.given = held.whole.new_empty(starts[-1])
            for source, position, place in layout.moves:
                held.given[starts[position] + place.start : starts[position] + place.stop] = held.whole[source]
            held.received = held.whole.new_empty(layout.sizes[ranks.position] * ranks.size)
        held.work = ranks.exchange(held.given, layout.sizes, held.received)

    def _average(self, held: _PieceBucket) -> None:
        """Waits for the sum inside the node, and starts the average between nodes."""
        self._wait(held.work, held.whole)
        self._taken += 1
        with torch.no_grad():
            held.memory = held.whole.new_zeros(max(1, *held.layout.sizes))
            own = held.received.view(self._ranks.size, -1)
            mean = own.float() if own.dtype in _SUMMED_IN_FLOAT32 else own
            held.memory[: own.shape[1]] = mean.sum(0).div_(self._ranks.size)
        held.outcome = self._inner.take(cast(GradBucket, held))

    def _finish(self) -> None:
        if self._most_norm is not None:
            self._clip(self._most_norm)
            for one in self._held:
                self._send(one)
        for one in self._held[self._taken :]:
            self._average(one)
        gathered = []
        for one in self._held:
            assert one.outcome is not None
            try:
                one.outcome.wait()
            except Exception as error:
                raise self._failure() or error from None
            rows = one.memory.new_empty(self._ranks.size, one.memory.numel())
            gathered.append((one, rows, self._ranks.gather(one.memory, rows)))
        for one, rows, work in gathered:
            self._wait(work, one.whole)
            with torch.no_grad():
                for source, position, place in one.layout.moves:
                    one.whole[source] = rows[position, place]
            one.future.set_result(one.whole)
        self._is_open, self._held = False, []
        self._ranks.tell_end()

    def _clip(self, most: float) -> None:
        """In the order of names, as DDP rebuilds its buckets and a restored state must clip as the one before."""
        gradients = {name: held.whole[one] for held in self._held for name, one in held.layout.whole.items()}
        ordered = [gradients[name] for name in sorted(gradients) if gradients[name].numel()]
        factor = clip_tensors(ordered, most, self._unit_of(self._held[0].whole))
        if not on_device(factor):
            self._stats.clipped_steps += float(factor) < 1

    def _wait(self, work: Any, like: Tensor) -> None:
        """Raises ``TransportError`` also where a rank that this one does not wait for here has failed."""
        ends = self._ends
        assert ends is not None
        if on_device(like) or work.is_completed():
            work.wait()
            return
        over = threading.Event()
        for one in (work.get_future(), ends):
            one.add_done_callback(lambda _: over.set())
        over.wait()
        if self._lost and not work.is_completed():
            raise self._lost[0]
        try:
            work.wait()
        except RuntimeError as error:  # of torch, which does not say whom it has lost
            is_known = threading.Event()
            ends.add_done_callback(lambda _: is_known.set())
            is_known.wait(_PATIENCE_S)
            text = f"rank {self._ranks.rank}: an operation inside of its node has failed: {error}"
            raise (self._lost or [TransportError(text, rank=self._ranks.rank)])[0] from error
