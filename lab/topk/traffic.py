"""All bytes of Ok-Topk in its default state, of the rank that moves most: ``python -m lab topk --bytes``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.topk import made_up_calls
from lab.topk.made_up_calls import ALPHA_S, BETA_S_PER_BYTE, ENTRIES, called
from lab.topk.recording import Recording
from lab.topk.schemes import most_bytes
from lab.topk.streams import SelectingRank, wanted
from telegrad.communicator import OkTopkState
from telegrad.tools.report.figures import duration

Row = dict[str, Any]

RECORDED = "recorded"
THIS, BESIDE = "this", "beside"
RECORDED_CALLS = 8
RECORDED_RANKS = (4, 8, 16, 32, 64)
TIES_RANKS = (4, 16, 64)

ABOUT = {
    "entries": {**ENTRIES, RECORDED: "recorded gradients, selected with residuals as in training"},
    "network": f"virtual time, alpha {ALPHA_S * 1e6:g} us, beta {BETA_S_PER_BYTE * 1e9:g} ns a byte, wire 'raw'",
    "bytes_over_4k": "of the rank that sends or receives most, everything counted: entries, headers and counts; 2 is "
    "what k entries of 8 bytes are",
    "bound_bytes": "what no rank exceeds in such a call of this version (OkTopkState.bytes_most)",
    "version": "this one; beside: the telegrad of --beside",
}
"""What the fields of a row mean, for result files."""


@dataclass(frozen=True)
class Part:
    """Calls that follow one another."""

    version: str
    entries: str
    ranks: int
    k: int
    calls: int

    @property
    def about(self) -> str:
        return f"{self.entries}, {self.ranks:,} ranks, k = {self.k:,}" + (" (beside)" if self.version == BESIDE else "")


def parts_of(ranks: Sequence[int], ks: Sequence[int], calls: int, beside: Sequence[tuple[int, int]]) -> list[Part]:
    """All made-up entries; ``beside``: ranks and k of what the other version does, too."""
    parts = [Part(THIS, "uniform", count, k, calls) for k in ks for count in ranks]
    parts += [Part(BESIDE, "uniform", count, k, calls) for count, k in beside]
    tied = [count for count in TIES_RANKS if count in ranks]
    parts += [Part(THIS, entries, count, min(ks), 2) for entries in list(ENTRIES)[1:] for count in tied]
    return parts


def made_up_rows(part: Part, python: Path | None) -> list[Row]:
    """Of ``part``, here or by another Python. Raises ``RuntimeError`` with what that says if it fails."""
    arguments = (part.entries, part.ranks, part.k, part.calls)
    if part.version == THIS:
        return [_judged({"version": THIS, **row}) for row in made_up_calls.rows_of(*arguments)]
    done = subprocess.run(
        [str(python), made_up_calls.__file__], input=json.dumps(arguments), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{python} failed: {done.stderr.strip()[-500:]}")
    return [_with_bytes({"version": BESIDE, **json.loads(line)}) for line in done.stdout.splitlines()]


def recorded_rows(recording: Recording, density: float, ranks: int, calls: int = RECORDED_CALLS) -> Iterator[Row]:
    """Of calls on recorded gradients; what a sum does not keep goes back into the residuals."""
    k = wanted(recording, density)
    selecting = [SelectingRank(recording, density, "reused") for _ in range(ranks)]
    states = [OkTopkState(k) for _ in range(ranks)]
    for call in range(calls):
        given = [one.select(recording.gradient(rank, call)) for rank, one in enumerate(selecting)]
        done, row = called(given, states)
        for one, result in zip(selecting, done, strict=True):
            one.take_back(result.left)
        of_call = {"entries": RECORDED, "ranks": ranks, "n": recording.elements, "k": k, "call": call}
        yield _judged({"version": THIS, **of_call, **row})


def all_rows(
    parts: Sequence[Part],
    python: Path | None,
    recording: Recording | None,
    density: float,
    recorded_ranks: Sequence[int] = RECORDED_RANKS,
    on_done: Callable[[str], None] = lambda about: None,
) -> list[Row]:
    """Of all parts, and of recorded gradients if there are any. ``on_done`` is called with what is over."""
    rows: list[Row] = []
    for part in parts:
        rows += made_up_rows(part, python)
        on_done(part.about)
    for ranks in recorded_ranks if recording is not None else ():
        assert recording is not None
        rows += recorded_rows(recording, density, ranks)
        on_done(f"recorded, {ranks} ranks")
    return rows


def _with_bytes(row: Row) -> Row:
    return row | {"bytes_over_4k": row["bytes_max"] / (4 * row["k"])}


def _judged(row: Row) -> Row:
    steps = {name: row[name] for name in ("cut", "exact", "balanced")}
    bound = most_bytes(max(row["given"], row["kept"]), row["k"], row["ranks"], row["n"], **steps)
    return _with_bytes(row) | {"bound_bytes": bound, "bytes_of_bound": row["bytes_max"] / bound}


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each version, entries, k and number of ranks: bytes of the first call and the most of the later ones
    in 4k, the largest share of the bound, entries that the sums keep in k, exact thresholds, and times."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        k = "" if row["entries"] == RECORDED else row["k"]
        groups.setdefault((row["version"], row["entries"], k, row["ranks"]), []).append(row)
    lines = []
    for (version, entries, _, ranks), there in groups.items():
        first, later = there[0], there[1:] or there
        shares = [row["bytes_of_bound"] for row in there if "bytes_of_bound" in row]
        lines.append(
            [
                entries if version == THIS else f"{entries} ({version})",
                f"{first['k']:,}",
                f"{ranks:,}",
                f"{first['bytes_over_4k']:.2f}",
                f"{max(row['bytes_over_4k'] for row in later):.2f}",
                f"{max(shares):.2f}" if shares else "–",
                f"{max(row['kept'] / row['k'] for row in there):.2f}",
                f"{sum(row['exact'] for row in there)}/{len(there)}",
                duration(first["time_s"]),
                duration(later[-1]["time_s"]),
            ]
        )
    return lines


def ratios(rows: Sequence[Row]) -> list[str]:
    """What the other version sends and takes, beside this one: of the last call of what both have done."""
    last = {(row["version"], row["ranks"], row["k"]): row for row in rows if row["entries"] == "uniform"}
    said = []
    for (version, ranks, k), other in last.items():
        here = last.get((THIS, ranks, k))
        if version == BESIDE and here is not None:
            less, share = other["bytes_max"] / here["bytes_max"], here["time_s"] / other["time_s"]
            said.append(f"{ranks:,} ranks, k = {k:,}: {less:.1f} times fewer bytes, {share:.2f} of the time")
    return said


def is_usable(python: Path) -> bool:
    """Whether that Python has a telegrad with Ok-Topk."""
    done = subprocess.run(
        [str(python), "-c", "import telegrad; telegrad.OkTopkState"], capture_output=True, cwd="/", check=False
    )
    return done.returncode == 0 and python.absolute() != Path(sys.executable).absolute()
