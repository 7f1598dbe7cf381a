"""Seeds are played in processes of their own: one that crashes the core, or never ends, costs that seed and no other.

A process reads "FIRST COUNT" lines, and answers each with the number of every seed as it begins it and at last with a
line of JSON. So when it dies, the last number says which seed it was.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from telegrad import _core

SEED_CPU_S = 60
"""Of processor time for a seed of at most 64 ranks, which takes some milliseconds; more ranks have more, as messages
grow with their square."""

_DETAIL_LINES = 12  # of what a process said before it died


@dataclass(frozen=True)
class Played:
    """Some seeds that were played to the end: ``texts`` is what ``_core.explore`` says of them."""

    seeds: int
    texts: Sequence[str]


@dataclass(frozen=True)
class Died:
    """A seed that took its process with it. ``what``: "crash", or "endless" where its processor time was used up;
    ``detail``: how it ended, and what it said, in lines of text."""

    seed: int
    what: str
    detail: str
    seeds: int = 1


def worker_command(ranks: tuple[int, int], only: str) -> list[str]:
    """Runs ``main`` with this Python."""
    return [sys.executable, "-m", "telegrad.sim.seed_processes", str(ranks[0]), str(ranks[1]), only]


def play_chunks(
    chunks: Sequence[tuple[int, int]], jobs: int, command: Sequence[str]
) -> Generator[Played | Died, None, None]:
    """Plays all ``chunks`` (first seed, how many) in ``jobs`` processes that run ``command``; in the order in which
    they are through. Raises ``RuntimeError`` if a process does not even begin."""
    return _Crew(chunks, jobs, command).results()


class _Worker:
    """One process, and what is known of it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- closed in close()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        self.seed: int | None = None  # that it plays

    def play(self, first: int, count: int) -> list[str] | None:
        """None: the process died over it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.seed = None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{first} {count}\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("["):
                texts: list[str] = json.loads(line)
                return texts
            if line.endswith("\n"):
                self.seed = int(line)
        return None

    def ending(self) -> tuple[str, str]:
        """``what`` and ``detail`` of a process that has died."""
        status = self.process.wait()
        self._said.seek(0)
        said = self._said.read().splitlines()[-_DETAIL_LINES:]
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        if status == -signal.SIGXCPU:
            return "endless", "\n".join(["the seed was not over when its processor time was used up", *said])
        return "crash", "\n".join([f"the process ended {how}{': ' + said[-1] if said else ''}", *said])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self._said.close()


class _Crew:
    """A thread for each process, which waits for it."""

    def __init__(self, chunks: Sequence[tuple[int, int]], jobs: int, command: Sequence[str]) -> None:
        self._command = list(command)
        self._seeds = sum(count for _, count in chunks)
        self._to_do: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()  # None: go home
        self._done: queue.SimpleQueue[Played | Died | Exception] = queue.SimpleQueue()
        for chunk in chunks:
            self._to_do.put(chunk)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"seeds {i}", daemon=True) for i in range(min(jobs, len(chunks)))
        ]

    def results(self) -> Generator[Played | Died, None, None]:
        for thread in self._threads:
            thread.start()
        try:
            left = self._seeds
            while left > 0:
                result = self._done.get()
                if isinstance(result, Exception):
                    raise result
                left -= result.seeds
                yield result
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            for worker in self._workers:
                worker.process.kill()
        for _ in self._threads:
            self._to_do.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        try:
            while self._employ_one():
                pass
        except Exception as error:  # it is raised where the results are awaited
            self._done.put(error)

    def _employ_one(self) -> bool:
        """Gives one process work for as long as it lives. False: nothing more is to be done."""
        with self._lock:
            if self._stopping:
                return False
            worker = _Worker(self._command)
            self._workers.add(worker)
        try:
            while (chunk := self._to_do.get()) is not None and not self._stopping:
                texts = worker.play(*chunk)
                if texts is None:
                    self._take_leave(worker, *chunk)
                    return True
                self._done.put(Played(chunk[1], texts))
            return False
        finally:
            with self._lock:
                self._workers.discard(worker)
            worker.close()

    def _take_leave(self, worker: _Worker, first: int, count: int) -> None:
        """What the process had found of other seeds is lost: they are played again."""
        what, detail = worker.ending()
        if self._stopping:
            return
        if worker.seed is None:
            raise RuntimeError(f"a process that was to play seeds ended before it had begun: {detail}")
        self._done.put(Died(worker.seed, what, detail))
        for begin, end in ((first, worker.seed), (worker.seed + 1, first + count)):
            if begin < end:
                self._to_do.put((begin, end - begin))


def _limit_processor_time(seed_s: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + seed_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def main() -> None:
    """What each process runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first_ranks, last_ranks, only = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    seed_s = SEED_CPU_S * max(1.0, (last_ranks / 64) ** 2)
    for line in sys.stdin:
        first, count = map(int, line.split())
        texts = []
        for seed in range(first, first + count):
            print(seed, flush=True)
            _limit_processor_time(seed_s)
            texts.append(_core.explore(seed, 1, first_ranks, last_ranks, only))
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    main()
