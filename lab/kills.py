"""Kills and replaces random processes of a training: how soon do all others compute again, and is anything lost?

Each process trains by ``telegrad.Elastic``, over shared memory. The first one is never killed: it shows what a process
holds of memory, descriptors and threads after all these losses.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import selectors
import signal
import time
import zlib
from collections import defaultdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import typer

Row = dict[str, Any]

_PATIENCE_S = 300.0  # nothing may take longer: it would be a hang
_STEPS_TO_END = 100  # so that no process is past the last step when it hears of it
_LIVENESS_S = 60.0  # deaths are noticed at once, and on a busy machine a process may be silent for seconds
_NAMES = ("rss", "descriptors", "threads")
ABOUT = {
    "seconds": "from the kill until each of the others has ended a step in the smaller group: the last one",
    "killed": "so many at once",
    "while_joining": "a replacement was on its way as the kill came",
    "repeated": "steps that the others have begun again since the kill: of the one that has most",
    "growth": "of the process that is never killed: with all ranks there, after a tenth of the times, half, and all",
}
"""The meaning of fields, for result files."""


def _held() -> tuple[int, int, int]:
    """Bytes of memory, descriptors and threads."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        resident * os.sysconf("SC_PAGESIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
    )


def _train(port: int, ranks: int, number: int, out: Any) -> None:
    """A process: it tells each step that it has ended, until the last one, which the store has well before."""
    import warnings

    import torch
    from torch._C._distributed_c10d import TCPStore

    import telegrad

    torch.set_num_threads(1)
    away = 0

    def count_away(message: Any, *_: Any, **__: Any) -> None:
        nonlocal away
        away += "was away from step" in str(message)

    warnings.showwarning = count_away
    warnings.simplefilter("always", RuntimeWarning)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    comm = telegrad.join(store, ranks, liveness_timeout_s=_LIVENESS_S)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def loss_of() -> torch.Tensor:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(elastic.steps))[
            elastic.rank :: elastic.world_size
        ]
        return torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))

    def made(model: torch.nn.Module, comm: telegrad.Communicator) -> telegrad.Synchronizer:
        return telegrad.Synchronizer(model, comm, plan="fixed", compress=telegrad.TopK(0.1, small_elements=0))

    with telegrad.Elastic(model, optimizer, comm, synchronizer=made) as elastic:
        while not (store.check(["last"]) and elastic.steps >= int(store.get("last"))):
            elastic.step(loss_of)
            checksum = 0
            for one in model.parameters():
                checksum = zlib.crc32(one.detach().numpy().data.cast("B"), checksum)
            now_s = time.monotonic()
            said = [number, elastic.steps, elastic.world_size, checksum, now_s, elastic.repeated, away, *_held()]
            os.write(out.fileno(), (json.dumps(said) + "\n").encode())
            time.sleep(0.005)
    comm.close()


class _Job:
    """The processes, and what they have said."""

    def __init__(self, ranks: int) -> None:
        from torch._C._distributed_c10d import TCPStore

        self.ranks, self.alive = ranks, dict[int, BaseProcess]()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.last: dict[int, Row] = {}
        self.bits: defaultdict[int, set[int]] = defaultdict(set)
        self.skipped = 0  # calls of step() that took another number of steps than one
        self.away = 0  # calls in which the process took a peer's state over, as it had been silent for too long
        self.pids: list[int] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["telegrad.synchronizer.elastic", "torch._dynamo"])
        self._here, there = os.pipe()
        self._there = os.fdopen(there, "wb")
        os.set_blocking(self._here, False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._here, selectors.EVENT_READ)
        self._rest = b""

    def start(self) -> None:
        from multiprocessing.reduction import DupFd

        number = len(self.pids)
        out = _Descriptor(DupFd(self._there.fileno()))
        process = self._context.Process(target=_started, args=(self.store.port, self.ranks, number, out), daemon=True)
        process.start()
        assert process.pid is not None
        self.pids.append(process.pid)
        self.alive[number] = process

    def kill(self, *numbers: int) -> None:
        """At once: one by one, others may repeat a step for each."""
        processes = [self.alive.pop(number) for number in numbers]
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()

    def listen(self, most_s: float) -> list[Row]:
        """What processes have said by then."""
        if not self._ready.select(most_s):
            return []
        self._rest += os.read(self._here, 1 << 20)
        *lines, self._rest = self._rest.split(b"\n")
        rows = []
        for line in lines:
            number, step, size, checksum, at_s, repeated, away, *held = json.loads(line)
            before = self.last.get(number)
            if before is not None and away != before["away"]:
                self.away += 1
            elif before is not None and step != before["step"] + 1:
                self.skipped += 1
            row = {"number": number, "step": step, "size": size, "at_s": at_s, "repeated": repeated, "away": away}
            self.last[number] = row | dict(zip(_NAMES, held, strict=True))
            self.bits[step].add(checksum)
            rows.append(self.last[number])
        return rows

    def wait_for(self, size: int, since_s: float) -> float | None:
        """When the last living process has ended a step of so many; ``None``: not all have in time."""
        first: dict[int, float] = {}
        deadline_s = time.monotonic() + _PATIENCE_S
        while set(self.alive) - set(first):
            if time.monotonic() > deadline_s or any(not one.is_alive() for one in self.alive.values()):
                return None
            for row in self.listen(0.05):
                if row["size"] == size and row["at_s"] > since_s:
                    first.setdefault(row["number"], row["at_s"])
        return max(first[number] for number in self.alive)

    def wait_for_any(self, size: int) -> bool:
        """Until all living ones are of that size."""
        return self.wait_for(size, time.monotonic()) is not None

    def end(self) -> list[int | None]:
        """The exit status of processes that ended with an error or by a signal; ``None``: not at all."""
        self.store.set("last", str(max((row["step"] for row in self.last.values()), default=0) + _STEPS_TO_END))
        deadline_s = time.monotonic() + _PATIENCE_S
        while any(one.is_alive() for one in self.alive.values()) and time.monotonic() < deadline_s:
            self.listen(0.05)
        failed = [one.exitcode for one in self.alive.values() if one.exitcode != 0]
        for one in self.alive.values():
            one.kill()
            one.join()
        return failed


