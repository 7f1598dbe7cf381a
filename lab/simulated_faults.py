"""Random programs under random faults, in virtual time, from seeds: does every call end, with the right bits?

Each seed is one simulation of some ranks: what they call, what their network costs and what goes wrong follow from it.
Every call must end, with the right bits or with an error that names the rank at fault.

Seeds are spread over the cores of this machine, in processes of their own: one that crashes the core, or never ends,
costs that seed and no other. A process reads "FIRST COUNT" lines, and answers each with the number of every seed as it
begins it and at last with a line of JSON. So when it dies, the last number says which seed it was.
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
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from lab.common.commands import rank_range
from telegrad import _core
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import refuse_given
from telegrad.tools.cli.outputs import check_all_writable, counting, say_file, written
from telegrad.tools.sim.measure import cores

# Processes that play seeds

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
    return [sys.executable, "-m", "lab.simulated_faults", str(ranks[0]), str(ranks[1]), only]


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


def play_main() -> None:
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


# Exploration of seeds

RANKS = (2, 33)
"""The range of sizes that seeds are drawn from where nothing else is said."""
LAST_SEED = (1 << 64) - 1

_CHUNK_SEEDS = 250  # well below a second, so that progress is smooth and an interrupt is heard
_COUNTS = ("seeds", "operations", "results", "events", "hangs", "wrong", "wrong_errors", "errors_named")
_ALL_COUNTS = (*_COUNTS, "crashes")


@dataclass(frozen=True)
class Failure:
    """A seed that showed what must not be. ``what``: "hang", "wrong result" or "wrong error", and ``detail``: the
    worst finding, and the program, in lines of text; or "crash" or "endless", and how the process ended that played
    it."""

    seed: int
    what: str
    detail: str


@dataclass
class Exploration:
    """What some seeds showed.

    ``operations``: calls of all ranks; ``results``: successes of which every bit was compared; ``events``: of the
    simulated networks; ``hangs``, ``wrong``, ``wrong_errors``: seeds by the worst that they showed, where a seed
    that never ends is a hang; ``crashes``: seeds that ended their process; ``errors_named``:
    seeds in which something failed and every survivor named the culprit; ``troubles``: how many seeds had which.
    """

    seeds: int = 0
    operations: int = 0
    results: int = 0
    events: int = 0
    hangs: int = 0
    wrong: int = 0
    wrong_errors: int = 0
    errors_named: int = 0
    crashes: int = 0
    ranks_most: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``_core.explore`` returns."""
        found = json.loads(text)
        return cls(
            **{name: found[name] for name in (*_COUNTS, "ranks_most")},
            troubles=Counter(found["troubles"]),
            failures=[Failure(**one) for one in found["failures"]],
        )

    @classmethod
    def of_death(cls, death: Died) -> Self:
        """A seed that ended the process that played it."""
        endless = death.what == "endless"
        failures = [Failure(death.seed, death.what, death.detail)]
        return cls(seeds=1, hangs=int(endless), crashes=int(not endless), failures=failures)

    def add(self, other: Exploration) -> None:
        """Takes in what other seeds showed. Failures stay in the order of seeds."""
        for name in _ALL_COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ranks_most = max(self.ranks_most, other.ranks_most)
        self.troubles.update(other.troubles)
        if other.failures:
            self.failures = sorted([*self.failures, *other.failures], key=lambda failure: failure.seed)

    def to_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {
            **{name: getattr(self, name) for name in (*_ALL_COUNTS, "ranks_most")},
            "troubles": dict(self.troubles),
            "failures": [vars(failure) for failure in self.failures],
        }


@dataclass(frozen=True)
class Replayed:
    """One seed again. ``program``: what was drawn, in lines of text; ``findings``: (what, detail), empty if all was
    well; ``errors``: what failing ranks said; ``trace``: one line per event of the network, ``trace_hash`` of it."""

    seed: int
    program: str
    findings: list[tuple[str, str]]
    errors: list[str]
    events: int
    trace_hash: int
    trace: str


def troubles() -> tuple[str, ...]:
    """The names of all that may go wrong."""
    return tuple(json.loads(_core.explore(0, 0, *RANKS))["troubles"])


