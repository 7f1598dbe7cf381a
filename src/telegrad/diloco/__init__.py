"""DiLoCo: replicas train by themselves, and exchange what they have learnt every so many steps.

Sources: Douillard et al., arXiv 2311.08105 (DiLoCo) and 2501.18512 (Streaming DiLoCo); Sarfi et al., arXiv 2508.15706
(SparseLoCo)."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from telegrad.communicator import Communicator, Work
from telegrad.compress import BucketTopK
from telegrad.compress.arguments import checked_count, checked_whole
from telegrad.ddp.exchange import Exchange, check_used
from telegrad.ddp.options import Combine, Quantised, TopK, check_choice, compressor_of, encoding_of
from telegrad.ddp.rank_checks import check_alike, described
from telegrad.ddp.rank_state import MemoryOrders, checked_step, state_of
from telegrad.ddp.telemetry import DDPStats, StepRecord, Telemetry, check_telemetry, write_record
from telegrad.diloco.fragment import (
    Fragment,
    Streaming,
    crc_of,
    layer_of,
    layers_of,
    local_of,
    on_device_of,
    on_host,
)
from telegrad.diloco.replica_ranks import ReplicaGroup, ReplicaRanks, reshard
from telegrad.errors import NonFiniteGradient, RendezvousError, TransportError

_STEP_WRAPPER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
_FIRST_ROUND = "has {} made its DiLoCo, and taken as many steps?"
_LATER_ROUND = "all replicas take the same number of steps: has {} fewer batches, or has it skipped one?"
_of_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[DiLoCo]] = weakref.WeakKeyDictionary()

Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOuter = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes the outer optimizer of the parameters that it is given."""


