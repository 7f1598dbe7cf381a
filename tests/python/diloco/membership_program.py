"""A replica of test_membership.py, in a process of its own: it writes a line for each round that it has ended."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from replicas import batch, network
from torch.distributed import TCPStore
from watched_processes import telling

import telegrad
from telegrad.diloco import ReplicaGroup

EVERY = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"compress": telegrad.TopK(0.1, small_elements=0, combine="allgather"), "decay": 0.9},
    "streaming": {"fragments": 3, "delay": 2, "mix": 0.5},
}
OPTIONS |= {f"{kind} without store": OPTIONS[kind] for kind in ("sparse", "streaming")} | {"ends without store": {}}
OPTIONS |= {"freezes": OPTIONS["streaming"], "freezes for a moment": OPTIONS["streaming"]}
OPTIONS |= {"half a round": OPTIONS["sparse"], "diverges": {}, "leaves": {}, "differs": {}}


def main(port: int, replicas: int, number: int, kind: str, output: str, pause_s: float, liveness_s: float) -> None:
    """``number``: of the replica, and of its data. It ends with the round that the store has under "last"."""
    with telling(output, replica=number) as say:
        _train(port, replicas, number, kind, pause_s, liveness_s, say)


def held() -> dict[str, int]:
    """What this process holds of the system: bytes of memory and descriptors."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident": resident * os.sysconf("SC_PAGESIZE"), "descriptors": len(os.listdir("/proc/self/fd"))}


def fail_after_agreement(diloco: telegrad.DiLoCo) -> None:
    """In the fifth round the other replicas hear from this one, and apply the average; it does not hear from them."""
    agree = diloco._agree

    def heard_by_others(*arguments: Any) -> None:
        agree(*arguments)
        if diloco.rounds == 4:
            raise telegrad.TransportError("the test says so")

    diloco._agree = heard_by_others  # type: ignore[method-assign]


def _train(
    port: int, replicas: int, number: int, kind: str, pause_s: float, liveness_s: float, say: Callable[..., None]
) -> None:
    torch.set_num_threads(1)
    warnings.showwarning = lambda message, *_, **__: say(warned=str(message))  # type: ignore[assignment]
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = ReplicaGroup(store, replicas, name="test", liveness_timeout_s=liveness_s, join_timeout_s=15.0)
    model = network(number)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    diloco = telegrad.DiLoCo(model, group, optimizer, every=EVERY, **OPTIONS[kind])
    if kind == "half a round" and number == 1:
        fail_after_agreement(diloco)
    step, told, freezes = 0, diloco.rounds, "freezes" in kind
    say(began=told, checksum=diloco.checksum())

    def is_over() -> bool:
        if kind == "ends without store":
            return told >= 40
        return "store" not in kind and store.check(["last"]) and told >= int(store.get("last"))

    while not is_over():
        x, y = batch(number, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        time.sleep(pause_s)
        if number == 1 and step == 6 * EVERY - 1:
            if kind == "leaves":
                diloco.close()
                return
            with torch.no_grad():
                if kind == "diverges":
                    next(model.parameters()).fill_(math.nan)
                elif kind == "differs":
                    next(iter(diloco._common.values())).add_(1.0)
        try:
            optimizer.step()
        except telegrad.NonFiniteGradient as error:
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
            say(round=told, checksum=diloco.checksum(), size=diloco.comm.world_size, step=step, **held())
    diloco.exchange()
    say(ended=diloco.rounds, checksum=diloco.checksum())
    diloco.close()