def explore(
    first_seed: int = 0,
    seeds: int = 1000,
    *,
    ranks: tuple[int, int] = RANKS,
    only: str = "",
    jobs: int | None = None,
    on_progress: Callable[[int, Exploration], None] = lambda *_: None,
) -> Exploration:
    """Plays ``seeds`` seeds from ``first_seed`` on, each with a number of ranks in ``ranks`` (fewest, most).

    ``only``: the name of a trouble; other seeds are passed over. ``jobs`` processes share the work (default: one per
    core). A seed that crashes its process, or does not end, is a failure like others.
    ``on_progress(seeds looked at since the last call, all that was found so far)`` runs on this thread. Raises
    ``ValueError`` for a range of ranks outside 2 to 4,096, an unknown trouble, numbers below 0 (``jobs``: below 1), and
    seeds beyond ``LAST_SEED``.
    """
    if first_seed < 0 or seeds < 0:
        raise ValueError(f"first_seed={first_seed} and seeds={seeds} must not be negative")
    if first_seed + seeds > LAST_SEED + 1:
        raise ValueError(f"{seeds} seeds from {first_seed} go beyond {LAST_SEED}, the last: begin earlier")
    if jobs is None:
        jobs = cores()
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1: the processes that share the work")
    if only and only not in (known := troubles()):
        raise ValueError(f"only={only!r} is no trouble that the explorer knows: use {', '.join(known)}")
    _core.explore(first_seed, 0, *ranks, only)  # refuses bad arguments here rather than in every process
    end = first_seed + seeds
    chunks = [(begin, min(_CHUNK_SEEDS, end - begin)) for begin in range(first_seed, end, _CHUNK_SEEDS)]
    found = Exploration()

    for result in play_chunks(chunks, jobs, worker_command(ranks, only)):
        if isinstance(result, Played):
            for text in result.texts:
                found.add(Exploration.from_json(text))
        else:
            found.add(Exploration.of_death(result))
        on_progress(result.seeds, found)
    return found


def replay(seed: int, *, ranks: tuple[int, int] = RANKS) -> Replayed:
    """Plays one seed again, event by event as before, where ``ranks`` is what it was. Raises ``ValueError`` as
    ``explore`` does."""
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    if seed > LAST_SEED:
        raise ValueError(f"seed={seed} is beyond {LAST_SEED}, the last")
    text, trace_hash, trace = _core.replay(seed, *ranks)
    found = json.loads(text)
    findings = [(one["what"], one["detail"]) for one in found["findings"]]
    return Replayed(seed, found["program"], findings, found["failures"], found["events"], trace_hash, trace)


# The command

_MOST_SEEDS = 100_000_000
_DEFAULT_RANKS = f"{RANKS[0]}..{RANKS[1]}"


def command(
    context: typer.Context,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_SEEDS, help="How many to play: one simulation each. --only passes over the others."
        ),
    ] = 10_000,
    ranks: Annotated[
        str, typer.Option(help="Fewest and most ranks of a simulation, as 2..33, or one number.")
    ] = _DEFAULT_RANKS,
    first_seed: Annotated[int, typer.Option(min=0, max=LAST_SEED, help="The first of them.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that share the work; default: one a core.")] = None,
    only: Annotated[str, typer.Option(help=f"Play only seeds with this trouble: {', '.join(troubles())}.")] = "",
    replay_seed: Annotated[
        int | None,
        typer.Option("--replay", min=0, max=LAST_SEED, help="Play this one seed again, and tell all about it."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(dir_okay=False, help="With --replay: write every event of the network here.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write what was found here.")] = None,
) -> None:
    """Explore random programs under random faults in virtual time.

    From each seed follow some ranks, what they call, what their network costs, and what goes wrong: a rank is killed,
    freezes or is slow, messages are late or damaged, ranks call different things, one gives up or leaves. Every call
    must end: with the right sum, bit by bit, or with an error that names the culprit, the same one on all survivors.
    Ends with status 1 if a seed shows anything else, crashes or never ends; each such seed is told with the command
    that replays it.
    """
    console = Console()
    lowest, highest = rank_range(ranks, most=4096, example=_DEFAULT_RANKS)
    _check_seeds(first_seed, seeds, only)
    check_all_writable({"--json": json_file, "--trace": trace})
    if trace is not None and replay_seed is None:
        raise typer.BadParameter("only one seed can be traced: give --replay SEED too", param_hint="--trace")
    if replay_seed is not None:
        refuse_given(context, ("seeds", "first_seed", "only"), "--replay plays one seed alone")
        _replay(console, replay_seed, (lowest, highest), trace, json_file)
        return
    began = time.monotonic()
    with (
        ended_by_interrupt(console, "stopped"),
        counting(console, TimeRemainingColumn(), TextColumn("{task.fields[bad]}")) as bar,
    ):
        task = bar.add_task("seeds", total=seeds, bad="")

        def show(count: int, found: Exploration) -> None:
            bar.update(task, advance=count, bad=f"{len(found.failures)} failures" if found.failures else "")

        try:
            found = explore(first_seed, seeds, ranks=(lowest, highest), only=only, jobs=jobs, on_progress=show)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    taken_s = time.monotonic() - began
    if not found.seeds and not found.failures:
        raise typer.BadParameter(
            f"none of the seeds {first_seed} to {first_seed + seeds - 1} has the trouble {only!r}: look at more",
            param_hint="--seeds",
        )
    for failure in found.failures:
        command = f"python -m lab simulated-faults --replay {failure.seed} --ranks {lowest}..{highest}"
        text = f"{failure.what}: {failure.detail.splitlines()[0]}\n  {command}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(_table_of(found, f"{found.seeds:,} seeds from {first_seed}, {lowest} to {highest} ranks"))
    console.print(
        f"{found.hangs} hangs, {found.wrong} wrong results, {found.wrong_errors} wrong errors, "
        f"{found.crashes} crashes; {taken_s:.1f} s",
        highlight=False,
    )
    if json_file is not None:
        with written(console, json_file):
            json_file.write_text(json.dumps({**found.to_dict(), "first_seed": first_seed}, indent=1) + "\n")
        say_file(console, "found", json_file)
    if found.failures:
        raise typer.Exit(1)


