"""Runs fault trials with real processes, several at a time, and looks what is left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lab.faults.judge import LEFT, Seen, Verdict, Violation, judge
from lab.faults.trials import Options, Trial, draw
from telegrad.launch import SINGLE_THREADED, RankExit, Ranks, RanksTimedOut
from telegrad.tools.bench.plan import open_network

TRIAL_LIMIT_S = 30.0
"""A rank that is not done by then hangs; starting the processes takes some seconds of it, liveness comes on top."""

_SHARED_MEMORY = Path("/dev/shm")
_OF_MPI = "mpich_shm_"  # of programs beside us, which remove them when they can: trials use UCX and TCP
_MARK = "TELEGRAD_FAULT_TRIAL"
_LISTEN_S = 0.2
_LEFT_S, _LOOK_S = 5.0, 0.2


class Stopped(Exception):  # noqa: N818
    """The user wants no more of it."""


def run_trials(
    seeds: Sequence[int],
    options: Options,
    *,
    jobs: int,
    on_verdict: Callable[[Verdict, Seen], None] = lambda *_: None,
    on_left: Callable[[Violation], None] = lambda _: None,
) -> list[Verdict]:
    """The verdicts in the order of ``seeds``; ``on_verdict`` sees each as it comes, on this thread, ``on_left`` what is
    found in the end of which nobody knows whose it is: the last verdict has it. ``jobs`` trials run at a time. Ctrl-C
    ends all their processes."""
    stop = threading.Event()
    before = _shared_memory()
    verdicts: dict[int, Verdict] = {}  # by place in ``seeds``, where one may come several times
    # Each trial starts, hears and ends its ranks on one thread of the pool: the kernel kills a rank when the thread
    # that has started it ends.
    with ThreadPoolExecutor(jobs, "fault-trial") as pool:
        running: dict[Future[Seen], int] = {}
        waiting = list(reversed(range(len(seeds))))
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    place = waiting.pop()
                    running[pool.submit(run_trial, draw(seeds[place], options), options, stop)] = place
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    place = running.pop(future)
                    seen = future.result()
                    verdicts[place] = judge(draw(seeds[place], options), seen)
                    on_verdict(verdicts[place], seen)
        finally:
            stop.set()
    found = [verdicts[place] for place in range(len(seeds))]
    left = _left_for_good(_shared_memory() - before)
    if left and found:  # of which trial cannot be said
        of_all = tuple(Violation(LEFT, None, f"{path}, of one of the trials") for path in sorted(left))
        for violation in of_all:
            on_left(violation)
        last = found[-1]
        found[-1] = Verdict(last.trial, last.violations + of_all, last.detected_s, last.closed_s, last.checked)
    return found


def run_trial(trial: Trial, options: Options, stop: threading.Event | None = None) -> Seen:
    """Starts the ranks of one trial and waits for their end. Raises ``Stopped`` once ``stop`` is set."""
    said: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def take(rank: int, line: str) -> None:
        if line.startswith("{"):  # UCX may complain of a peer that is gone
            said[rank].append(json.loads(line))

    exits: list[RankExit] = []
    hung: tuple[int, ...] = ()
    where = ""
    mark = f"{os.getpid()}-{trial.seed}-{time.monotonic_ns()}"
    with (
        tempfile.TemporaryDirectory(prefix="telegrad-faults-") as folder,
        open_network(trial.network, trial.size) as network,
        Ranks(
            "lab.faults.ranks:rank_main",
            trial.size,
            timeout_s=TRIAL_LIMIT_S + 2 * trial.liveness_timeout_s,
            arguments=[str(trial.seed), options.to_json()],
            environment={**SINGLE_THREADED, **network.environment, _MARK: mark, "TELEGRAD_REPORT_DIR": folder},
            on_line=take,
        ) as ranks,
    ):
        try:
            _listen_to_all(ranks, trial, said, stop)
            exits = ranks.wait(until_all=True)
        except RanksTimedOut as error:
            hung, where = tuple(ranks.running()), str(error)
    codes: list[int | None] = [None] * trial.size
    for end in exits:
        codes[end.rank] = end.returncode
    pids = {line["pid"] for lines in said.values() for line in lines if "pid" in line}
    return Seen(
        said=dict(said),
        returncodes=codes,
        hung=hung,
        where=where,
        left=(*_processes_with(mark), *_segments_of(pids)),
        stderr={end.rank: end.stderr for end in exits},
    )


def _listen_to_all(ranks: Ranks, trial: Trial, said: dict[int, Any], stop: threading.Event | None) -> None:
    """Until all have ended. The frozen rank, which is the last one, is killed or woken up."""
    woken = False
    while running := ranks.running():
        if stop is not None and stop.is_set():
            raise Stopped
        if trial.kind == "freeze" and running == [trial.culprit] and not woken and _has_struck(said[trial.culprit]):
            woken = True
            ranks.signal(trial.culprit, signal.SIGCONT if trial.thaws else signal.SIGKILL)
        ranks.listen(_LISTEN_S)


def _has_struck(lines: Sequence[dict[str, Any]]) -> bool:
    return any("fault" in line for line in lines)


def _processes_with(mark: str) -> list[str]:
    """Processes that a trial has left behind."""
    found = []
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # another user's, or just gone
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {folder.name}: {(folder / 'comm').read_text().strip()}")
    return found


def _segments_of(pids: set[int]) -> list[str]:
    """System V shared memory that these processes have made."""
    try:
        header, *rows = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines())
    except (OSError, ValueError):
        return []
    id_at, creator_at = header.index("shmid"), header.index("cpid")
    return [f"shared memory segment {row[id_at]}" for row in rows if int(row[creator_at]) in pids]


def _shared_memory() -> set[Path]:
    """Files of this user that a trial may have made."""
    found = set()
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and not path.name.startswith(_OF_MPI):
                found.add(path)
    return found


def _left_for_good(paths: set[Path]) -> set[Path]:
    """Without those that are gone, or in use, after a while: programs beside us make files before they map them, and
    who cleans up behind a killed one does it later."""
    until_s = time.monotonic() + _LEFT_S
    while (paths := _unused(paths)) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return paths


def _unused(paths: set[Path]) -> set[Path]:
    """Without the files of programs that run beside us."""
    if not paths:
        return paths
    in_use = ""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                in_use += (folder / "maps").read_text()
    return {path for path in paths if path.exists() and str(path) not in in_use}
