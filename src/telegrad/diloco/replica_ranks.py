"""Which replicas take part, where they come and go. And replicas of several ranks: which rank exchanges which
parameters, and how the others of its replica get them.

Each of these ranks talks to the ranks at its own position in the other replicas. Then it gives the result to its
replica. All ranks of all replicas agree on a round before any applies it. A ReplicaGroup has a replica as one member:
its ranks agree by their process group whether an exchange has failed, so that none goes on alone.
"""

from __future__ import annotations

import math
import sys
import uuid
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ReduceOp, all_gather_object, all_reduce, get_process_group_ranks, get_rank
from torch.distributed.tensor import DTensor, Shard

from telegrad.communicator import Communicator
from telegrad.communicator.membership import Membership
from telegrad.communicator.nodes import process_mark
from telegrad.communicator.rendezvous.store_exchange import StoreExchange
from telegrad.communicator.torch_terms import first_line
from telegrad.communicator.work import check_timeout
from telegrad.compress.arguments import checked_count, checked_whole
from telegrad.ddp.node_ranks import check_places
from telegrad.diloco.fragment import local_of, on_device_of, on_host


def reshard(model: nn.Module) -> None:
    """Frees whole parameters that ``fully_shard`` keeps, as after an evaluation: they would not follow their shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import
    for one in model.modules() if fsdp is not None else ():
        if isinstance(one, fsdp.FSDPModule):
            one.reshard()


class ReplicaGroup(Membership):
    """Lets DiLoCo go on when replicas are lost, and take in others: give it to DiLoCo instead of a Communicator.

    A replica that is killed, or frozen for longer than ``liveness_timeout_s``, costs its own round only. One that
    comes later, or wakes up, takes the parameters, the outer optimizer's state and the round over from a peer, and
    takes part from the next round. Train until ``diloco.rounds`` is large enough, as replicas take different numbers
    of steps then.

    A replica of several ranks comes and goes as a whole. If one of them is killed, or while they join is silent for
    longer than ``liveness_timeout_s`` and ``join_timeout_s`` together, the others raise ``TransportError``,
    ``RendezvousError`` or torch's own error: start all of them again.

    - ``store``: a ``torch.distributed.Store`` that outlives the replicas, as a TCPStore that none of them serves.
    - ``replicas``: so many make the first group; any number can follow.
    - ``name``: of this run, which no earlier one in the store has had.
    - ``timeout_s``: the limit of each operation, and of the wait for the others. ``join_timeout_s``: of the connections
      of a group that was agreed on. ``liveness_timeout_s`` and ``interface``: as for ``Communicator.from_torch``.

    Raises ``TypeError`` and ``ValueError`` for bad arguments.
    """

    def __init__(
        self,
        store: Any,
        replicas: int,
        *,
        name: str = "replicas",
        timeout_s: float = 1800.0,
        liveness_timeout_s: float = 8.0,
        join_timeout_s: float = 30.0,
        interface: str | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store is a {type(store).__name__}: give a torch.distributed.Store, as a TCPStore")
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a str: one for each run")
        replicas = checked_whole(replicas, "replicas", 1, None, "how many make the first group")
        limit_s, join_s = check_timeout(timeout_s, "timeout_s"), check_timeout(join_timeout_s, "join_timeout_s")
        limits = {"timeout_s": limit_s, "liveness_timeout_s": check_timeout(liveness_timeout_s, "liveness_timeout_s")}
        prefix, others = f"telegrad/{name}", {"join_timeout_s": join_s, "store_timeout_s": limit_s}
        super().__init__(store, prefix, first=replicas, who="replica", **limits, **others)
        self._options: dict[str, Any] = {**limits, "interface": interface}
        self._stays = True

    def begin(self, replica: Any, error: Exception | None) -> None:
        """Raises ``error``, or that of another rank of the replica. ``replica``: the process group of its ranks, which
        all call this; they come and go together from now on."""
        if not isinstance(replica, ProcessGroup):
            self.stand_for("", 0, ())
            if error is not None:
                raise error
            return
        told = told_inside(replica, (process_mark(), uuid.uuid4().hex, error and str(error)))
        if error is not None:
            raise error
        for rank, (*_, other) in enumerate(told):
            if other is not None:
                raise ValueError(f"rank {rank} of this replica: {other}")
        self.stand_for(told[0][1], replica.rank(), [mark for mark, *_ in told])

    def regroup(self, *, admit: bool) -> tuple[Communicator, bool]:
        """The communicator of the next group, and whether this replica was in the last one. ``admit``: those that wait
        are taken in too. Raises ``RendezvousError`` where the store or all others are gone."""

        def connect(rank: int, size: int, exchange: StoreExchange) -> Communicator:
            made = Communicator.from_exchange(rank, size, exchange, **self._options)
            try:
                self.check_all_connected()
            except BaseException:
                made.close()
                raise
            return made

        return self.agree(connect, admit=admit)


class ReplicaRanks:
    """The ranks of one replica, of which this is one. Parameters that are whole on all of them have an owner each, so
    that all own about as many entries; of sharded ones each rank owns its shard.

    ``replica``: their process group, or how many consecutive ranks of ``comm`` one replica has. ``comm``: of all ranks;
    ``None``: a ReplicaGroup makes it. Raises ``TypeError`` and ``ValueError`` for what is neither.
    """

    def __init__(self, replica: Any, comm: Communicator | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self._inner = replica
        self._made: list[Communicator] = []
        if isinstance(replica, ProcessGroup):
            members = get_process_group_ranks(replica)
            self.size, self.position, self._first = len(members), get_rank(replica), members[0]
        elif comm is None:
            raise ValueError(
                f"replica={replica!r} with a ReplicaGroup: give the process group of this replica's ranks, which has "
                "no others"
            )
        else:
            self.size = checked_count(replica, "replica")
            if self.size < 1 or comm.world_size % self.size:
                raise ValueError(
                    f"replica={replica} must divide the {comm.world_size} ranks of comm: how many train one replica"
                )
            self._first, self.position = divmod(comm.rank, self.size)
        if comm is not None:
            self.comm, self.rank = comm, comm.rank
        self._parameters = dict(parameters)
        self._owners: dict[str, int] = {}
        owned = [0] * self.size
        for name, one in sorted(parameters.items(), key=lambda pair: -pair[1].numel()):
            if not _is_sharded(one):
                self._owners[name] = int(np.argmin(owned))
                owned[self._owners[name]] += one.numel()

    def alike(self, config: Mapping[str, str]) -> dict[str, str]:
        """What all ranks must have alike, beside ``config``."""
        shapes = {name: (str(one.dtype), tuple(one.shape)) for name, one in self._parameters.items()}
        return {"parameters that require a gradient": str(shapes), **config, "ranks of a replica": str(self.size)}

    def owned(self) -> dict[str, nn.Parameter]:
        """What this rank exchanges with the ranks at its position in the other replicas."""
        own = [name for name in self._parameters if self._owners.get(name, self.position) == self.position]
        held = {name: self._parameters[name] for name in own}
        return {name: one for name, one in held.items() if local_of(one.detach()).numel()}

    def use(self, comm: Communicator) -> None:
        """All ranks of a ReplicaGroup have this one from now on."""
        self.comm, self.rank, self._first = comm, comm.rank, comm.rank - self.position
        self._made.append(comm)

    def worst(self, code: int) -> tuple[int, str]:
        """The largest of the replica's ranks, which all call this; 2, and why, if one of them is lost."""
        told = torch.tensor([code], device=next(iter(self._parameters.values())).device)
        try:
            all_reduce(told, ReduceOp.MAX, group=self._inner)
        except RuntimeError as error:
            return 2, f"the process group of this replica has failed, so start all its ranks again: {first_line(error)}"
        return int(told), ""

    def connect(self) -> Communicator:
        """The communicator of the ranks at this position. All ranks of ``comm`` call it. Raises ``ValueError`` unless
        each of them is in one replica."""
        comm = self.comm
        self._places = check_places(comm, self._first, self.position, self.size, "replica")
        for color, key in ((self.position, self._first), (self._first, self.position)):
            made = comm.split(color, key)
            assert made is not None
            self._made.append(made)
        across, self._inside = self._made[-2:]
        return across

    def agree(self, own: Iterable[int], names: Iterable[str], *, verify: bool) -> list[tuple[str, npt.NDArray[Any]]]:
        """Waits for all ranks, and returns what must be one row each: of each position what its ranks gave, and with
        ``verify`` of each replica the checksum of its parameters of these names."""
        found = 0
        for name in names if verify else ():
            if name in self._owners:
                found = zlib.crc32(_bytes_of(self._parameters[name]).numpy().data, found)
        told = self.comm.all_gather(np.array([*own, found], np.int64)).reshape(self.comm.world_size, -1)
        ranks = np.arange(len(told))[:, None]
        firsts, positions = self._places.T
        common, own = np.hstack([ranks, told[:, :-1]]), np.hstack([ranks, told[:, -1:]])
        made = [("", common[positions == one]) for one in range(self.size)]
        return made + [("replica", own[firsts == one]) for one in np.unique(firsts)]

    def begin_alike(self, model: nn.Module) -> None:
        """As DistributedDataParallel does: all that is whole on all ranks of the replica is that of position 0."""
        for one in (*model.parameters(), *model.buffers()):
            if not _is_sharded(one):
                held = _bytes_of(one)
                if held.numel():
                    self._inside.broadcast(held, 0)
                    _write(one, held)

    def spread(self, names: Iterable[str], buffers: Iterable[Tensor]) -> None:
        """The owners' parameters of these names, and the buffers of position 0, to all ranks of the replica."""
        of_owners: list[list[Tensor]] = [[] for _ in range(self.size)]
        for name in names:
            if name in self._owners:
                of_owners[self._owners[name]].append(self._parameters[name].detach())
        of_owners[0] += buffers
        for owner, held in enumerate(of_owners):
            sizes = [math.prod(one.shape) * one.element_size() for one in held]
            if not sum(sizes):
                continue
            flat = torch.cat([_bytes_of(one) for one in held])
            self._inside.broadcast(flat, owner)
            if owner != self.position:
                for one, values in zip(held, torch.split(flat, sizes), strict=True):
                    _write(one, values.clone())

    def abort(self, reason: str) -> None:
        """Ends what any rank waits for."""
        for one in {self.comm, *self._made}:
            one.abort(reason)

    def close(self) -> None:
        """Closes what ``connect()`` has made, and what a ReplicaGroup has."""
        for one in self._made:  # ranks that wait in one of them would not come to close another one
            one._part()
        while self._made:
            self._made.pop().close()


def told_inside(replica: ProcessGroup, own: Any) -> list[Any]:
    """Gathers ``own`` of all ranks of this replica, by rank. All of them call it."""
    told: list[Any] = [None] * replica.size()
    all_gather_object(told, own, group=replica)
    return told


def _is_sharded(one: Tensor) -> bool:
    return isinstance(one, DTensor) and any(isinstance(placement, Shard) for placement in one.placements)


@torch.no_grad()
def _write(one: Tensor, values: Tensor) -> None:
    own = local_of(one)
    own.copy_(on_device_of(own, values.view(own.dtype).view(own.shape)))


def _bytes_of(one: Tensor) -> Tensor:
    return on_host(local_of(one.detach())).contiguous().reshape(-1).view(torch.uint8)
