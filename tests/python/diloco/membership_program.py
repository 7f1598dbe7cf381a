"""A replica of test_membership.py, in a process of its own: it writes a line for each round that it has ended."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replicas import batch, network
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from watched_processes import PATIENCE_S, telling

import telegrad
from telegrad.diloco import ReplicaGroup

RANKS = 2
"""Of a replica, where it has several."""
EVERY = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"compress": telegrad.TopK(0.1, small_elements=0, combine="allgather"), "decay": 0.9},
    "oktopk": {"compress": telegrad.TopK(0.1, small_elements=0, values="packed-codebook2", combine="oktopk")},
    "streaming": {"streaming": telegrad.Streaming(3, delay=2, mix=0.5)},
}
OPTIONS |= {f"ranks {kind}": options for kind, options in OPTIONS.items()} | {"ranks shards": OPTIONS["sparse"]}
OPTIONS |= {f"{kind} without store": OPTIONS[kind] for kind in ("sparse", "streaming")} | {"ends without store": {}}
OPTIONS |= {"freezes": OPTIONS["streaming"], "freezes for a moment": OPTIONS["streaming"]}
OPTIONS |= {"half a round": OPTIONS["sparse"], "diverges": {}, "leaves": {}, "differs": {}, "ranks diverges": {}}
OPTIONS |= {"ranks half connected": {}, "ranks half told": {}}
OPTIONS |= {"ranks streaming half aligned": OPTIONS["streaming"]}


def main(port: int, replicas: int, number: int, kind: str, output: str, pause_s: float, liveness_s: float) -> None:
    """``number``: of the rank, and of its data. It ends with the round that the store has under "last"."""
    with telling(output, replica=number) as say:
        _train(port, replicas, number, kind, pause_s, liveness_s, say)


def with_ranks(port: int, number: int, kind: str) -> tuple[Any, Any]:
    """The model of a replica of several ranks, and their process group."""
    replica, position = divmod(number, RANKS)
    store = PrefixStore(f"replica {replica}", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    limit = datetime.timedelta(seconds=PATIENCE_S / 2)  # of a rank that waits for one that was killed as it came
    dist.init_process_group("gloo", store=store, rank=position, world_size=RANKS, timeout=limit)
    model = network(replica)
    if "shards" in kind:
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        return model, dist.group.WORLD
    return DistributedDataParallel(model), dist.group.WORLD


def weights_of(model: torch.nn.Module) -> int:
    """A checksum of all that this rank holds."""
    found = 0
    for one in model.parameters():
        own = one.to_local() if isinstance(one, DTensor) else one
        found = zlib.crc32(own.detach().contiguous().numpy().data.cast("B"), found)
    return found


def held() -> dict[str, int]:
    """What this process holds of the system: bytes of memory and descriptors."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident": resident * os.sysconf("SC_PAGESIZE"), "descriptors": len(os.listdir("/proc/self/fd"))}


def tell_joins(diloco: telegrad.DiLoCo, say: Callable[..., None]) -> None:
    """After which round the replica was taken in again."""
    copy = diloco._copy_state

    def copied(source: int, *, lacks: bool) -> None:
        copy(source, lacks=lacks)
        if lacks:
            say(joined=diloco.rounds)

    diloco._copy_state = copied  # type: ignore[method-assign]


def fail_after_agreement(diloco: telegrad.DiLoCo) -> None:
    """In the fifth round the other replicas hear from this one, and apply the average; it does not hear from them."""
    agree = diloco._agree

    def heard_by_others(*arguments: Any) -> None:
        agree(*arguments)
        if diloco.rounds == 4:
            raise telegrad.TransportError("the test says so")

    diloco._agree = heard_by_others  # type: ignore[method-assign]


def fail_after_connecting() -> None:
    """As all others have connected again after a loss, this rank has not. It tries once more."""
    join, calls = telegrad.Communicator.from_exchange, itertools.count(1)

    def joined(*arguments: Any, **options: Any) -> telegrad.Communicator:
        made = join(*arguments, **options)
        if next(calls) == 2:
            made.close()
            raise telegrad.TransportError("the test says so")
        return made

    telegrad.Communicator.from_exchange = joined  # type: ignore[method-assign,assignment]