def nesterov(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer. Source: arXiv 2311.08105, §3.1."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def plain(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SparseLoCo's outer optimizer: the decayed residual stands for its momentum. Source: arXiv 2508.15706."""
    return torch.optim.SGD(parameters, lr=1.0)


class DiLoCo:
    """Trains one replica of ``model`` on each rank, for networks on which an exchange in each step takes too long.

    Each replica trains with its own ``inner_optimizer``. After ``every`` steps of it, all replicas exchange how far
    their parameters have moved (the pseudo-gradient). An outer optimizer moves the common parameters by the average,
    and all replicas go on from there. The training loop stays as it is: the exchange happens inside of
    ``inner_optimizer.step()``. Call ``exchange()`` after the last step, and before you evaluate or save the model.

    ``model``: a module; of DistributedDataParallel its ``module``. Rank 0's parameters and buffers are copied to all
    ranks now; weights that you load later must be the same on all. ``comm``: a Communicator of one rank for each
    replica, or a ``telegrad.diloco.ReplicaGroup``, with which training goes on when replicas are lost and come.
    ``every``: inner steps in a round, at least 1; ``None``: you call ``exchange()``. ``outer``: called with the common
    parameters, returns an optimizer; ``None``: ``telegrad.diloco.nesterov``, or ``plain`` with a ``TopK``.
    ``compress``: what travels of a pseudo-gradient; a residual keeps the rest. ``None``: all. A ``TopK``: the largest
    entries. A ``Quantised`` of one format: all of it, rounded.
    ``decay``: what a residual is multiplied by in each round, in (0, 1]. ``verify``: the replicas compare a checksum
    of their parameters in every so many rounds; 0: never. A ReplicaGroup does in each.

    Two more options are for a ``TopK(combine="allgather")``, and for the tensors that it compresses. ``average``: the
    sum of an entry is divided by the number of ``"ranks"``, or by that of its ``"senders"``. ``clip="median"``: the
    values that a replica has sent of a tensor are scaled down to the median of all replicas' norms. Residuals do not
    keep what that takes away.

    ``streaming``: a ``telegrad.Streaming``. Fragments of the layers are exchanged in turn, while training goes on.
    ``None``: all layers at once, and training waits.

    ``replica``: for replicas of several ranks, which DistributedDataParallel or ``fully_shard`` trains. The process
    group of this rank's replica, or how many consecutive ranks of ``comm`` make one; ``comm`` has all ranks. Each rank
    exchanges its shards, or a part of the tensors, with the ranks at its position in the other replicas. The outer
    optimizer sees this part only, so it must step each parameter by itself, as SGD does. With a ReplicaGroup give a
    process group; then ``step()`` waits for a GPU's parameters where an exchange begins.

    ``telemetry``: a ``telegrad.ddp.JsonLines`` or ``TensorBoard``, whose steps are rounds then: how far the replica and
    the average have moved, the drift between them, residuals, bytes and seconds. ``telegrad report`` draws them.

    ``inner_optimizer``: one, or a list of several, as Muon and AdamW, each of which steps once in a step; the last to
    step exchanges. It keeps its state between rounds. Floating-point buffers, such as BatchNorm's statistics, are
    averaged with the fragment of their layer. All ranks give the same options, and take as many steps. A GradScaler
    skips steps on one rank alone: use ``every=None`` then, and call ``exchange()`` every so many batches.

    Raises ``TypeError`` and ``ValueError`` for bad arguments, on all ranks where they differ. ``step()`` raises
    ``NonFiniteGradient`` on a replica whose parameters have become NaN or infinite, and ``TransportError`` on the
    others, and where a rank fails. Then parameters and residuals are as before the exchange. Fragments in flight are
    waited for before. With a ReplicaGroup a rank that fails is a ``RuntimeWarning``, and a replica that has diverged
    leaves. Then make a DiLoCo, with an optimizer that has not seen NaN, to join anew."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator | ReplicaGroup,
        inner_optimizer: Inner,
        *,
        every: int | None = 30,
        outer: MakeOuter | None = None,
        compress: TopK | Quantised | None = None,
        decay: float = 1.0,
        average: str = "ranks",
        clip: str | None = None,
        verify: int = 1,
        streaming: Streaming | None = None,
        replica: ProcessGroup | int = 1,
        telemetry: Telemetry | None = None,
    ) -> None:
        if not isinstance(comm, (Communicator, ReplicaGroup)):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        self._group = comm if isinstance(comm, ReplicaGroup) else None
        self._connected: Communicator | None = None
        given = inner_optimizer if isinstance(inner_optimizer, Sequence) else [inner_optimizer]
        optimizers = [_unwrapped(one) for one in given]
        error: ValueError | TypeError | None = None
        alike: dict[str, str] = {}
        try:
            self._trained = _checked_parameters(model, optimizers, replica)
            is_one = type(replica) is int and replica == 1
            all_ranks = comm if isinstance(comm, Communicator) else None
            self._ranks = None if is_one else ReplicaRanks(replica, all_ranks, self._trained)
            self._parameters = self._trained if self._ranks is None else self._ranks.owned()
            if not self._parameters:
                raise ValueError(f"replica={replica} has more ranks than the model has tensors: use fewer ranks")
            self._verify = checked_count(verify, "verify")
            check_telemetry(telemetry)
            meaning = "the inner steps of a round; None: you exchange"
            self._every = None if every is None else checked_whole(every, "every", 1, None, meaning)
            topk, wire = _checked_compress(compress)
            decay = _checked_decay(decay, compressed=compress is not None)
            _check_combining(average, clip, topk)
            self._average, self._clip = average, clip
            streaming = _checked_streaming(streaming, self._every, self._trained)
            self._delay, self._mix = streaming.delay, streaming.mix
            self._common = {name: _held(local_of(one.detach())) for name, one in self._parameters.items()}
            self.outer = _checked_outer(outer or (plain if isinstance(compress, TopK) else nesterov), self._common)
            self._compressor = compressor_of(self._common, topk, None, None)
            self._compressor.record(True)  # so that the exchange of each fragment can be undone
            self._chosen = topk or TopK()
            self._encoding = encoding_of(self._chosen, self._common)
            self.stats = DDPStats()
            check_used(self._compressor, self._chosen.values, self._chosen.combine)
            self._fragments = self._divided(streaming, selects=topk is not None, wire=wire, decay=decay)
            self._config = {"every": str(self._every), "verify": str(self._verify), "decay": str(decay)}
            self._config |= {"compress": str(compress), "outer": _settings_of(self.outer)}
            self._config |= {"average": average, "clip": str(clip), "streaming": str(streaming)}
            alike = described(self._common, self._config) if self._ranks is None else self._ranks.alike(self._config)
        except (ValueError, TypeError) as found:
            error = found
        if isinstance(comm, ReplicaGroup):
            comm.begin(replica, error)
        else:
            check_alike(comm, alike, error)
        if isinstance(comm, Communicator) and self._ranks is not None:
            comm = self._ranks.connect()
            check_alike(comm, described(self._common, None), None)
        self._model = model
        others = {name: (str(one.dtype), tuple(one.shape)) for name, one in model.state_dict().items()}
        self._alike = zlib.crc32(json.dumps([alike, others]).encode())
        self._looked: list[Fragment] = []  # whose exchange begins once they are in host memory
        self._looked_left = 0  # as a flight's
        self._check: tuple[Work, int] | None = None  # of checksums, and in which round
        self._prepared: tuple[Fragment, float] | None = None  # whose average has come, and is not agreed on yet
        self._telemetry, self._sent_before = telemetry, 0
        self._is_member = self._differs = self._is_wanted = self._told_of_store = False
        self._round = self._steps = 0
        self._has_begun = False
        self._loaded: tuple[str, Sequence[float], int] | None = None  # of which states, in this round
        if isinstance(comm, Communicator):
            self._connect(comm)
            if self._ranks is not None:
                self._ranks.begin_alike(model)
            self._begin_common()
            self._copy_from(0)
            for one in self._fragments:
                self._spread(one)
        else:
            self._regroup(failed=False)
        self._hooks = list[Any]()
        for one in dict.fromkeys(optimizers):
            self._hooks += one.register_step_pre_hook(self._before_step), one.register_step_post_hook(self._after_step)
            _of_optimizers[one] = weakref.ref(self)
        self._optimizers, self._stepped = {*optimizers}, set[torch.optim.Optimizer]()

    @classmethod
    def sparse(
        cls,
        model: nn.Module,
        comm: Communicator | ReplicaGroup,
        inner_optimizer: Inner,
        *,
        every: int | None = 30,
        outer: MakeOuter = plain,
        k: int = 64,
        chunk: int = 4096,
        values: str = "packed-codebook2",
        decay: float = 0.95,
        combine: Combine = "allgather",
        average: str = "ranks",
        clip: str | None = None,
    ) -> DiLoCo:
        """SparseLoCo: of every ``chunk`` entries of a parameter the ``k`` largest are sent, in ``values`` of 2 bits,
        and residuals decay. A chunk is a run of entries in memory, where the paper has tiles. A shorter parameter sends
        as many. Values are rounded to the nearest of four levels, found for 512 values by Lloyd's algorithm. Source:
        arXiv 2508.15706, Algorithm 1.

        ``combine``: as for ``TopK``. With ``"oktopk"`` a replica's bytes do not grow with the number of replicas, and
        the average keeps about as many entries as each replica sends; residuals keep the rest."""
        chunks = BucketTopK(chunk, k, least=k)
        compress = TopK(k / chunk, chunks, small_elements=0, values=values, combine=combine)
        named: Any = {"every": every, "outer": outer, "decay": decay, "average": average, "clip": clip}
        return cls(model, comm, inner_optimizer, compress=compress, **named)

    @classmethod
    def streaming(
        cls,
        model: nn.Module,
        comm: Communicator | ReplicaGroup,
        inner_optimizer: Inner,
        *,
        every: int = 100,
        outer: MakeOuter | None = None,
        compress: TopK | Quantised | None = None,
        decay: float = 1.0,
        fragments: int | None = None,
        delay: int = 1,
        mix: float = 0.5,
    ) -> DiLoCo:
        """Streaming DiLoCo, with a ``telegrad.Streaming`` of ``fragments``, ``delay`` and ``mix``. Values travel in 32
        bits, or as ``compress`` says; the paper has 4. Source: arXiv 2501.18512."""
        named: Any = {"every": every, "outer": outer, "compress": compress, "decay": decay}
        return cls(model, comm, inner_optimizer, streaming=Streaming(fragments, delay=delay, mix=mix), **named)

    @property
    def comm(self) -> Communicator:
        """The communicator of the replicas; that of a ReplicaGroup is another one after each change."""
        return self._comm

    @property
    def rounds(self) -> int:
        """How many exchanges were applied: of each fragment its own."""
        return self._round

    @property
    def shard(self) -> tuple[int, int] | None:
        """This rank's position in a replica of several, and how many there are; each has its own part of the state."""
        return None if self._ranks is None else (self._ranks.position, self._ranks.size)

    @property
    def is_for_any_rank(self) -> bool:
        """Whether the state of one rank may be loaded by another, as in a ReplicaGroup."""
        return self._group is not None

    def close(self) -> None:
        """Takes the hooks off the inner optimizer, which another DiLoCo may have then, and leaves a ReplicaGroup.
        Idempotent."""
        if self._group is not None and self._is_member:
            self._leave(ends=True)
        elif self._group is None:
            with contextlib.suppress(NonFiniteGradient, TransportError):
                self._send_looked()  # as other ranks may have done
        for hook in self._hooks:
            hook.remove()
        for one in self._optimizers:
            if (own := _of_optimizers.get(one)) is not None and own() is self:
                del _of_optimizers[one]
        if self._ranks is not None:
            self._ranks.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before the first step: weights that were loaded after this was made are no move of a replica."""
        if (self._has_begun and not self._stepped) or _is_no_step(optimizer):
            return
        if self._every is not None and optimizer in self._stepped:
            raise ValueError(
                f"{type(optimizer).__name__} of inner_optimizer steps twice while another one has not: step each once, "
                "or give every=None and call exchange()"
            )
        self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin_common()

    def _begin_common(self) -> None:
        for name, common in self._common.items():
            common.data.copy_(on_host(local_of(self._parameters[name].detach())))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _is_no_step(optimizer):
            return
        for one in self._fragments:
            one.has_moved = True
        self._stepped.add(optimizer)
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self._steps += 1
        self._looked_left -= 1
        for one in self._fragments:
            if one.flight is not None:
                one.flight.left -= 1
        if self._every is not None:
            self._go_on(self._advance)

    def _advance(self) -> None:
        due = [one for one in self._fragments if one.offset == self._steps]
        ends = any(one.flight.left <= 0 for one in self._fragments if one.flight is not None)
        self._send_looked(waits=bool(due) or ends or self._looked_left <= 0)
        for one in self._in_flight():
            if one.flight is not None and one.flight.left <= 0:
                self._finish(one, self._mix)
        if due:
            self._start(due, self._delay)
            if self._delay == 0:
                self._finish(due[0], self._mix)
        if self._steps == self._every:
            self._steps = 0

    def exchange(self) -> None:
        """Ends the round now: finishes what is in flight, and exchanges all that has moved since. All ranks call it
        after as many steps. Without a step since the last round it does nothing, unless ``every`` is ``None``.

        Raises ``ValueError`` where the model has got other parameters that require a gradient."""
        self._go_on(self._exchange_all)

    def _exchange_all(self) -> None:
        self._send_looked()
        for one in self._in_flight():
            self._finish(one, self._mix)
        rest = [one for one in self._fragments if one.has_moved or self._every is None]
        self._exchange_now(rest)
        if self._group is not None:
            self._all.barrier()  # then all have agreed on the last round, and whoever leaves now costs nothing

    def _exchange_now(self, fragments: Sequence[Fragment]) -> None:
        self._start(fragments, 0)
        for one in fragments:
            self._finish(one, 0.0)
        self._end_check()
        self._steps = 0

    def _in_flight(self) -> list[Fragment]:
        """In the order in which they were started."""
        flying = [(one.flight.left, one) for one in self._fragments if one.flight is not None]
        return [one for _, one in sorted(flying, key=lambda pair: pair[0])]

    def _start(self, fragments: Sequence[Fragment], left: int) -> None:
        with self._settling():
            if fragments:
                self._check_parameters()
            self._begin()  # where all steps were skipped
            for one in fragments:
                one.look()
        self._looked, self._looked_left = [*fragments], left
        self._send_looked(waits=left == 0 or (self._group is not None and self._ranks is not None))

    def _send_looked(self, *, waits: bool = True) -> None:
        """Begins exchanges that a device's stream was waited for. On all ranks they are the next operation, whenever
        that is, so that none of them need wait for its device where another one does not."""
        if not self._looked or not (waits or all(one.is_seen() for one in self._looked)):
            return
        fragments, self._looked = self._looked, []
        with self._settling():
            for one in fragments:
                if (fault := one.find_fault()) is not None:
                    raise NonFiniteGradient(
                        f"rank {self._rank}, round {self._round} after {self._steps} steps: {fault.text}: lower "
                        "the inner learning rate, or clip",
                        rank=self._rank,
                        parameter=fault.parameter,
                    )
            for one in fragments:
                observes = self._telemetry is not None and self._round % self._telemetry.every == 0
                record = StepRecord.begin(self._round, self._comm, self.stats) if observes else None
                one.start(self._looked_left, record)

    def _finish(self, fragment: Fragment, mix: float) -> None:
        with self._settling():
            if self._ranks is not None:
                self._all.barrier()  # a rank that waits at its own position hears of no loss at another
            fragment.complete()
            if self._group is not None:
                self._prepared = fragment, mix
            if self._ranks is not None:
                self._agree_with_all(fragment, self._ranks)
            elif self._group is None:
                self._end_check()
            if self._group is not None:
                self._agree(fragment, self._group)
        self._prepared = None
        self._apply(fragment, mix)
        self._spread(fragment)

    def _apply(self, fragment: Fragment, mix: float) -> None:
        fragment.keep()
        record = fragment.flight.record if fragment.flight else None
        if record is not None and record.round is not None and self._telemetry is not None:
            record.step, record.bytes_sent = self._round, self._sent_before + self._comm.stats()["bytes_sent"]
            record.round["fragment"] = self._fragments.index(fragment)
            record.close(dropped=False)
            self._telemetry = write_record(self._telemetry, record)
        fragment.apply(self.outer)
        self._round += 1
        if self._group is None and self._ranks is None and self._verify and self._round % self._verify == 0:
            told = np.array([fragment.checksum(), self._round], np.int64)
            self._check = self._comm.all_gather(told, async_op=True), self._round
            if self._delay == 0:
                self._end_check()
        reshard(self._model)
        fragment.take_over(mix)

    def _spread(self, fragment: Fragment) -> None:
        """To the other ranks of this replica."""
        if self._ranks is not None:
            number = self._fragments.index(fragment)
            self._ranks.spread(self._names_of(number), self._float_buffers(number).values())

    def _agree_with_all(self, fragment: Fragment, ranks: ReplicaRanks) -> None:
        """All ranks have their part of this average, or nobody applies it."""
        number = self._round + 1
        verify = self._group is not None or (self._verify > 0 and number % self._verify == 0)
        own = fragment.checksum(with_average=True) if verify else 0, number
        names = self._names_of(self._fragments.index(fragment))
        for kind, told in ranks.agree(own, names, verify=verify):
            self._compare(told[:, 1:], number, told[:, 0].tolist(), kind)

    @contextlib.contextmanager
    def _settling(self) -> Iterator[None]:
        """After an error nothing is in flight but averages that have come; then the other ranks hear of it."""
        try:
            yield
        except Exception as error:
            self._check, self._looked = None, []
            if self._ranks is not None:
                self._abort(f"{type(error).__name__}: {error}")
            self._wait_for_flights()
            self._abort(f"{type(error).__name__}: {error}")
            if self._group is not None and not isinstance(error, TransportError):
                self._leave()
            raise

    def _wait_for_flights(self) -> None:
        for one in self._in_flight():
            with contextlib.suppress(TransportError):
                one.complete()
                if self._group is not None:
                    continue
                if self._ranks is not None:
                    one.drop()  # on some ranks it may have failed
                else:
                    one.keep()

    def _abort(self, reason: str) -> None:
        (self._ranks or self._comm).abort(reason)

    def _agree(self, fragment: Fragment, group: ReplicaGroup) -> None:
        """All have this average, of the same bits, or nobody applies it. An average that one has applied, all have."""
        wanted = self._all.rank == 0 and group.wanted()
        norm = np.float64(fragment.residual_norm()).view(np.int64)
        own = [fragment.checksum(with_average=True), self._round + 1, wanted, norm]
        told = self._all.all_gather(np.array(own, np.int64)).reshape(-1, 4)
        self._is_wanted = bool(told[:, 2].any())
        if self._ranks is None:
            self._compare(told[:, :2], self._round + 1)
        else:
            told = told[self._ranks.position :: self._ranks.size]
        self._norms[self._fragments.index(fragment)] = told[:, 3].view(np.float64)
        if self._loaded is not None and self._comm.rank == 0:
            self._tell_lost(group, *self._loaded)
        self._loaded = None

    def _go_on(self, advance: Callable[[], None]) -> None:
        """Does that; in a ReplicaGroup also where a rank fails meanwhile."""
        if self._group is None:
            advance()
            return
        meets = advance != self._advance or self._meets()
        if not self._is_member:
            raise ValueError(
                "this replica has left its ReplicaGroup: close() this DiLoCo, and make another to join anew"
            )
        error: Exception | None = None
        try:
            advance()
        except Exception as found:
            error = found
        if (error := self._failure(error, meets=meets)) is not None:
            text = "an exchange failed, so the replicas agree on who is left; what others had not sent is lost"
            warnings.warn(f"{text}: {error}", RuntimeWarning, 4)
            self._regroup(failed=True)
        if self._group.store_error and not self._told_of_store:
            self._told_of_store = True
            text = "training goes on, but no replica can come, and a loss of one ends all: save a checkpoint"
            warnings.warn(f"{self._group.store_error}: {text}", RuntimeWarning, 4)
        while self._is_wanted:
            failed = False
            try:
                self._send_looked()
                if self._ranks is not None:
                    self._all.barrier()
                for one in self._in_flight():
                    one.complete()
                self._all.barrier()
            except TransportError:
                failed = True
            self._regroup(failed=failed)

    def _meets(self) -> bool:
        """Whether an exchange begins or ends after this step, which all ranks of a replica know alike."""
        every = self._every or 1
        return any(self._steps in (one.offset, (one.offset + self._delay - 1) % every + 1) for one in self._fragments)

    def _failure(self, error: Exception | None, *, meets: bool = True) -> Exception | None:
        """After which the replicas agree on who is left. If one rank of a replica has failed, all have, and if one
        leaves, all do: they train together. Leaves, and raises, where this replica cannot go on."""
        stays = isinstance(error, TransportError) and not isinstance(error, RendezvousError)
        leaves = error is not None and (self._differs or not stays)
        if self._ranks is not None and meets:
            if error is not None:  # others may wait for this rank
                self._ranks.abort(f"{type(error).__name__}: {error}")
            worst, why = self._ranks.worst(2 if leaves else int(error is not None))
            if worst == 2 and not leaves:
                leaves, why = True, why or "another rank of this replica has left, as its own error says"
                error = TransportError(why, rank=self._rank, operation="DiLoCo.exchange")
            elif worst == 1 and error is None:
                error = TransportError("it did so on another rank of this replica", rank=self._rank)
        if error is not None and leaves:
            self._leave()
            raise error
        return error

    def _regroup(self, *, failed: bool) -> None:
        """Goes on with those that are left, and unless this replica has ``failed``, with those that wait."""
        assert self._group is not None
        while True:
            self._is_wanted = False  # of a failed agreement, other ranks may not have heard
            if self._connected is not None:
                self._sent_before += self._connected.stats()["bytes_sent"]
            self._disconnect()
            try:
                comm, was_member = self._group.regroup(admit=not failed)
            except RendezvousError:
                for one in self._in_flight():
                    one.drop()
                self._leave()
                raise
            self._is_member = self._is_member and was_member
            error: Exception | None = None
            try:
                if self._ranks is not None:
                    self._ranks.use(comm)
                    comm = self._ranks.connect()
                self._connect(comm)
                self._align(failed)
            except Exception as found:
                error = found
            if self._failure(error) is None:
                return
            failed = True

    def _align(self, failed: bool) -> None:
        """Members end the round that one of them has ended, newcomers take over what they have. After a failure what
        was in flight is dropped, and all is exchanged again."""
        mine = self._prepared if self._is_member else None
        own = [self._round if self._is_member else -1, mine is not None, failed, self._alike]
        position, size = self.shard or (0, 1)
        told = self._all.all_gather(np.array(own, np.int64)).reshape(-1, size, 4)  # of each replica its ranks
        group, self._prepared, self._looked = self._group, None, []
        assert group is not None
        last, place = int(told[..., 0].max()), self._all.rank // size
        prepared = (told[..., 0] == last - 1) & (told[..., 1] == 1)
        has = ((told[..., 0] == last) | prepared).all(axis=1)
        source = int(has.argmax())
        lacks = np.arange(len(told)) != source if last < 0 else ~has
        if mine is not None and prepared[place, position] and mine[0].flight is not None:
            self._apply(*mine)
        if told[place, position, 3] != told[source, position, 3]:
            raise ValueError(f"this replica's model or options differ from those of rank {source}: give it the same")
        failed = bool(told[..., 2].any())
        for one in self._fragments:
            if one.flight is not None and (failed or lacks[place]):
                one.drop()
        if last < 0 and self._ranks is not None:
            self._ranks.begin_alike(self._model)
            self._begin_common()
        if lacks.any():
            self._copy_state(source, lacks=bool(lacks[place]))
        for one in self._fragments if failed or lacks[place] else ():
            self._spread(one)
        group.note_parameters(are_there=last >= 0)
        self._is_member = True
        if failed:
            moved = self._all.all_gather(np.array([one.has_moved for one in self._fragments], np.int64))
            moves = moved.reshape(-1, len(self._fragments)).any(axis=0)
            self._exchange_now([one for one, moves_here in zip(self._fragments, moves, strict=True) if moves_here])

    def _copy_state(self, source: int, *, lacks: bool) -> None:
        """From ``source`` to the ranks that lack it: parameters, the outer optimizer, the round, what is in flight."""
        state = {"round": self._round, "steps": self._steps, "outer": self.outer.state_dict()}
        state["fragments"] = [one.state_dict() for one in self._fragments]
        state = self._comm.broadcast_state(state, source)
        self._copy_from(source, takes=lacks)
        if not lacks:
            return
        self._drop_residuals("this replica was away, and takes a peer's parameters over", "is lost")
        self.outer.load_state_dict(state["outer"])
        self._round, self._steps, self._has_begun = state["round"], state["steps"], True
        for one, own in zip(self._fragments, state["fragments"], strict=True):
            one.load_state_dict(own, {})

    def _tell_lost(self, group: ReplicaGroup, state: str, norms: Sequence[float], replicas: int) -> None:
        """All have loaded what they load: which residuals of their states nobody has."""
        with contextlib.suppress(RendezvousError):
            lost = [number for number in range(replicas) if not group.has_claimed(f"{number} of {state}")]
            norm = math.hypot(*(norms[number] for number in lost)) if len(norms) == replicas else math.nan
            if norm != 0 and lost:
                text = f"those of ranks {lost} were not loaded: residuals of norm {norm:.3g} are lost"
                warnings.warn(f"of {replicas} states, {text}; telegrad.ddp.reshard spreads them", RuntimeWarning, 6)

    def _drop_residuals(self, why: str, what: str) -> None:
        norm = math.hypot(*(one.residual_norm() for one in self._fragments))
        if norm:
            warnings.warn(f"{why}: a residual of norm {norm:.3g} {what}", RuntimeWarning, 5)
        for entry in self._compressor.residuals:
            entry.values.fill(0)
            entry.peak, entry.threshold, entry.calls = 0.0, None, 0

    def _leave(self, *, ends: bool = False) -> None:
        assert self._group is not None
        self._is_member, self._prepared = False, None
        self._group.leave(ends=ends)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    @property
    def _all(self) -> Communicator:
        """The communicator of all ranks of all replicas."""
        return self._comm if self._ranks is None else self._ranks.comm

    @property
    def _rank(self) -> int:
        """In the Communicator that this was given."""
        return self._comm.rank if self._ranks is None else self._ranks.rank

    def _connect(self, comm: Communicator) -> None:
        self._comm = self._connected = comm
        self._norms = np.zeros((len(self._fragments), comm.world_size))
        comm._usable().hint_at_stalls(_FIRST_ROUND, _LATER_ROUND)
        how = self._chosen.values, self._encoding, self._chosen.combine, self.stats
        for one in self._fragments:
            one.connect(comm, Exchange(comm, self._compressor, *how, average=self._average, clip=self._clip))

    def _divided(self, streaming: Streaming, *, selects: bool, wire: str | None, decay: float) -> list[Fragment]:
        """The layers in turn, as the paper's stride has it."""
        fragments = streaming.fragments or 1
        self._number_of = {layer: place % fragments for layer, place in layers_of(self._trained).items()}
        exchanges_buffers = self._ranks is None or self._ranks.position == 0
        made = []
        for number in range(fragments):
            names = [name for name in self._names_of(number) if name in self._common]
            common = {name: self._common[name] for name in names}
            own = {name: self._parameters[name] for name in names}
            buffers = functools.partial(self._float_buffers, number if exchanges_buffers else -1)
            offset = 0 if self._every is None else self._every * (number + 1) // fragments
            options: dict[str, Any] = {"selects": selects, "wire": wire, "decay": decay}
            made.append(Fragment(offset, common, own, buffers, self._compressor, **options))
        return made

    def _check_parameters(self) -> None:
        now = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        if any(isinstance(one, DTensor) for one in self._trained.values()):  # at times whole ones stand for shards
            other = [name for name in now if name not in self._trained]
        else:
            known = {*map(id, self._trained.values())}
            other = [name for name, one in now.items() if id(one) not in known]
        other += [name for name, one in self._trained.items() if not one.requires_grad]
        if other:
            raise ValueError(
                f"{other[0]!r} was frozen or unfrozen after DiLoCo was made: close() this one, and make another with "
                "the optimizer of all parameters that are trained"
            )

    def _end_check(self) -> None:
        """Raises ``TransportError`` if the checksums of the last round differ."""
        check, self._check = self._check, None
        if check is None:
            return
        self._compare(check[0].result().reshape(-1, 2), check[1])

    def _compare(
        self, told: np.ndarray[Any, Any], number: int, ranks: Sequence[int] | None = None, kind: str = ""
    ) -> None:
        """Rows of ``ranks`` that must be alike. ``kind="replica"``: of ranks that train one replica."""
        others = np.flatnonzero((told != told[0]).any(axis=1))
        if others.size:
            other, first = (int(others[0]), 0) if ranks is None else (int(ranks[others[0]]), int(ranks[0]))
            self._differs = True
            theirs, ours = told[others[0], -1], told[0, -1]
            if kind == "replica":
                text = (
                    f"rank {other} and rank {first} train one replica, and have different parameters before round "
                    f"{number}: train it inside of DistributedDataParallel or fully_shard, with all its ranks"
                )
            elif theirs != ours:
                text = (
                    f"rank {other} has ended round {theirs} and rank {first} round {ours}: load a state_dict() of one "
                    "moment on all ranks"
                )
            else:
                text = (
                    f"the common parameters of rank {other} and rank {first} differ after round {ours}: they were "
                    "changed from outside, or the ranks' CPUs round differently"
                )
            self._abort(text)
            raise TransportError(text, rank=self._rank, peer=other, operation="DiLoCo.exchange")

    def checksum(self) -> int:
        """CRC-32 of the common parameters' bytes, the same on all ranks after a round."""
        return crc_of(self._common.values())

    def _names_of(self, number: int) -> list[str]:
        """The parameters of the fragment with that number, also those that other ranks of this replica exchange."""
        return [name for name in self._trained if self._number_of[layer_of(name)] == number]

    def _float_buffers(self, number: int) -> dict[str, Tensor]:
        """Of the fragment with that number."""
        return {
            name: one
            for name, one in self._model.named_buffers()
            if one.is_floating_point() and one.numel() and self._number_of.get(layer_of(name), 0) == number
        }

    @torch.no_grad()
    def _copy_from(self, source: int, *, takes: bool = True) -> None:
        reshard(self._model)
        trained = {*map(id, self._trained.values())}
        frozen = [local_of(one) for one in self._model.parameters() if id(one) not in trained]
        for one in (*self._common.values(), *frozen, *self._model.buffers()):
            held = on_host(one).contiguous().clone()
            self._comm.broadcast_bytes_of(held, source)
            if takes:
                one.copy_(on_device_of(one.detach(), held))
        for fragment in self._fragments if takes else ():
            fragment.take_over(0.0)

    def state_dict(self) -> dict[str, Any]:
        """A copy of what training needs to go on bitwise, beside the model's and the inner optimizer's states.

        That is the common parameters, the outer optimizer, this rank's residuals, the round and the steps in it, and
        the averages of fragments in flight, which it waits for. ``telegrad.ddp.reshard`` makes the states of another
        number of replicas. Raises ``TransportError`` where an exchange in flight has failed."""
        self._send_looked()
        for one in self._in_flight():
            one.complete()
            one.keep()
        self._end_check()
        return {
            **state_of(self._comm, self._round, self._config, self._compressor, MemoryOrders({})),
            "inner_steps": self._steps,
            "residual_norms": tuple(map(float, np.linalg.norm(self._norms, axis=0))),
            "fragments": tuple(one.state_dict() for one in self._fragments),  # DCP keeps a tuple in one piece
            "sums": tuple(sum for one in self._fragments if one.sums for sum in one.sums.state_dict()),
            "replica": {name: on_host(one).clone() for name, one in self._replica().items()},
            "common": {name: one.detach().clone() for name, one in self._common.items()},
            "outer": copy.deepcopy(self.outer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict()`` gave on this rank, with the weights and buffers of its replica.

        Load the states of the model and the inner optimizer before or after. In a ReplicaGroup, which numbers replicas
        anew, the state may be of any rank and number of replicas. If two replicas load one state, the second starts
        without a residual. Residuals of states that nobody loads are lost. A ``RuntimeWarning`` says so. Raises
        ``ValueError`` for a state of another model, and without a ReplicaGroup of another rank or number of ranks; then
        nothing is changed."""
        with contextlib.suppress(NonFiniteGradient, TransportError):
            self._send_looked()
        self._wait_for_flights()
        here = {"rank": self._comm.rank, "world_size": self._comm.world_size}
        any_rank = self.is_for_any_rank and isinstance(state, Mapping)
        step = checked_step({**state, **here} if any_rank else state, self._comm, "DiLoCo")
        saved = {**here, **state}
        is_own = saved["rank"] == here["rank"] and saved["world_size"] == here["world_size"]
        steps = checked_count(state.get("inner_steps", 0), "state['inner_steps']")
        common: Any = state.get("common")
        replica: Any = state.get("replica")
        if _shapes_of(common) != _shapes_of(self._common) or _shapes_of(replica) != _shapes_of(self._replica()):
            raise ValueError(
                "state['common'] is not of this model: load what state_dict() gave with the same parameters"
            )
        if self._every is not None and steps >= self._every:
            raise ValueError(
                f"state['inner_steps']={steps} is no step of a round of every={self._every}: use the same every="
            )
        left = state.get("sums", ()) if is_own else ()
        sums = [one.sums.fitting(left) if one.sums else {} for one in self._fragments]
        fragments = state.get("fragments", [{"has_moved": steps > 0, "left": None}])
        if len(fragments) != len(self._fragments) or not all(
            one.fits(own, self._delay) for one, own in zip(self._fragments, fragments, strict=True)
        ):
            raise ValueError(
                f"state['fragments'] are others than with fragments={len(self._fragments)}, delay={self._delay}: use "
                "those that it was saved with"
            )
        before = copy.deepcopy(self.outer.state_dict())
        if not isinstance(state.get("outer"), Mapping) or not before.keys() <= state["outer"].keys():
            raise ValueError("state has no 'outer' of an optimizer: it must come from DiLoCo.state_dict()")
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))  # which would share its tensors
        try:
            self._compressor.load_state_dict(state["compressor"])
        except ValueError:
            self.outer.load_state_dict(before)
            raise
        reshard(self._model)
        with torch.no_grad():
            for name, one in self._common.items():
                one.copy_(common[name])
            for name, held in self._replica().items():
                held.copy_(on_device_of(held, replica[name]))
        for fragment, found, own in zip(self._fragments, sums, fragments, strict=True):
            fragment.load_state_dict(own, found)
        self._round, self._steps, self._has_begun = step, steps, True
        if self._group is not None:
            whose, replicas = f"{saved['world_size']} after round {step}", int(saved["world_size"])
            self._loaded = whose, state.get("residual_norms", ()), replicas
            if not self._group.claim(f"{saved['rank']} of {whose}"):
                why = f"another replica has loaded the state of rank {saved['rank']}, so this one starts without"
                self._drop_residuals(why, "stays with that one")

    def _replica(self) -> dict[str, Tensor]:
        """What ranks may have different in the middle of a round."""
        buffers = {f"buffer {name}": one for name, one in self._model.named_buffers()}
        return {**{name: local_of(one.detach()) for name, one in self._trained.items()}, **buffers}


def _is_no_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step of the optimizer is none of training. It may be called by another step of the same one: torch
    2.13 runs the hooks for both where a class's ``step()`` calls that of torch's class, once such a one was made in the
    process. Or torch.distributed.checkpoint makes the optimizer's state by it, with gradients of zeros."""
    calls, frame = 0, sys._getframe(2)
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _STEP_WRAPPER_FILE:
            calls += next(iter(frame.f_locals.get("args", ())), None) is optimizer
        elif code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return calls > 1


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch inside of a trainer's, whose own hooks fail (Accelerate 1.15) or are the same."""
    while type(optimizer).__module__.partition(".")[0] in ("accelerate", "lightning", "pytorch_lightning"):
        optimizer = optimizer.optimizer
    return optimizer


def _checked_parameters(model: Any, optimizers: Sequence[Any], replica: Any) -> dict[str, nn.Parameter]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give the torch.nn.Module that this rank trains")
    if any(isinstance(one, nn.parallel.DistributedDataParallel) for one in model.modules()):
        raise TypeError("model is a DistributedDataParallel: give ddp.module, and replica= the ranks that it averages")
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"inner_optimizer is a {type(one).__name__}: give one, as AdamW(model.parameters())")
        if (other := _of_optimizers.get(one)) is not None and other() is not None:
            raise ValueError("inner_optimizer belongs to another DiLoCo: close() that one first")
        if callable(getattr(one, "eval", None)):  # schedule-free: parameters are where gradients are taken
            text = f"replicas do not exchange the weights of {type(one).__name__}.eval(), which differ in the end"
            warnings.warn(f"{text}: save those of one replica, or give another inner_optimizer", RuntimeWarning, 3)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in parameters.items():
        if isinstance(one, DTensor) and replica == 1:
            raise TypeError(f"parameter {name!r} is a DTensor: give replica= the ranks that its model is sharded over")
        if one.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"parameter {name!r} is {one.dtype}: DiLoCo takes float32, bfloat16 and float16")
    held = {id(one) for own in optimizers for group in own.param_groups for one in group["params"]}
    missing = [name for name, one in parameters.items() if id(one) not in held]
    if not parameters or len(missing) == len(parameters):
        raise ValueError("inner_optimizer steps no parameter of the model: give the optimizer of this model")
    if missing:
        raise ValueError(
            f"inner_optimizer does not step {missing[0]!r}: give one optimizer of all parameters, or a list, or set "
            "requires_grad to False"
        )
    return parameters


def _held(parameter: Tensor) -> nn.Parameter:
    """A float32 copy in host memory."""
    return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32).copy_(on_host(parameter)))


