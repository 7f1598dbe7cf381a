"""The command, and the processes that play seeds for it."""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from lab.simulated_faults import Played, play_chunks
from lab.simulated_membership.world import World, play, worst_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.outputs import check_writable, counting, say_file, written
from telegrad.tools.sim.measure import cores

_REPLICAS = "--replicas"


def _playing(replicas: bool) -> Callable[[int], World]:
    if not replicas:
        return play
    from lab.simulated_membership.replicas import play as play_replicas  # slow to import

    return play_replicas


def explored(first: int, count: int, playing: Callable[[int], World] = play) -> dict[str, Any]:
    """Plays these seeds. Returns counts, and the worst finding of each seed that has one."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        world = playing(seed)
        counts.update(world.counts)
        if (found := worst_of(world)) is not None:
            failures.append({"seed": seed, "what": found[0], "detail": found[1]})
    return {"seeds": count, "counts": dict(counts), "failures": failures}


_CHUNK_SEEDS = 25
_ABOUT = {
    "sums": "of a process, compared bit by bit with the others'",
    "groups": "that the processes have agreed on",
    "shrunk": "returns of shrink(), by a process",
    "grown": "returns of grow() with newcomers, by a process",
    "joined": "returns of join()",
    "refused": "join() that ended with an error, such as that the job had ended",
    "dropped": "processes that were told that the others had gone on without them",
    "left": "processes that ended in the middle of the job",
    "killed": "processes",
    "frozen": "processes, some several times",
    "rounds": "that a process of replicas has ended, compared bit by bit with the others'",
    "failed": "processes of replicas that ended with an error",
}


def command(
    replicas: Annotated[bool, typer.Option(_REPLICAS, help="Play replicas that train by DiLoCo, not ranks.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="How many programs to play.")] = 10_000,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that share the work; default: one a core.")] = None,
    replay: Annotated[int | None, typer.Option(min=0, help="Play this one seed, and tell all about it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write what was found here.")] = None,
) -> None:
    """Explore random programs that shrink, grow and join under random further faults in virtual time.

    From each seed follow ranks that join, sum in a loop and shrink after each failure, and processes that come later.
    They are killed, freeze, leave, and hear from the store late, also while they agree and connect. All that are left
    must agree on the same ranks in the same order, and compute again in time, with the same bits. Who was left out must
    be told. With ``--replicas`` they are replicas of one or two processes that train by DiLoCo. Ends with status 1 if a
    seed shows anything else.
    """
    console = Console()
    check_writable(json_file, "--json")
    if replay is not None:
        world = _playing(replicas)(replay)
        for line in (str(world.program), *world.trace, f"{len(world.findings)} findings, {dict(world.counts)}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(bool(world.findings))
    begin_s, played, counts = time.monotonic(), 0, Counter[str]()
    failures: list[dict[str, Any]] = []
    chunks = [
        (first, min(_CHUNK_SEEDS, first_seed + seeds - first))
        for first in range(first_seed, first_seed + seeds, _CHUNK_SEEDS)
    ]
    kind = [_REPLICAS] * replicas
    worker = ["env", "PYTHONHASHSEED=0", sys.executable, "-m", "lab.simulated_membership.command", *kind]
    with (
        ended_by_interrupt(console, "stopped"),
        counting(console, TimeRemainingColumn(), TextColumn("{task.fields[bad]}")) as bar,
    ):
        task = bar.add_task("seeds", total=seeds, bad="")
        for result in play_chunks(chunks, jobs or cores(), worker):
            played += result.seeds
            if not isinstance(result, Played):
                failures.append({"seed": result.seed, "what": result.what, "detail": result.detail})
            else:
                for found in map(json.loads, result.texts):
                    counts.update(found["counts"])
                    failures += found["failures"]
            bar.update(task, advance=result.seeds, bad=f"{len(failures)} failures" if failures else "")
    for failure in failures:
        text = f"{failure['what']}: {failure['detail'].splitlines()[0]}"
        again = f"PYTHONHASHSEED=0 python -m lab simulated-membership {' '.join([*kind, '--replay'])} {failure['seed']}"
        console.print(f"{text}\n  {again}", highlight=False, markup=False, soft_wrap=True)
    for name, about in _ABOUT.items():
        if counts[name]:
            console.print(f"{counts[name]:12,} {name}: {about}", highlight=False)
    console.print(f"{played:,} seeds from {first_seed}, {len(failures)} failures; {time.monotonic() - begin_s:.0f} s")
    if json_file is not None:
        found = {"seeds": played, "first_seed": first_seed, "counts": dict(counts), "failures": failures}
        with written(console, json_file):
            json_file.write_text(json.dumps(found | {"about": _ABOUT}, indent=1) + "\n")
        say_file(console, "found", json_file)
    raise typer.Exit(bool(failures))


def play_main() -> None:
    """Plays the seeds that stdin names, as ``lab.simulated_faults.play_chunks`` asks."""
    playing = _playing(_REPLICAS in sys.argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        first, count = map(int, line.split())
        texts = []
        for seed in range(first, first + count):
            print(seed, flush=True)
            texts.append(json.dumps(explored(seed, 1, playing)))
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    play_main()