def _replay(console: Console, seed: int, ranks: tuple[int, int], trace: Path | None, json_file: Path | None) -> None:
    try:
        _stop_if_it_dies(console, explore(seed, 1, ranks=ranks, jobs=1), json_file)
        again = replay(seed, ranks=ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(again.program)
    for message in again.errors:
        say(message, "dim")
    for what, detail in again.findings:
        say(f"{what}: {detail}", "red")
    say(
        f"{'nothing wrong' if not again.findings else f'{len(again.findings)} findings'}; {again.events:,} events, "
        f"trace {again.trace_hash:016x}",
    )
    if trace is not None:
        with written(console, trace):
            trace.write_text(again.trace)
        say(f"trace: {trace}")
    if json_file is not None:
        told = {
            "seed": seed,
            "program": again.program,
            "findings": [{"what": what, "detail": detail} for what, detail in again.findings],
            "errors": again.errors,
            "events": again.events,
            "trace_hash": f"{again.trace_hash:016x}",
        }
        with written(console, json_file):
            json_file.write_text(json.dumps(told, indent=1) + "\n")
        say(f"found: {json_file}")
    if again.findings:
        raise typer.Exit(1)


def _stop_if_it_dies(console: Console, found: Exploration, json_file: Path | None) -> None:
    """A seed that ended the process it was played in first: here it would end this one, and tell no more."""
    for failure in found.failures:
        if failure.what not in ("crash", "endless"):
            continue
        left_out = f"seed {failure.seed} was not played again: it would end this process too"
        console.print(
            f"{failure.what}: {failure.detail}\n{left_out}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        if json_file is not None:
            findings = [{"what": failure.what, "detail": failure.detail}]
            with written(console, json_file):
                json_file.write_text(json.dumps({"seed": failure.seed, "findings": findings}, indent=1) + "\n")
        raise typer.Exit(1)


def _table_of(found: Exploration, title: str) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in (
        ("calls of all ranks", found.operations),
        ("results compared bit by bit", found.results),
        ("seeds with an error, the culprit named", found.errors_named),
        ("events", found.events),
        ("hangs", found.hangs),
        ("wrong results", found.wrong),
        ("wrong errors", found.wrong_errors),
        ("crashes", found.crashes),
    ):
        table.add_row(name, f"{count:,}")
    return table


def _check_seeds(first_seed: int, seeds: int, only: str) -> None:
    if first_seed + seeds > LAST_SEED + 1:
        raise typer.BadParameter(
            f"{seeds} seeds from {first_seed} go beyond {LAST_SEED}, the last: begin earlier", param_hint="--first-seed"
        )
    if only and only not in (known := troubles()):
        raise typer.BadParameter(f"{only!r} is no trouble: use {', '.join(known)}", param_hint="--only")


if __name__ == "__main__":
    play_main()
