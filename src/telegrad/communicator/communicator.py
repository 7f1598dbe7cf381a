"""Communicator: the ranks of a job and the collectives between them, in the manner of torch.distributed."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import stat
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from telegrad import _core
from telegrad.communicator import base
from telegrad.communicator.base import CommunicatorCounts
from telegrad.communicator.cuda.nccl import NcclSums, SumGroup, check_setting, nccl_group
from telegrad.communicator.groups import (
    OF_JOB,
    InheritedOptions,
    check_job_ranks,
    checked_color,
    checked_key,
    connect,
    group_of,
    join_core,
    ranks_in_job,
    share,
    stall_s,
)
from telegrad.communicator.moves import Moves, PointToPoint
from telegrad.communicator.nodes import checked_node, checked_nodes, numbered
from telegrad.communicator.operands import checked_integer
from telegrad.communicator.reductions import DENSE_ALGORITHMS, Reductions, algorithm_of
from telegrad.communicator.rendezvous.joining import Exchange, Peers, check_interface, find_peers
from telegrad.communicator.rendezvous.mpi import find_mpi_peers
from telegrad.communicator.rendezvous.network_choice import MEMORY, agree, alone
from telegrad.communicator.rendezvous.store_exchange import StoreExchange
from telegrad.communicator.topk import TopkReductions
from telegrad.communicator.tuning import AUTO, TuningAgreement, checked_tuning, network_costs
from telegrad.communicator.work import check_timeout
from telegrad.cost import Place, Tuning
from telegrad.cost.tuning import HOST_TRANSFER, NCCL
from telegrad.errors import RendezvousError

if TYPE_CHECKING:
    from telegrad.communicator.membership import Membership

FOLDER = "TELEGRAD_REPORT_DIR"
"""Names the folder; every rank of a job can share one."""
SIGNAL = "TELEGRAD_REPORT_SIGNAL"
"""Names the signal (``SIGUSR1`` if unset), or says ``none``."""


def report_folder() -> str:
    """The folder that reports are written to: ``TELEGRAD_REPORT_DIR``, else one of this user in the system's temporary
    folder. It is made here, so that nobody else can do so later. Empty, after a warning, if it cannot be used."""
    chosen = os.environ.get(FOLDER)
    folder = chosen or os.path.join(tempfile.gettempdir(), f"telegrad-reports-{os.getuid()}")
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        warnings.warn(
            f"hanging operations leave no reports, set {FOLDER} to a folder that can be made: {error}", stacklevel=2
        )
        return ""
    if chosen:
        return folder
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return folder
    warnings.warn(
        f"{folder} is not a folder that only you can write to, so hanging operations leave no reports: remove it, or "
        f"set {FOLDER}",
        stacklevel=2,
    )
    return ""


def report_signal() -> signal.Signals | None:
    """The signal that asks for reports; None if the user wants none. Raises ``ValueError`` for one that means
    something else."""
    name = os.environ.get(SIGNAL) or "SIGUSR1"
    if name.lower() == "none":
        return None
    known = {member.name: member for member in signal.Signals}
    chosen = known.get(name.upper()) or known.get(f"SIG{name.upper()}")
    if chosen is None or not (chosen in (signal.SIGUSR1, signal.SIGUSR2) or chosen >= signal.SIGRTMIN):
        raise ValueError(f"{SIGNAL}={name!r} has another meaning: use SIGUSR1, SIGUSR2, SIGRTMIN or none")
    return chosen


def report_on_signal() -> None:
    """From now on the signal makes the engine write a report of every communicator of this process.

    A handler that was there before still runs; one that is installed later replaces ours."""
    chosen = report_signal()
    if chosen is not None:
        _core.report_on_signal(chosen)


ENGINE_CORE = "TELEGRAD_ENGINE_CORE"
"""The number of the core that the engine's thread stays on. Unset: the kernel chooses, which is best unless a core is
kept free for it. Ranks of one host each want another core, so their launcher has to set it for each."""


def bind_engine() -> None:
    """The engine that the process's next communicator starts stays on the core of ``TELEGRAD_ENGINE_CORE``.

    Threads that wait in a blocking call run where they are: they do the engine's work themselves. Raises
    ``ValueError`` if this process may not use that core."""
    _core.set_engine_core(_chosen_core(os.environ.get(ENGINE_CORE, "")))


def _chosen_core(text: str) -> int:
    if not text:
        return -1
    allowed = sorted(os.sched_getaffinity(0))
    if text.isdecimal() and int(text) in allowed:
        return int(text)
    raise ValueError(
        f"{ENGINE_CORE}={text!r} is no core that this process may use: use one of {', '.join(map(str, allowed))}, or "
        "unset it"
    )


PROOFS = ("TELEGRAD_JOB_KEY", "TELEGRAD_JOB_KEY_FILE", "TELEGRAD_INTEGRITY")
"""The environment variables that ask for proofs of who sends what (docs/explanation/security.md)."""
_MOST_LOCAL_RANKS = 1 << 16


class Communicator(Reductions, TopkReductions, Moves, PointToPoint):
    """One rank's membership in a group of ranks. Made by ``from_torch()``, ``from_mpi()`` or ``local()``.

    All ranks call the same operations in the same order; ``send``, ``recv`` and ``sendrecv`` concern two ranks only. An
    operation checks its arguments before anything is sent (``TypeError``, ``ValueError``). If a peer or the network
    fails it raises ``TransportError`` or a subclass, which names the same failed rank on all survivors. Call
    ``shrink()`` then, or ``close()``. Tensors are torch's or numpy's in host memory, contiguous, and not
    copied. Dense ``all_reduce``, ``broadcast``, ``reduce_scatter``, ``all_gather``, ``send``, ``recv`` and ``sendrecv``
    also take CUDA tensors. They return at once, and a CUDA stream waits (docs/explanation/gpu.md). The interpreter's
    exit closes an open communicator. After ``os.fork()`` the child cannot use it."""

    _place: Place | None = None
    _nodes: tuple[int, ...] = ()
    _processes: tuple[str, ...] = ()
    _membership: Membership | None = None
    _can_grow = False

    def __init__(self, core: _core.Communicator, options: InheritedOptions | None = None) -> None:
        """For telegrad's own use: ``core`` has joined; ``options`` are what sub-communicators take over."""
        super().__init__(core)
        self._options = InheritedOptions() if options is None else options
        self._groups: weakref.WeakSet[Communicator] = weakref.WeakSet()  # that were split from this one
        group = self._options.device_group
        self._nccl = None if group is None else NcclSums(group, self._options.device_algorithm, self.rank)

    @classmethod
    def from_torch(
        cls,
        group: Any = None,
        *,
        timeout_s: float = 1800.0,
        liveness_timeout_s: float | None = 8.0,
        interface: str | None = None,
        join_timeout_s: float = 300.0,
        tuning: Tuning | str | None = AUTO,
        node: str | int | None = None,
        device_algorithm: str = AUTO,
    ) -> Communicator:
        """Joins the ranks of a torch process group (``None``: the whole job), which all call this.

        It works inside ``torchrun`` and ``srun``, with or without ``torch.distributed``, on any number of nodes. Under
        srun it sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, unless they are set. If Slurm does not
        tell the host of rank 0, an error asks for MASTER_ADDR. Errors of a smaller group also give ranks of the job
        (``parent_peer``).

        - ``timeout_s``: the limit of each operation. ``join_timeout_s``: the limit of the wait for peers.
        - ``liveness_timeout_s``, the same on all ranks: a process that is silent for longer has failed. ``None``:
          never, for debuggers. ``interface``: the network interface, or several.
        - ``tuning``: chooses the algorithms of calls that name none. ``"auto"``: what ``telegrad calibrate`` has kept
          for these hosts and ranks, looked up by rank 0. ``None``: the built-in choice. Or a ``Tuning``. All ranks use
          rank 0's; naming another is a ``ValueError`` on all ranks.
        - ``node``: ranks that give the same name or number share a node. ``None``: ``TELEGRAD_NODE``, or ranks that can
          share memory.
        - ``device_algorithm``, the same on all ranks: how dense sums of CUDA tensors are computed. ``"auto"``: by NCCL
          if ``group`` has it and no two ranks share a GPU, unless a calibration found ``"host_transfer"`` faster for
          the size. ``"nccl"``: always (``ValueError`` if it cannot). ``"host_transfer"``: never by NCCL.

        Raises ``RendezvousError`` if no peers are found, ``TransportError`` if one fails meanwhile, ``ImportError``
        without torch or UCX, ``ValueError`` for bad arguments."""
        _checked_options(timeout_s, liveness_timeout_s, interface, node)
        join_timeout_s = check_timeout(join_timeout_s, "join_timeout_s")
        checked_tuning(tuning)
        device_group = nccl_group(group, check_setting(device_algorithm))
        peers = find_peers(group, join_timeout_s=join_timeout_s)
        job_ranks: Sequence[int] = ()
        if group is not None:
            import torch.distributed as dist  # find_peers() has imported it

            job_ranks = ranks_in_job(dist.get_process_group_ranks(group), dist.get_world_size())
        made = cls.from_exchange(
            peers.rank,
            peers.size,
            peers.exchange,
            timeout_s=timeout_s,
            liveness_timeout_s=liveness_timeout_s,
            interface=interface,
            tuning=tuning,
            node=node,
            device_algorithm=device_algorithm,
            device_group=device_group,
            job_ranks=job_ranks,
        )
        made._found(peers, join_timeout_s)
        return made

    @classmethod
    def from_exchange(
        cls,
        rank: int,
        size: int,
        exchange: Exchange,
        *,
        timeout_s: float = 1800.0,
        liveness_timeout_s: float | None = 8.0,
        interface: str | None = None,
        tuning: Tuning | str | None = AUTO,
        node: str | int | None = None,
        device_algorithm: str = AUTO,
        device_group: SumGroup | None = None,
        job_ranks: Sequence[int] = (),
    ) -> Communicator:
        """Joins ``size`` ranks that find each other by ``exchange``.

        ``exchange`` takes this rank's bytes and returns every rank's, by rank. It is called once. If it has a true
        attribute ``repeats`` it may be called several times. The hosts then choose their network interfaces together,
        by the route to its ``address``, if it has one (docs/explanation/networks.md). ``device_group``: the same ranks'
        group, whose NCCL may sum CUDA tensors (``telegrad.communicator.cuda.nccl.TorchGroup(group)``), or ``None`` on
        all ranks. ``job_ranks``: by rank the number in the job, for errors; empty: the same. Other arguments and errors
        are those of ``from_torch``."""
        options = _checked_options(timeout_s, liveness_timeout_s, interface, node)
        if check_setting(device_algorithm) == NCCL and device_group is None:
            raise ValueError("device_algorithm='nccl' needs a device_group of NCCL's: give one, or 'auto'")
        rank, size = checked_integer(rank, "rank"), checked_integer(size, "size")
        if not callable(exchange):
            raise TypeError(
                f"exchange={exchange!r} must be callable: it takes this rank's bytes and returns every rank's"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} of size={size} is no rank: use an int in [0, size)")
        check_job_ranks(job_ranks, size)
        if not hasattr(_core.Communicator, "ucx"):
            raise ImportError(
                "this telegrad was built without UCX (TELEGRAD_UCX=none), so it reaches no other process: install "
                "it again with `pip install .` (bundles UCX) or `pip install . -C cmake.define.TELEGRAD_UCX=system`"
            )
        options = replace(
            options,
            group=OF_JOB if job_ranks else "",
            device_algorithm=device_algorithm,
            device_group=None if device_algorithm == HOST_TRANSFER else device_group,
        )
        return cls._join(rank, size, exchange, tuning, options, job_ranks)

    @classmethod
    def from_mpi(
        cls,
        comm: Any,
        *,
        driver: str = "mpi",
        timeout_s: float = 1800.0,
        liveness_timeout_s: float | None = 8.0,
        interface: str | None = None,
        join_timeout_s: float = 300.0,
        tuning: Tuning | str | None = AUTO,
        node: str | int | None = None,
    ) -> Communicator:
        """Joins the ranks of an intracommunicator of mpi4py, such as ``MPI.COMM_WORLD``; they all call this.

        ``driver="mpi"`` sends everything over MPI, on a duplicate of ``comm``: for machines whose fabric only MPI
        reaches. It needs ``MPI.THREAD_MULTIPLE``, which mpi4py asks for by default, and the MPI that telegrad was built
        with. ``driver="ucx"`` uses MPI only to find the peers, and is faster where it works. ``interface`` is for
        ``"ucx"``; the other arguments are those of ``from_torch``. Close the communicator before ``MPI.Finalize()``.

        Raises ``TypeError`` or ``ValueError`` for bad arguments and for ``"mpi"`` with a job's key, ``ImportError``
        without a driver for this MPI, and ``RendezvousError`` if MPI is not running. Raises ``TransportError`` below
        ``THREAD_MULTIPLE``, and if a peer fails or does not join. See docs/how-to/mpi.md."""
        options = _checked_options(timeout_s, liveness_timeout_s, interface, node)
        join_timeout_s = check_timeout(join_timeout_s, "join_timeout_s")
        checked_tuning(tuning)
        if driver == "mpi" and interface is not None:
            raise ValueError(
                f"interface={interface!r} is for driver='ucx': MPI chooses its network by its own settings"
            )
        if driver == "mpi" and (asked := [one for one in PROOFS if os.environ.get(one, "0") != "0"]):
            raise ValueError(
                f"{asked[0]} is set, but MPI's connections prove no key and check no payloads: unset it, or give "
                "driver='ucx'"
            )
        peers = find_mpi_peers(comm, driver=driver, join_timeout_s=join_timeout_s)
        options = replace(options, make_driver=peers.make_driver)
        return cls._join(peers.rank, peers.size, peers.exchange, tuning, options)

    @classmethod
    def _join(
        cls,
        rank: int,
        size: int,
        exchange: Exchange,
        tuning: Tuning | str | None,
        options: InheritedOptions,
        job_ranks: Sequence[int] = (),
    ) -> Communicator:
        if base.forked_from_joined and options.make_driver is None:
            raise RendezvousError(
                "this process was forked from one that had a Communicator, and UCX works in that one only: start child "
                "processes with the 'spawn' method"
            )
        agreement = TuningAgreement(
            rank, size, exchange, checked_tuning(tuning, size), options.interface, options.driver, options.node
        )
        bind_engine()
        report_on_signal()
        if options.driver == "ucx" and size > 1:
            options = replace(options, devices=_network_devices(rank, exchange, options.interface))
        core = join_core(rank, size, agreement.swap, options, report_folder(), options.group, job_ranks)
        if core.warning:
            warnings.warn(core.warning, RuntimeWarning, stacklevel=3)
        communicator = cls(core, replace(options, tuning=None if agreement.is_built_in else AUTO))
        communicator._place, communicator._processes = agreement.place, agreement.processes
        communicator._use_nodes(agreement.nodes)
        communicator.use(agreement.tuning)
        return communicator

    @classmethod
    def local(cls, n: int, *, timeout_s: float = 1800.0, nodes: Sequence[int] | None = None) -> list[Communicator]:
        """``n`` ranks inside this process: for tests, and to try things out. ``nodes``: as if each rank lived on the
        node of that name or number; ``None``: all on one.

        Use each from its own thread, or all from one thread with ``async_op=True``. Raises ``TypeError`` or
        ``ValueError`` for bad arguments."""
        n = checked_integer(n, "n", "an int: the number of ranks")
        if n < 1:
            raise ValueError(f"n={n} must be at least 1: the number of ranks")
        if n > _MOST_LOCAL_RANKS:
            raise ValueError(f"n={n} must be at most {_MOST_LOCAL_RANKS}: they are all of this process")
        timeout_s = check_timeout(timeout_s, "timeout_s")
        numbers = checked_nodes(nodes, n)
        bind_engine()
        report_on_signal()
        cores = _core.Communicator.local(n, timeout_s, report_folder(), stall_s=stall_s())
        made = [cls(core, InheritedOptions(timeout_s)) for core in cores]
        for communicator in made:
            communicator._use_nodes(numbers)
        return made

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that give the same ``color``; every rank of this one calls it, and waits.

        ``color``: an int in [0, 2⁶³), or ``None``: this rank joins no group, and gets ``None``. Ranks are numbered in
        the order of ``key``, then of their ranks here. The new communicator has connections and failures of its own:
        what ends one leaves the other usable, but a process that dies ends both. Timeouts and interface are those of
        this one. It uses NCCL for device tensors if this one does, and all ranks are in it in their order. Its tuning
        is the one kept for its hosts and ranks, else one from this communicator's costs, else the built-in choice. Its
        errors say ``split(color=…)`` and the ranks' numbers here. Both may be used side by side and closed in any
        order, each in the same order on all its ranks. Raises ``TypeError`` or ``ValueError`` for bad arguments and in
        the simulator, ``TransportError`` if a rank fails."""
        chosen, order = checked_color(color), checked_key(key)
        self._usable()
        if self.driver == "sim":
            raise ValueError(
                "split() waits for all ranks, which one thread cannot: make a sim.World of the group's size"
            )
        group = group_of(self.rank, chosen, order, self.all_gather)
        make = share if self.driver == "local" else connect
        joined = make(group, self.all_gather, self._options, report_folder())
        if joined is None or group is None:
            return None
        is_whole = group.members == [*range(self.world_size)]
        options = replace(
            self._options,
            group=group.name_in(self._options.group),
            device_group=self._options.device_group if is_whole else None,
        )
        child = type(self)(joined.core, options)
        child._counts = CommunicatorCounts(joined.core, self._counts, group.members)
        child._place = joined.place
        self._groups.add(child)
        child._use_nodes(numbered([self.nodes[member] for member in group.members]))
        child.use(joined.tuning or self._tuning_of_part(child))
        return child

    def _split_own(self) -> Communicator:
        """Of the same ranks, for what exchanges by itself beside its owner's calls: it is over when this one is."""
        own = self.split(0, self.rank)
        assert own is not None
        self._dependents.add(own)
        return own

    def _tuning_of_part(self, child: Communicator) -> Tuning | None:
        if self._tuning is None:
            return None
        own_process = Place(child.driver, ((socket.gethostname(), child.world_size),))
        return self._tuning.for_part(
            child.place or own_process, one_node=len(set(child.nodes)) == 1, shares_memory=child._usable().shares_memory
        )

    def shrink(self) -> tuple[int, ...]:
        """After a ``TransportError``: this communicator works again, of the ranks that are left, in their order.
        Returns for each of them its rank until now.

        All survivors call it, within ``liveness_timeout_s`` of each other: ranks that do not count as lost, too. If
        another one is lost meanwhile, the others agree again. Options are kept, and the tuning's costs for the new
        number of ranks. Counters begin anew. Groups made by ``split`` are closed: split again. CUDA sums go through
        host memory from now on, as torch's NCCL group still has the lost rank. It needs the store by which
        ``from_torch()`` or ``telegrad.join()`` found the peers, served by a process that is left.

        A tensor that a failed operation was to write may hold a part of the result. Tensors that it only reads are
        unchanged.

        Raises ``RendezvousError`` where the store is gone, or the others have gone on without this rank: then
        ``close()``, and ``telegrad.join()`` anew. ``ValueError`` if nothing has failed, or there is no store."""
        self._checked_membership("shrink")
        failure = self.report()["failure"]
        if failure is None:
            raise ValueError("shrink() is for a communicator that has failed, and this one works: go on with it")
        return self._regroup(admit=False, blamed=failure["peer"])[0]

    def grow(self, n: int, *, timeout_s: float = 300.0) -> int:
        """Takes ``n`` processes in, or more, that wait in ``telegrad.join()``; returns how many came. All ranks call it
        between two operations. ``n=0``: those that wait now, if any.

        Newcomers get the last ranks. Groups made by ``split`` are closed. A rank that is lost meanwhile is left out.
        Raises ``RendezvousError`` on all ranks if not so many come within ``timeout_s``, or the store is gone; then
        nothing has changed. ``TypeError`` and ``ValueError`` for bad arguments, and where there is no store."""
        n, timeout_s = checked_integer(n, "n"), check_timeout(timeout_s, "timeout_s")
        if n < 0:
            raise ValueError(f"n={n} must be at least 0: how many processes are taken in")
        membership = self._checked_membership("grow")
        if not self._can_grow:
            raise ValueError("grow() is for the first communicator of all ranks of the job, which newcomers look for")
        found, why = np.zeros(1, np.int64), ""
        if self.rank == 0:
            try:
                found[0] = membership.wait_for(n, timeout_s)
            except RendezvousError as error:
                found[0], why = -1, str(error)
        self.broadcast(found, 0)
        if found[0] < n:
            text = why or f"{found[0]} processes have asked to join, and n={n} are wanted within {timeout_s:g} s"
            if found[0] < 0 and not why:
                text = "rank 0 has lost the store of the job, so nobody can join"
            raise RendezvousError(text, rank=self.rank, operation="grow")
        return self._regroup(admit=True)[0].count(-1) if found[0] else 0

    def _found(self, peers: Peers, join_timeout_s: float) -> None:
        """From now on ranks may be lost and come."""
        from telegrad.communicator.membership import Membership

        session = peers.exchange.session
        options, prefix = self._options, f"{peers.prefix}/members/{session}"
        told: dict[str, Any] = {"timeout_s": options.timeout_s, "liveness_timeout_s": options.liveness_timeout_s}
        self._membership = Membership(
            peers.exchange.store,
            f"members/{session}",
            **told,
            join_timeout_s=join_timeout_s,
            store_timeout_s=join_timeout_s,
        )
        self._can_grow = peers.is_first
        self._membership.found(self.rank, self._processes, told=json.dumps(told) if peers.is_first else "")
        if peers.is_first and self.rank == 0:
            peers.exchange.store.underlying_store.set(RUNNING.format(name="job"), prefix)

    def _checked_membership(self, call: str) -> Membership:
        self._usable()
        if self._membership is None:
            raise ValueError(
                f"{call}() needs a store that outlives its ranks, and this communicator has none: make it with "
                "from_torch() or telegrad.join(). A group of split() is split anew from its parent; MPI ends all ranks "
                "with one"
            )
        return self._membership

    def _regroup(
        self, *, admit: bool, blamed: int | None = None, rejoins: bool = False
    ) -> tuple[tuple[int, ...], bool]:
        """This communicator is of the next group. Returns the earlier ranks, -1 for newcomers, and whether this process
        was in the last group; see ``Membership.agree``."""
        membership = self._membership
        assert membership is not None
        for group in list(self._groups):
            group.close()
        self._part()
        device_algorithm = AUTO if self._options.device_algorithm == NCCL else self._options.device_algorithm
        options = replace(self._options, devices=None, group="", device_group=None, device_algorithm=device_algorithm)
        connect = functools.partial(_connected, type(self), membership, options, self._tuning)
        membership.hear_by(self)
        new, was_member = membership.agree(connect, admit=admit, blamed=blamed, rejoins=rejoins)
        can_grow = self._can_grow
        self.close()
        base.closed(new)
        self.__dict__.update(new.__dict__)
        base.opened(self)
        self._membership, self._can_grow = membership, can_grow
        return membership.kept, was_member

    @property
    def tuning(self) -> Tuning | None:
        """The tuning that chooses the algorithms of calls that name none; ``None``: the built-in choice."""
        return self._tuning

    @property
    def place(self) -> Place | None:
        """The hosts and network that a tuning of this communicator is for; ``None`` for ranks of one process."""
        return self._place

    @property
    def interface(self) -> str | None:
        """The network interfaces that this rank uses, separated by commas: those that it was told, or those that the
        hosts have chosen. ``None``: UCX chooses, or none, as among ranks of one host."""
        return self._options.interface or (None if self._options.devices == MEMORY else self._options.devices)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's node, by rank, the same on all ranks. ``algorithm="two_level"`` and the choice of
        algorithms use it."""
        return self._nodes or (0,) * self.world_size

    def _use_nodes(self, nodes: tuple[int, ...]) -> None:
        self._nodes = nodes
        self._usable().use_nodes(list(nodes))

    def use(self, tuning: Tuning | None) -> None:
        """Chooses algorithms by ``tuning`` from now on (``None``: the built-in choice).

        All ranks do so between the same operations. Raises ``ValueError`` for a tuning of another number of ranks."""
        if isinstance(tuning, str):
            raise ValueError(
                f"tuning={tuning!r} is none: give a Tuning, or None (built-in); 'auto' is looked up as the ranks join, "
                "by from_torch() and from_exchange()"
            )
        checked_tuning(tuning, self.world_size)
        choices = tuning.allreduce.choices if tuning else ()
        self._usable().use_allreduce_table(
            [(choice.from_bytes, algorithm_of(choice.algorithm, DENSE_ALGORITHMS)) for choice in choices],
            network_costs(tuning.costs) if tuning else None,
            network_costs(tuning.within) if tuning and tuning.within else None,
            tuning.alone.beta_s_per_byte if tuning and tuning.alone else None,
        )
        self._tuning = tuning

    def report(self) -> dict[str, Any]:
        """The last operations of this rank and the state of its peers: who called which operation, and who waits for
        whom.

        Every rank writes the same to a file in ``TELEGRAD_REPORT_DIR`` when an operation times out, and when the
        process gets SIGUSR1 (``TELEGRAD_REPORT_SIGNAL`` names another signal, or ``none``). ``telegrad report`` merges
        the reports of all ranks (docs/how-to/hangs.md)."""
        report: dict[str, Any] = json.loads(self._usable().report())
        return report


RUNNING = "telegrad/running/{name}"
"""A store's key: where newcomers find the job of that name."""