def _checked_compress(compress: Any) -> tuple[TopK | None, str | None]:
    """Which entries are sent, and the format of sums of all values."""
    if compress is not None and not isinstance(compress, (TopK, Quantised)):
        raise TypeError(
            f"compress={compress!r} must be a telegrad.TopK or Quantised, or None: all of a pseudo-gradient is sent"
        )
    if compress is not None and compress.feedback != "gradients":
        raise ValueError("feedback='steps' is for gradients of steps: use feedback='gradients'")
    if not isinstance(compress, Quantised):
        return compress, None
    if len(compress.values) > 1:
        raise ValueError(f"values={compress.values!r} must be one format: nothing is measured that would choose")
    return compress.as_topk(), compress.values[0]


def _checked_decay(decay: Any, *, compressed: bool) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"decay={decay!r} must be a number in (0, 1]")
    if not 0 < decay <= 1 or math.isnan(decay):
        raise ValueError(f"decay={decay} must be in (0, 1]: what a residual is multiplied by in each round")
    if decay != 1 and not compressed:
        raise ValueError(f"decay={decay} is not used without compress=, which keeps residuals: leave it out")
    return float(decay)


def _check_combining(average: Any, clip: Any, compress: TopK | None) -> None:
    check_choice(average, "average", ("ranks", "senders"))
    if clip is not None:
        check_choice(clip, "clip", ("median",))
    if (average, clip) != ("ranks", None) and (compress is None or compress.combine != "allgather"):
        raise ValueError(
            f"average={average!r}, clip={clip!r} are for entries that every replica gathers: give "
            'compress=TopK(combine="allgather")'
        )


def _checked_streaming(streaming: Any, every: int | None, names: Iterable[str]) -> Streaming:
    """With a number of fragments."""
    if streaming is None:
        return Streaming(1, delay=0, mix=0)
    if not isinstance(streaming, Streaming):
        raise TypeError(f"streaming={streaming!r} must be a telegrad.Streaming, or None: all layers at once")
    if every is None:
        raise ValueError("streaming= needs every=, the inner steps within which fragments take turns")
    return streaming.fitting(every, [*layers_of(names)])


def _checked_outer(outer: Any, common: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(outer, torch.optim.Optimizer) or not callable(outer):
        raise TypeError(
            f"outer={outer!r:.80} must be a function of the parameters that makes an optimizer, as "
            "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
        )
    made = outer(list(common.values()))
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer made a {type(made).__name__}: it must return a torch.optim.Optimizer")
    return made


def _shapes_of(tensors: Any) -> Any:
    return {name: tuple(one.shape) for name, one in tensors.items()} if isinstance(tensors, Mapping) else None


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"
