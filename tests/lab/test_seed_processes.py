"""Processes that play seeds: one that dies costs its seed, and nothing else is lost."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from lab.simulated_faults import Died, Played, play_chunks, worker_command

_CHUNKS = [(0, 40), (40, 40), (80, 5)]


def _player(folder: Path, fatal: str) -> list[str]:
    """A process that speaks as the real one does, and before each seed runs ``fatal``."""
    file = folder / "player.py"
    file.write_text(
        textwrap.dedent(
            """
            import json, os, resource, signal, sys
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for line in sys.stdin:
                first, count = map(int, line.split())
                for seed in range(first, first + count):
                    print(seed, flush=True)
            FATAL
                print(json.dumps([str(seed) for seed in range(first, first + count)]), flush=True)
            """
        ).replace("FATAL", textwrap.indent(textwrap.dedent(fatal), " " * 8))
    )
    return [sys.executable, str(file)]


def _play(command: list[str], jobs: int) -> tuple[list[int], list[Died]]:
    results = list(play_chunks(_CHUNKS, jobs, command))
    played = [int(text) for one in results if isinstance(one, Played) for text in one.texts]
    assert sum(one.seeds for one in results) == 85
    return sorted(played), sorted((one for one in results if isinstance(one, Died)), key=lambda died: died.seed)


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_seeds_but_those_that_crash_are_played(tmp_path: Path, jobs: int) -> None:
    fatal = """
    if seed in (0, 17, 18, 79):
        print("check failed: core/job.cpp:12", file=sys.stderr, flush=True)
        os.abort()
    if seed == 84:
        sys.exit(5)
    """
    played, died = _play(_player(tmp_path, fatal), jobs)
    assert played == [seed for seed in range(85) if seed not in (0, 17, 18, 79, 84)]
    assert [one.seed for one in died] == [0, 17, 18, 79, 84]
    assert {one.what for one in died} == {"crash"}
    assert died[1].detail.splitlines()[0] == "the process ended by signal SIGABRT: check failed: core/job.cpp:12"
    assert died[4].detail == "the process ended with status 5"


def test_a_seed_that_never_ends_is_told(tmp_path: Path) -> None:
    fatal = """
    if seed == 41:
        resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
        while True:
            pass
    """
    played, died = _play(_player(tmp_path, fatal), 2)
    assert len(played) == 84
    assert [(one.seed, one.what) for one in died] == [(41, "endless")]


def test_the_real_process_bounds_every_seed_by_processor_time() -> None:
    script = """if True:
        import os
        from lab import simulated_faults

        class Core:
            @staticmethod
            def explore(seed, seeds, first_ranks, last_ranks, only):
                while seed == 41:
                    pass
                if seed == 7:
                    os.abort()
                return str(seed) if (seeds, first_ranks, last_ranks, only) == (1, 2, 9, "kill") else "-1"

        simulated_faults._core = Core
        simulated_faults.SEED_CPU_S = 0.3
        simulated_faults.play_main()
    """
    played, died = _play([sys.executable, "-c", script, *worker_command((2, 9), "kill")[3:]], 2)
    assert played == [seed for seed in range(85) if seed not in (7, 41)]
    assert [(one.seed, one.what) for one in died] == [(7, "crash"), (41, "endless")]


def test_a_process_that_does_not_begin_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before it had begun: .*status 3"):
        list(play_chunks(_CHUNKS, 2, [sys.executable, "-c", "raise SystemExit(3)"]))
    with pytest.raises(FileNotFoundError):
        list(play_chunks(_CHUNKS, 2, ["/nowhere/at/all"]))


def test_who_listens_no_more_leaves_no_process_behind(tmp_path: Path) -> None:
    results = play_chunks(_CHUNKS, 2, _player(tmp_path, "if seed > 45: signal.pause()"))
    assert isinstance(next(results), Played)
    results.close()  # would wait for ever for a process that still plays