def join(
    store: Any,
    ranks: int | None = None,
    *,
    name: str = "job",
    timeout_s: float = 1800.0,
    liveness_timeout_s: float | None = 8.0,
    join_timeout_s: float = 300.0,
    interface: str | None = None,
    node: str | int | None = None,
) -> Communicator:
    """Joins a job by its store, at any time: the first ``ranks`` processes that call this make the job, and those that
    come later wait until ``grow()`` takes them in. Nobody numbers the processes.

    - ``store``: a ``torch.distributed.Store`` that outlives the ranks, as a TCPStore that none of them serves.
    - ``ranks``: ``None``: the job runs, or is going to. It may have been made by ``from_torch()`` with that store.
    - ``name``: of the job, which no earlier one in the store has had. That of ``from_torch()`` is ``"job"``.
    - ``timeout_s`` and ``liveness_timeout_s``, the same on all ranks; with ``ranks=None`` they are the job's.
    - ``join_timeout_s``: the limit of the wait for the job, and to be taken in. Others as for ``from_torch``.

    Raises ``RendezvousError`` if time is over, or the job has ended, ``TypeError`` and ``ValueError`` for bad
    arguments."""
    from telegrad.communicator.membership import Membership, running_job

    if not all(hasattr(store, one) for one in ("set", "get", "add", "check", "compare_set")):
        raise TypeError(f"store is a {type(store).__name__}: give a torch.distributed.Store, as a TCPStore")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} must be a str: one for each job")
    if ranks is not None and checked_integer(ranks, "ranks") < 1:
        raise ValueError(f"ranks={ranks} must be at least 1: how many make the job")
    options = _checked_options(timeout_s, liveness_timeout_s, interface, node)
    join_timeout_s = check_timeout(join_timeout_s, "join_timeout_s")
    told: dict[str, Any] = {"timeout_s": options.timeout_s, "liveness_timeout_s": options.liveness_timeout_s}
    prefix = f"telegrad/jobs/{name}"
    if ranks is None:
        prefix, told = running_job(store, RUNNING.format(name=name), join_timeout_s)
    limits: dict[str, Any] = dict.fromkeys(("join_timeout_s", "store_timeout_s", "wait_s"), join_timeout_s)
    membership = Membership(store, prefix, first=ranks, **told, **limits)
    connect = functools.partial(_connected, Communicator, membership, replace(options, **told), None)
    try:
        made, _ = membership.agree(connect, admit=False)
        if made.rank == 0:
            membership.tell(RUNNING.format(name=name), json.dumps(told))
    except BaseException:
        membership.leave()
        raise
    made._membership, made._can_grow = membership, True
    return made


