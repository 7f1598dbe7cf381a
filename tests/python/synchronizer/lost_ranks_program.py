"""A rank of test_lost_ranks.py, in a process of its own: it writes a line for each step that it has taken."""

from __future__ import annotations

import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore
from watched_processes import telling

import telegrad

KINDS: dict[str, Any] = {
    "dense": None,
    "sparse": telegrad.TopK(0.1, small_elements=0),
    "quantised": telegrad.Quantised("qsgd8"),
    "oktopk": telegrad.TopK(0.1, small_elements=0, combine=telegrad.OkTopk(4, 4)),
    "gtopk": telegrad.TopK(0.1, small_elements=0, combine="gtopk"),
    "bounded": telegrad.TopK(0.1, small_elements=0, combine="bounded"),
    "low_rank": telegrad.LowRank(rank=1, small_elements=0),
}


def held() -> dict[str, int]:
    """What this process holds of the system: bytes of memory, descriptors, threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    return {"rss": resident * os.sysconf("SC_PAGESIZE"), "fds": len(os.listdir("/proc/self/fd")), "threads": threads}


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's 48 samples."""
    x = torch.randn(48, 16, generator=torch.Generator().manual_seed(step))
    x = x[rank::ranks]
    return x, x[:, :4].argmax(dim=1)


def checksum(model: torch.nn.Module) -> int:
    found = 0
    for one in model.parameters():
        found = zlib.crc32(one.detach().numpy().data.cast("B"), found)
    return found


def bare(port: int, ranks: int, number: int, kind: str, output: str, liveness_s: float) -> None:
    """Sums in a loop, and shrinks after each failure. ``kind``: which rank does what to itself, and when."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with telling(output, number=number) as say:
        _sum(telegrad.join(store, ranks, liveness_timeout_s=liveness_s), store, ranks, kind, say)


def store_is_gone(store: Any) -> bool:
    try:
        store.check(["last"])
    except Exception:
        return True
    return False


def has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except Exception:
        return False


def _hurt(rank: int, kind: str, where: str) -> None:
    for one in kind.split():
        name, _, which = one.partition("@")
        if which == f"{where}{rank}":
            os.kill(os.getpid(), signal.SIGKILL if name == "kill" else signal.SIGSTOP)


def _sum(comm: telegrad.Communicator, store: Any, ranks: int, kind: str, say: Callable[..., None]) -> None:
    first = comm.rank
    part, step = None, np.array([0])
    if comm.rank < ranks:
        part = comm.split(comm.rank % 2)
    else:
        comm.broadcast(step, 0)
    say(joined=comm.rank)
    connect = telegrad.communicator.communicator._connected  # type: ignore[attr-defined]

    def hurting(*arguments: Any) -> Any:
        _hurt(first, kind, "connect")
        return connect(*arguments)

    telegrad.communicator.communicator._connected = hurting  # type: ignore[attr-defined]
    step = int(step[0]) + (comm.rank >= ranks)  # the others end the step in which it has come
    while not (has(store, "last") and step >= int(store.get("last"))):
        own = np.full(5000, 1.0, np.float32)
        try:
            if step == 5:
                while "nostore" in kind and not store_is_gone(store):
                    time.sleep(0.05)
                _hurt(first, kind, "sum")
            comm.all_reduce(own)
            size, ranks_now = own[0], comm.world_size
            comm.broadcast(one := np.array([step]), 0)
            assert one[0] == step
            told = np.array([comm.rank == 0 and has(store, "grow")])
            comm.broadcast(told, 0)
            if told[0]:
                say(grew=comm.grow(1))
                if comm.rank == 0:
                    store.delete_key("grow")
                comm.broadcast(np.array([step]), 0)
        except telegrad.TransportError as error:
            _hurt(first, kind, "shrink")
            if f"alone@{first}" in kind or "alone" not in kind:
                begin_s = time.monotonic()
                kept = comm.shrink()
                say(kept=kept, seconds=time.monotonic() - begin_s, **held())
                steps = comm.all_gather(np.array([step]))  # those that have ended a step go on with the next
                step = int(steps.max())
                continue
            say(error=str(error))
            return
        assert size == ranks_now
        step += 1
        say(step=step, size=comm.world_size, rank=comm.rank)
        time.sleep(0.01)
    if part is not None:
        try:
            part.barrier()
        except (ValueError, telegrad.TransportError) as error:
            say(group=str(error))
    say(ended=step)
    comm.close()


def train(port: int, ranks: int, number: int, kind: str, output: str, liveness_s: float) -> None:
    """Trains until the step that the store has under "last"."""
    with telling(output, number=number) as say:
        _train(port, ranks, number, kind, liveness_s, say)


def _train(port: int, ranks: int, number: int, kind: str, liveness_s: float, say: Callable[..., None]) -> None:
    torch.set_num_threads(1)
    warnings.showwarning = lambda message, *_, **__: say(warned=str(message))  # type: ignore[assignment]
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    comm = telegrad.join(store, ranks, liveness_timeout_s=liveness_s)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)

    regroup, fails_again = comm._regroup, False

    def regrouped(*arguments: Any, **named: Any) -> tuple[tuple[int, ...], bool]:
        nonlocal fails_again
        kept, was_member = regroup(*arguments, **named)
        fails_again = fails_again or ("away twice" in kind and not was_member)
        return kept, was_member

    comm._regroup = regrouped  # type: ignore[method-assign]

    def synchronizer(model: torch.nn.Module, comm: telegrad.Communicator) -> telegrad.Synchronizer:
        nonlocal fails_again
        if fails_again:
            fails_again = False
            raise telegrad.TransportError("the test says so, too")
        return telegrad.Synchronizer(model, comm, plan="fixed", compress=KINDS[kind.partition(" ")[0]])

    with telegrad.Elastic(model, optimizer, comm, synchronizer=synchronizer, state={"scheduler": scheduler}) as elastic:
        say(began=elastic.steps, rank=elastic.rank, checksum=checksum(model))
        calls = 0

        def loss_of() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if "raises" in kind and number == 1 and elastic.steps == 5:
                raise LookupError("the test says so")
            x, y = batch(elastic.steps, elastic.rank, elastic.world_size)
            return torch.nn.functional.cross_entropy(model(x), y)

        if "half a step" in kind and number == 1:
            agree = elastic._agree

            def heard_by_others() -> None:
                nonlocal fails_again
                agree()
                if elastic.steps == 5:
                    fails_again = "twice" in kind
                    raise telegrad.TransportError("the test says so")

            elastic._agree = heard_by_others  # type: ignore[method-assign]
        while not (store.check(["last"]) and elastic.steps >= int(store.get("last"))):
            loss = float(elastic.step(loss_of))
            scheduler.step()
            time.sleep(0.01)
            say(
                step=elastic.steps, size=elastic.world_size, checksum=checksum(model), loss=loss, calls=calls,
                repeated=elastic.repeated, lost=elastic.lost_residuals, epochs=scheduler.last_epoch,
                at=time.monotonic(), **held(),
            )  # fmt: skip
    say(ended=elastic.steps, checksum=checksum(model))
    comm.close()