def fail_while_aligning() -> None:
    """The other rank of this replica goes on to what they do together. This one tries again."""
    copy, calls = telegrad.DiLoCo._copy_state, itertools.count(1)

    def copied(diloco: telegrad.DiLoCo, source: int, *, lacks: bool) -> None:
        copy(diloco, source, lacks=lacks)
        if next(calls) == 1:
            raise telegrad.TransportError("the test says so")

    telegrad.DiLoCo._copy_state = copied  # type: ignore[method-assign]


def fail_before_it_is_told(diloco: telegrad.DiLoCo) -> None:
    """The other rank of this replica hears that somebody wants to join, this one does not, for once."""
    agree, told = diloco._agree, list[bool]()

    def half(*arguments: Any) -> None:
        agree(*arguments)
        if diloco._is_wanted and not told:
            told.append(True)
            diloco._is_wanted = False
            raise telegrad.TransportError("the test says so")

    diloco._agree = half  # type: ignore[method-assign]


def _train(
    port: int, replicas: int, number: int, kind: str, pause_s: float, liveness_s: float, say: Callable[..., None]
) -> None:
    torch.set_num_threads(1)
    warnings.showwarning = lambda message, *_, **__: say(warned=str(message))  # type: ignore[assignment]
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = ReplicaGroup(store, replicas, name="test", liveness_timeout_s=liveness_s, join_timeout_s=60.0)
    model: Any = network(number)
    forward, inside = with_ranks(port, number, kind) if "ranks" in kind else (model, 1)
    model = getattr(forward, "module", forward)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if kind == "ranks half connected" and number == 1:
        fail_after_connecting()
    if kind == "ranks streaming half aligned" and number % RANKS == 0:
        fail_while_aligning()
    diloco = telegrad.DiLoCo(model, group, optimizer, every=EVERY, replica=inside, **OPTIONS[kind])
    tell_joins(diloco, say)
    if kind == "half a round" and number == 1:
        fail_after_agreement(diloco)
    if kind == "ranks half told" and number == 1:
        fail_before_it_is_told(diloco)
    step, told, freezes = 0, diloco.rounds, "freezes" in kind
    say(began=told, checksum=diloco.checksum())

    def is_over() -> bool:
        if kind == "ends without store":
            return told >= 40
        return "store" not in kind and store.check(["last"]) and told >= int(store.get("last"))

    while not is_over():
        x, y = batch(number, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(forward(x), y).backward()
        time.sleep(pause_s)
        if number == (2 if "ranks" in kind else 1) and step == 6 * EVERY - 1:
            if kind == "leaves":
                diloco.close()
                return
            with torch.no_grad():
                if "diverges" in kind:
                    next(model.parameters()).fill_(math.nan)
                elif kind == "differs":
                    next(iter(diloco._common.values())).add_(1.0)
        try:
            optimizer.step()
        except telegrad.NonFiniteGradient as error:
            if "ranks" in kind:
                raise
            say(diverged=str(error))
            try:
                diloco.exchange()
            except ValueError as left:
                say(left=str(left))
            diloco.close()
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            diloco = telegrad.DiLoCo(model, group, optimizer, every=EVERY)
            told = diloco.rounds
        except telegrad.TransportError:
            say(state=diloco.state_dict()["step"], round_before=told)
            raise
        step += 1
        if freezes and number == 1 and step > 6 * EVERY and diloco._in_flight():
            freezes = False
            os.kill(os.getpid(), signal.SIGSTOP)
        if diloco.rounds != told:
            told = diloco.rounds
            found = {"checksum": diloco.checksum(), "size": diloco.comm.world_size, "weights": weights_of(model)}
            say(round=told, **found, step=step, **held())
    diloco.exchange()
    say(ended=diloco.rounds, checksum=diloco.checksum())
    diloco.close()
