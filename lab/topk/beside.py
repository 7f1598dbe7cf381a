"""Calls of Ok-Topk over a real network by this version and another one, in turn and with the same entries.

Both versions' ranks live side by side, in the same network namespaces. Those that are not asked wait for their pipe.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.topk import timed_calls
from lab.topk.recording import Recording
from lab.topk.streams import streams_of_rank, wanted
from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.bench.plan import Timing, open_network

Row = dict[str, Any]

RANKS = 8
BLOCKS = (1, 16)
_CALLS = 8
_CALIBRATION_S = 7.0
_STARTUP_S = 240.0

ABOUT = {
    "seconds": "of one call, the slowest rank's, after a barrier; no selection. Both versions in turn, with the same "
    "entries, messages as calibrated by each",
    "bytes": "of the rank that sends or receives most, with those of the barrier; the median call",
    "blocks": "how many recorded gradients side by side make a rank's vector",
}
"""The meaning of a timed row's fields, for result files."""


@dataclass
class _Job:
    """The ranks of one version."""

    ranks: Ranks
    pipes: list[int]
    size: int
    said: list[Row] = field(default_factory=list)

    def answers(self) -> list[Row]:
        """What all ranks say next. Raises ``LaunchError``."""
        while len(self.said) < self.size:
            self.ranks.listen()
            if len(self.ranks.running()) < self.size:
                self.ranks.wait()
                raise RuntimeError("ranks ended before they were told to")
        found, self.said[:] = list(self.said), []
        return found

    def call(self, number: int) -> list[Row]:
        """Call ``number`` of all ranks."""
        for pipe in self.pipes:
            os.write(pipe, f"{number}\n".encode())
        return self.answers()


def timed_rows(
    versions: dict[str, Path],
    recording: Recording,
    density: float,
    *,
    network: str,
    ranks: int,
    blocks: int,
    samples: int,
    on_sample: Callable[[str], None] = lambda about: None,
) -> list[Row]:
    """A row for each of ``versions`` (by name, its Python): ``samples`` calls on the recorded gradients.

    Raises ``LaunchError`` and ``NetlabError``, and ``RuntimeError`` if ranks or versions differ in the first sum, which
    is the exact one.
    """
    k = blocks * wanted(recording, density)
    found: dict[str, list[list[Row]]] = {name: [] for name in versions}
    with (
        tempfile.TemporaryDirectory(prefix="telegrad-topk-") as name,
        open_network(network, ranks) as opened,
        ExitStack() as stack,
    ):
        folder = Path(name)
        for rank in range(ranks):
            _write(folder / f"{rank}.npz", recording, density, rank, blocks, k)
        jobs = {}
        for version, python in versions.items():
            pipes = [_pipe(folder / f"{version}-{rank}", stack) for rank in range(ranks)]
            said: list[Row] = []
            started = Ranks(
                timed_calls.__file__,
                ranks,
                timeout_s=_STARTUP_S + 2.0 * samples,
                arguments=[name, version, str(_CALIBRATION_S)],
                environment={**SINGLE_THREADED, **opened.environment, "TELEGRAD_CACHE": str(folder / "cache")},
                prefix_of=lambda rank, python=python: _prefix(opened.prefix_of, rank, python),  # type: ignore[misc]
                on_line=lambda rank, line, said=said: said.append(json.loads(line)),  # type: ignore[misc]
            )
            jobs[version] = _Job(stack.enter_context(started), pipes, ranks, said)
            jobs[version].answers()
        for number in range(samples):
            order = list(versions) if number % 2 == 0 else list(reversed(versions))
            for version in order:
                found[version].append(jobs[version].call(number))
                on_sample(f"{version}: {ranks} ranks, {network}, call {number + 1}")
    first = {answer["checksum"] for calls in found.values() for answer in calls[0]}
    if len(first) > 1:
        raise RuntimeError(f"ranks or versions differ in the first sum, which is exact: {len(first)} checksums")
    return [
        {
            "version": version,
            "network": network,
            "ranks": ranks,
            "blocks": blocks,
            "n": blocks * recording.elements,
            "k": k,
            "samples": samples,
            **_summary(calls),
        }
        for version, calls in found.items()
    ]


def _summary(calls: Sequence[Sequence[Row]]) -> Row:
    seconds = [max(answer["seconds"] for answer in call) for call in calls]
    timing = Timing.of(seconds)
    return {
        "median_s": timing.median_s,
        "min_s": timing.min_s,
        "p90_s": timing.p90_s,
        "mean_s": statistics.fmean(seconds),
        "bytes": statistics.median(max(answer["bytes"] for answer in call) for call in calls),
        "exact": sum(call[0]["exact"] for call in calls),
    }


def timed_ratios(rows: Sequence[Row]) -> list[str]:
    """A sentence for each two rows of the same calls: this version's time and bytes as shares of the other's."""
    said = []
    for here, other in zip(rows[::2], rows[1::2], strict=True):
        share, mean = here["median_s"] / other["median_s"], here["mean_s"] / other["mean_s"]
        said.append(
            f"{here['ranks']} ranks over {here['network']}, recorded gradients, k = {here['k']:,}: {share:.2f} of the "
            f"time (median; {mean:.2f} on average), {other['bytes'] / here['bytes']:.1f} times fewer bytes"
        )
    return said


def _write(file: Path, recording: Recording, density: float, rank: int, blocks: int, k: int) -> None:
    vectors = streams_of_rank(recording, density, "reused", _CALLS, rank, blocks)
    arrays: dict[str, Any] = {"sizes": np.array([vectors[0].n, k, len(vectors)], np.int64)}
    for call, one in enumerate(vectors):
        arrays |= {f"indices{call}": one.raw_indices, f"values{call}": one.raw_values}
    np.savez(file, **arrays)


def _pipe(path: Path, stack: ExitStack) -> int:
    """A named pipe, which can be written before anybody reads it."""
    os.mkfifo(path)
    opened = os.open(path, os.O_RDWR)
    stack.callback(os.close, opened)
    return opened


def _prefix(prefix_of: Callable[[int], Sequence[str]] | None, rank: int, python: Path) -> list[str]:
    """Puts ``python`` in the place of this one, which the launcher would start."""
    own = list(prefix_of(rank)) if prefix_of is not None else []
    if python == Path(sys.executable):
        return own
    return [*own, "sh", "-c", 'shift; exec "$0" "$@"', str(python)]
