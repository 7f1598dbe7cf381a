"""Runs the scenes of ``telegrad bench errors`` and puts into words what happened: nothing here is known beforehand."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telegrad.bench.error_scenes import CULPRIT, NEED_TORCH, RANKS, SCENES
from telegrad.bench.networks import open_network
from telegrad.launch import Ranks, RanksTimedOut

_STARTING_S = 90.0
_LISTEN_S = 0.1


@dataclass(frozen=True)
class Row:
    """A scene in words, and by library what happened."""

    scene: str
    cells: Mapping[str, str]


def measure(
    libraries: Sequence[str],
    *,
    give_up_s: float,
    without_torch: str | None,
    scenes: Sequence[str] = tuple(SCENES),
    on_start: Callable[[str, str], None] = lambda *_: None,
) -> list[Row]:
    """All scenes with each library in turn. ``give_up_s``: how long to wait for an answer, in seconds. What needs
    torch says ``without_torch`` instead, if that is given."""
    rows = []
    for scene in scenes:
        cells = {}
        for library in libraries:
            if without_torch and (library == "gloo" or scene in NEED_TORCH):
                cells[library] = without_torch
                continue
            on_start(library, scene)
            said, codes = run_scene(library, scene, give_up_s)
            cells[library] = described(scene, said, codes, give_up_s, time_out_s=_time_out_s(library))
        rows.append(Row(SCENES[scene], cells))
    return rows


def run_scene(
    library: str, scene: str, give_up_s: float
) -> tuple[Mapping[int, Sequence[Mapping[str, Any]]], Mapping[int, int]]:
    """What each rank said, and the exit status of those that ended within ``give_up_s`` after it had happened."""
    said: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def take(rank: int, line: str) -> None:
        if line.startswith("{"):
            said[rank].append(json.loads(line))

    with tempfile.TemporaryDirectory(prefix="telegrad-errors-") as folder, open_network("shm", RANKS) as network:
        environment = {"OMP_NUM_THREADS": "1", "TELEGRAD_REPORT_DIR": folder, **network.environment}
        with Ranks(
            "telegrad.bench.error_scenes:main",
            RANKS,
            timeout_s=_STARTING_S + give_up_s,
            arguments=[library, scene, os.path.join(folder, "store")],
            environment=environment,
            on_line=take,
        ) as ranks:
            try:
                while _concerned(scene, ranks.running()):
                    ranks.listen(_LISTEN_S)
                    since_s = began_s(scene, said)
                    if since_s is not None and time.monotonic() - since_s > give_up_s:
                        break
            except RanksTimedOut:
                pass  # who has said nothing by now is told as such
            running = ranks.running()
            for rank in running:
                ranks.signal(rank, signal.SIGKILL)
            exits = ranks.wait(until_all=True)
    return dict(said), {end.rank: end.returncode for end in exits if end.rank not in running}


def _concerned(scene: str, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` of whom an answer is wanted."""
    return [rank for rank in ranks if scene not in ("kill", "freeze") or rank != CULPRIT]


def began_s(scene: str, said: Mapping[int, Sequence[Mapping[str, Any]]]) -> float | None:
    """When it happened: the fault, or the last rank's call. None if it has not yet."""
    key = "fault" if scene in ("kill", "freeze") else "called"
    of_ranks = [CULPRIT] if key == "fault" else range(RANKS)
    times = [line[key] for rank in of_ranks for line in said.get(rank, ()) if key in line]
    return max(times) if len(times) == len(of_ranks) else None


def described(
    scene: str,
    said: Mapping[int, Sequence[Mapping[str, Any]]],
    codes: Mapping[int, int],
    give_up_s: float,
    *,
    time_out_s: float | None,
) -> str:
    """One cell: what each rank got, ranks with the same fate together."""
    since_s = began_s(scene, said)
    fates: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for rank in _concerned(scene, range(RANKS)):
        end = next((line["end"] for line in said.get(rank, ()) if "end" in line), None)
        if end is not None:
            fate = _error_fate(end) if end["error"] else _result_fate(end)
            if end["error"] and since_s is not None:
                times[fate].append(max(0.0, end["at_s"] - since_s))
        elif rank in codes:
            how = f"exit status {codes[rank]}" if codes[rank] >= 0 else signal.Signals(-codes[rank]).name
            fate = f"the process dies ({how})"
        else:
            limit = f" (its time-out is {time_out_s / 60:.0f} min)" if time_out_s else ""
            fate = f"nothing within {give_up_s:g} s{limit}"
        fates[fate].append(rank)
    parts = []
    for fate, ranks in fates.items():
        after = f" after {_rounded(max(times[fate]))} s" if times[fate] else ""
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        parts.append(f"{who}: {fate}{after}")
    return "; ".join(parts)


def _error_fate(end: Mapping[str, Any]) -> str:
    if end["named"] is None:
        return f"{end['error']} that names nobody"
    host = " and its host" if end["host"] else ""
    parameter = f" and the parameter `{end['parameter']}`" if end["parameter"] else ""
    return f"{end['error']} that names rank {end['named']}{host}{parameter}"


def _result_fate(end: Mapping[str, Any]) -> str:
    if "spoilt" in end:
        return f"no error, {'but' if end['spoilt'] else 'and'} NaN in {end['spoilt']} of {end['gradients']} gradients"
    given = range(1, RANKS + 1)
    asked = end["reduction"]
    truth = {"sum": sum(given), "max": max(given), "avg": sum(given) / RANKS}[asked]
    if end["result"] == truth:
        return f"no error, and the {asked} {truth:g}"
    got = "NaN" if end["result"] is None else f"{end['result']:g}"
    return f"no error, but {got} instead of the {asked} {truth:g}"


def _rounded(seconds: float) -> str:
    """Two digits, but no more than hundredths: the rest is the machine's."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{max(0.01, math.ceil(seconds * 100) / 100):.2f}"


def _time_out_s(library: str) -> float | None:
    """After which the library itself gives up, unless told otherwise."""
    if library != "gloo":
        return None
    from torch.distributed.constants import default_pg_timeout

    return float(default_pg_timeout.total_seconds())


BEGIN, END = "<!-- begin telegrad bench errors -->", "<!-- end telegrad bench errors -->"


def insert(text: str, path: Path) -> None:
    """Puts ``text`` between the two markers of a file. Raises ``ValueError`` if they are not there, once each and in
    order."""
    before, after = around(path)
    path.write_text(f"{before}{BEGIN}\n{text.strip()}\n{END}{after}")


def around(path: Path) -> tuple[str, str]:
    """What a file has before and after the two markers. Raises ``ValueError`` as ``insert``."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after or END in before:
        raise ValueError(f"{path} must hold the lines {BEGIN!r} and {END!r} once, in this order: add them")
    return before, after