class _Descriptor:
    """A descriptor that a new process gets too."""

    def __init__(self, given: Any) -> None:
        self._given, self._own = given, -1

    def fileno(self) -> int:
        if self._own < 0:
            self._own = self._given.detach()
        return self._own


def _started(port: int, ranks: int, number: int, out: _Descriptor) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TELEGRAD_WARN="0")
    faulthandler.enable()
    _train(port, ranks, number, out)


def measured(ranks: int, kills: int, seconds: float, seed: int) -> tuple[list[Row], Row]:
    """One row for each time that some were killed, and what was wrong."""
    draw = random.Random(seed)
    shared = set(os.listdir("/dev/shm"))
    job = _Job(ranks)
    rows: list[Row] = []
    killed, growth = 0, []
    begin_s = time.monotonic()
    hang = ""
    for _ in range(ranks):
        job.start()
    if not job.wait_for_any(ranks):
        hang = "the job did not begin"
    while not hang and killed < kills and time.monotonic() - begin_s < seconds:
        until_s = time.monotonic() + draw.uniform(0.0, 0.2)
        while time.monotonic() < until_s:
            job.listen(0.02)
        joining = len(job.alive) < ranks or draw.random() < 0.2
        if joining and len(job.alive) == ranks:
            job.kill(draw.choice([*job.alive][1:]))  # and its replacement is on its way as others are killed
            killed += 1
            job.start()
            until_s = time.monotonic() + draw.uniform(0.0, 0.5)
            while time.monotonic() < until_s:
                job.listen(0.02)
        count = draw.choice([1, 1, 1, 1, 2])
        victims = draw.sample([*job.alive][1:], count)
        before = {number: job.last[number]["repeated"] for number in job.alive if number in job.last}
        at_s = time.monotonic()
        job.kill(*victims)
        killed += count
        again_s = job.wait_for(len(job.alive), at_s)
        if again_s is None:
            hang = f"after {killed} kills not all others computed again within {_PATIENCE_S:g} s, or one has ended"
            break
        repeated = max(job.last[number]["repeated"] - before[number] for number in before if number in job.alive)
        rows.append(
            {"seconds": again_s - at_s, "killed": count, "while_joining": joining, "repeated": repeated}
            | {"load": os.getloadavg()[0]}
        )
        for _ in range(ranks - len(job.alive)):
            job.start()
        if not job.wait_for_any(ranks):
            hang = f"after {killed} kills the replacements were not taken in within {_PATIENCE_S:g} s"
        growth.append({name: job.last[0][name] for name in _NAMES})
    failed = job.end()
    left = sorted(set(os.listdir("/dev/shm")) - shared)
    own = [name for name in left if name.startswith("ucx_shm_") or any(str(pid) in name for pid in job.pids)]
    wrong = {
        "hang": hang,
        "failed": failed,
        "differing": sum(len(found) > 1 for found in job.bits.values()),
        "skipped": job.skipped,
        "away": job.away,
        "left_in_shm": own,
    }
    found = {"kills": killed, "steps": max(job.bits, default=0), "seconds": time.monotonic() - begin_s, **wrong}
    if growth:
        found["growth"] = [growth[len(growth) // 10], growth[len(growth) // 2], growth[-1]]
    return rows, found


def command(
    ranks: Annotated[int, typer.Option(min=3, help="How many processes train.")] = 16,
    kills: Annotated[int, typer.Option(min=1, help="How many are killed in all.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1.0, help="End after as long, though fewer were killed.")] = 1500.0,
    seed: Annotated[int, typer.Option(min=0, help="Whom the kills strike, and when.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows, the machine and the commit here.")
    ] = None,
) -> None:
    """Kill random processes of a training, and replace them: how soon do the others compute again?

    Ends with status 1 if a process hangs or fails, bits differ, a step is left out, more than one step is repeated for
    a kill, or something is left in /dev/shm.
    """
    import numpy as np
    from rich.console import Console

    from telegrad.tools.bench.machine import describe_machine
    from telegrad.tools.cli.outputs import check_writable, write_result

    check_writable(json_file, "--json")
    console = Console()
    rows, found = measured(ranks, kills, seconds, seed)
    for name, chosen in (("alone", False), ("while others join", True)):
        times = [row["seconds"] for row in rows if row["while_joining"] == chosen]
        if times:
            median, most = np.percentile(times, [50, 99])
            console.print(
                f"{len(times)} times killed {name}: computing again after {median:.2f} s (median), {most:.2f} s (99th "
                f"percentile), {max(times):.2f} s (worst)",
                highlight=False,
            )
    repeated = max((row["repeated"] - row["while_joining"] for row in rows), default=0)
    console.print(f"{found}; at most {repeated} steps repeated for a kill", highlight=False, soft_wrap=True)
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "found": found, "about": ABOUT, "machine": describe_machine()})
    wrong = [found[name] for name in ("hang", "failed", "differing", "skipped", "left_in_shm")]
    if any(wrong) or repeated > 1:
        raise typer.Exit(1)