def _connected(
    kind: type[Communicator],
    membership: Membership,
    options: InheritedOptions,
    tuning: Tuning | None,
    rank: int,
    size: int,
    exchange: StoreExchange,
) -> Communicator:
    """Of a group that has been agreed on, once all of it is there. ``tuning``: of the group before."""
    new = kind._join(rank, size, exchange, options.tuning, options)
    try:
        if tuning is not None and new._tuning is None and options.tuning is not None:
            new._tuning = tuning
            new._tuning = new._tuning_of_part(new)
        text = new.broadcast_state("" if new._tuning is None else new._tuning.to_json(), 0)
        new.use(Tuning.from_json(text) if text else None)
        new.barrier()  # then all have read the addresses
        if rank == 0:
            membership.clear(exchange)
    except BaseException as error:
        new.abort(f"{type(error).__name__} while the ranks connected")
        new._part()
        membership.hear_by(new, closes=True)
        raise
    return new


def _network_devices(rank: int, exchange: Exchange, interface: str | None) -> str | None:
    if getattr(exchange, "repeats", False):
        return agree(rank, exchange, interface, getattr(exchange, "address", None))
    return alone(interface)


def _checked_options(
    timeout_s: float, liveness_timeout_s: float | None, interface: str | None, node: str | int | None
) -> InheritedOptions:
    seconds = check_timeout(timeout_s, "timeout_s")
    silence = None if liveness_timeout_s is None else check_timeout(liveness_timeout_s, "liveness_timeout_s")
    check_interface(interface)
    return InheritedOptions(seconds, silence, interface, node=checked_node(node))
