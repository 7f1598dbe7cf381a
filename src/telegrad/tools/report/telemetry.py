"""What ``telegrad.ddp.JsonLines`` has written of a training: read back, summed up and drawn. Needs rich and, to draw,
matplotlib."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from rich.markup import escape
from rich.table import Table

from telegrad.tools.report.figures import (
    BLACK,
    LIGHT_GREY,
    duration,
    key_of_marks,
    log_ticks,
    looks_of,
    name_lines,
    picture,
)

FORMAT, VERSION = "telegrad-telemetry", 1
_COUNTS = ("step", "elements", "dense_elements", "element_bytes", "bytes_sent")
_COUNTS_OF_LATER_FILES = ("kept", "words_sent", "words_received")
_LATE = 0.1  # the share of steps, at the end, over which late figures are taken


@dataclass(frozen=True, slots=True)
class TensorStep:
    """One tensor in one step; ``None``: there was no such figure."""

    name: str
    elements: int
    k: int
    selected: int
    gradient_norm: float | None
    residual_norm: float | None
    threshold: float | None

    @property
    def selected_to_k(self) -> float:
        """1 where exactly k entries were sent."""
        return self.selected / self.k

    @property
    def compression(self) -> float | None:
        """Elements for each entry that was sent."""
        return self.elements / self.selected if self.selected else None

    @property
    def residual_to_gradient(self) -> float | None:
        """How many steps' gradients wait, by their norms."""
        if self.residual_norm is None or not self.gradient_norm:
            return None
        return self.residual_norm / self.gradient_norm


@dataclass(frozen=True, slots=True)
class TelemetryStep:
    """One observed step, of ``world_size`` ranks. ``bytes_sent``, ``kept``, ``words_sent`` and ``words_received``: of
    this rank, until the step began; words are counted by sums that keep a part (Ok-Topk). ``job`` tells steps of a job
    from those of one that went on from it, and counts anew."""

    step: int
    world_size: int
    dropped: bool
    elements: int
    dense_elements: int
    element_bytes: int
    bytes_sent: int
    tensors: tuple[TensorStep, ...]
    kept: int = 0
    words_sent: int = 0
    words_received: int = 0
    job: int = 0
    round: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class TelemetryRun:
    """One rank of a training, with its steps in order. Where it went on from an earlier step, what had come after that
    step is left out; of a step that was run twice, the later one counts. ``dropped``: observed passes that were, also
    those after which their step was run again."""

    rank: int
    steps: list[TelemetryStep] = field(default_factory=list)
    dropped: int = 0

    @property
    def world_sizes(self) -> list[int]:
        """Of the job, and of those that went on from it with fewer or more ranks."""
        return [size for size, _ in itertools.groupby(step.world_size for step in self.steps)]

    @property
    def names(self) -> list[str]:
        """Tensors, the largest first."""
        sizes = {one.name: one.elements for step in self.steps for one in step.tensors}
        return sorted(sizes, key=lambda name: -sizes[name])

    def of(self, name: str) -> list[tuple[int, TensorStep]]:
        """One tensor's figures by step."""
        return [(step.step, one) for step in self.steps for one in step.tensors if one.name == name]

    def of_round(self, figure: str) -> list[tuple[int, float]]:
        """A figure of DiLoCo's rounds, by round."""
        return [(step.step, step.round[figure]) for step in self.steps if figure in step.round]

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether always k values were sent, and no threshold chose them, as with matrices of low rank."""
        every = [one for step in self.steps for one in step.tensors]
        return all(one.selected == one.k and one.threshold is None for one in every)

    @property
    def bytes_per_step(self) -> float | None:
        """Sent by this rank, between the first and the last observed step; ``None``: too few steps to say."""
        return self._per_step(lambda step: step.bytes_sent)

    @property
    def words_per_step(self) -> float | None:
        """Sent or received by this rank, whichever is more; ``None``: too few steps to say, or nothing counts words."""
        sent, received = self._per_step(lambda step: step.words_sent), self._per_step(lambda step: step.words_received)
        return max(sent, received) if sent is not None and received is not None and max(sent, received) else None

    @property
    def kept_to_k(self) -> float | None:
        """What sums have kept per step, of k; ``None`` where there are no words."""
        kept = self._per_step(lambda step: step.kept)
        return None if kept is None or self.words_per_step is None else kept / self.wanted

    @property
    def wanted(self) -> float:
        """k of all tensors together, per step."""
        return statistics.fmean(sum(one.k for one in step.tensors) for step in self.steps)

    @property
    def least_words_per_step(self) -> float:
        """2k(P-1)/P: what any rank must move for k entries of a sum (Ok-Topk, Theorem 3.1)."""
        return statistics.fmean(_ring_share(step) * sum(one.k for one in step.tensors) for step in self.steps)

    @property
    def paper_words_per_step(self) -> float:
        """6k(P-1)/P: what Ok-Topk's paper says that a rank moves at most."""
        return 3 * self.least_words_per_step

    @property
    def compressed_bytes_per_step(self) -> float | None:
        """As ``bytes_per_step``, of the steps that compress; ``None`` if all of them do, or none."""
        compresses = {bool(step.tensors) for step in self.steps}
        return self._per_step(lambda step: step.bytes_sent, only_compressed=True) if len(compresses) == 2 else None

    def _per_step(self, total: Callable[[TelemetryStep], int], only_compressed: bool = False) -> float | None:
        spans = [(a, b) for a, b in itertools.pairwise(self.steps) if a.job == b.job and total(b) >= total(a)]
        if only_compressed:
            spans = [(a, b) for a, b in spans if a.tensors]
        steps = sum(b.step - a.step for a, b in spans)
        return sum(total(b) - total(a) for a, b in spans) / steps if steps else None

    @property
    def ring_bytes_per_step(self) -> float:
        """What a rank of a dense ring would send: 2 (P - 1) / P times the gradient's bytes."""
        return statistics.fmean(_ring_share(step) * step.elements * step.element_bytes for step in self.steps)


def _ring_share(step: TelemetryStep) -> float:
    return 2 * (step.world_size - 1) / step.world_size


def read(path: Path) -> TelemetryRun:
    """The run in ``path``. A last line that was cut off, as by a kill, is left out.

    Raises ``OSError`` where it cannot be read, and ``ValueError`` naming the line that is no telemetry.
    """
    run: TelemetryRun | None = None
    steps: dict[int, TelemetryStep] = {}
    dropped: list[int] = []
    columns: Sequence[str] = ()
    world_size = jobs = 0
    begins = False
    last: TelemetryStep | None = None
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            said = json.loads(line)
            if not isinstance(said, dict) or "kind" not in said:
                raise ValueError("no record with a kind")
            if said["kind"] == "run":
                if said["format"] != FORMAT or said["version"] != VERSION:
                    raise ValueError(f"format {said['format']!r}, version {said['version']!r}")
                if run is not None and run.rank != said["rank"]:
                    raise ValueError(f"rank {said['rank']} in the file of rank {run.rank}")
                run, columns, world_size = (
                    run or TelemetryRun(int(said["rank"])),
                    said["columns"],
                    int(said["world_size"]),
                )
                if world_size < 1:
                    raise ValueError(f"world_size {world_size}")
                begins, jobs = True, jobs + 1
            elif run is not None:
                step = _step_of(said, columns, world_size, jobs)
                if begins:
                    steps = {number: one for number, one in steps.items() if number < step.step}
                    dropped = [number for number in dropped if number < step.step]
                    begins = False
                elif last is not None and (step.step < last.step or (step.step == last.step and not last.dropped)):
                    raise ValueError(f"step {step.step} after step {last.step}: several have written this file")
                steps[step.step] = last = step
                dropped += [step.step] if step.dropped else []
            else:
                raise ValueError("no run")
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path}, line {number}: {what}: it must be a file of telegrad.ddp.JsonLines, one for each rank"
            ) from error
    if run is None or not steps:
        raise ValueError(f"{path} holds no step: it must be a file of telegrad.ddp.JsonLines")
    run.steps, run.dropped = [steps[number] for number in sorted(steps)], len(dropped)
    return run


def _step_of(said: dict[str, Any], columns: Sequence[str], world_size: int, job: int) -> TelemetryStep:
    if tuple(columns) != tuple(TensorStep.__dataclass_fields__):
        raise ValueError(f"columns {columns!r}")
    counts = {name: _count(said[name], name) for name in _COUNTS}
    later = {name: _count(said.get(name, 0), name) for name in _COUNTS_OF_LATER_FILES}
    tensors = tuple(_tensor_of(one) for one in said["tensors"])
    return TelemetryStep(
        world_size=world_size,
        dropped=bool(said["dropped"]),
        tensors=tensors,
        job=job,
        **counts,
        **later,
        round={str(name): float(value) for name, value in said.get("round", {}).items()},
    )


def _tensor_of(said: Sequence[Any]) -> TensorStep:
    name, elements, k, selected, *figures = said
    if not isinstance(name, str):
        raise TypeError(f"name {name!r}")
    gradient_norm, residual_norm, threshold = (_figure(one) for one in figures)
    return TensorStep(
        name=name,
        elements=_count(elements, "elements"),
        k=_count(k, "k", least=1),
        selected=_count(selected, "selected"),
        gradient_norm=gradient_norm,
        residual_norm=residual_norm,
        threshold=threshold,
    )


def _count(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise ValueError(f"{name} {str(value)[:50]!r}")
    return value


def _figure(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, NoneType)):
        raise TypeError(f"figure {value!r}")
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor over all observed steps; ``late``: over the last tenth of them."""

    name: str
    elements: int
    k: int
    selected_to_k: float
    selected_to_k_least: float
    selected_to_k_most: float
    compression: float | None
    late_residual_to_gradient: float | None
    late_threshold: float | None


def summaries(run: TelemetryRun) -> list[TensorSummary]:
    """Of each tensor, the largest first."""
    return [_summary(name, [one for _, one in run.of(name)]) for name in run.names]


def _summary(name: str, steps: Sequence[TensorStep]) -> TensorSummary:
    late = steps[-max(1, round(_LATE * len(steps))) :]
    selected = sum(one.selected for one in steps)
    return TensorSummary(
        name=name,
        elements=steps[-1].elements,
        k=steps[-1].k,
        selected_to_k=statistics.fmean(one.selected_to_k for one in steps),
        selected_to_k_least=min(one.selected_to_k for one in steps),
        selected_to_k_most=max(one.selected_to_k for one in steps),
        compression=sum(one.elements for one in steps) / selected if selected else None,
        late_residual_to_gradient=_median(one.residual_to_gradient for one in late),
        late_threshold=_median(one.threshold for one in late),
    )


def title_of(run: TelemetryRun) -> str:
    """The run in one line."""
    parts = [
        f"rank {run.rank} of {', then '.join(map(str, run.world_sizes))}",
        f"{len(run.steps)} steps observed, to step {run.steps[-1].step}",
        *([f"{run.dropped} dropped"] if run.dropped else []),
    ]
    if (sent := run.bytes_per_step) is not None:
        ratio = f" (1/{run.ring_bytes_per_step / sent:.1f} of a dense ring's)" if sent else ""
        parts.append(f"{sent / 1e6:.3g} MB sent per step{ratio}")
    if (sent := run.compressed_bytes_per_step) is not None:
        ratio = f" (1/{run.ring_bytes_per_step / sent:.1f})" if sent else ""
        parts.append(f"{sent / 1e6:.3g} MB{ratio} without the dense steps")
    if run.of_round("seconds"):
        seconds, waited = (statistics.median(dict(run.of_round(name)).values()) for name in ("seconds", "waited"))
        parts.append(f"an exchange takes {duration(seconds)}, and training waits {duration(waited)} (medians)")
    if (words := run.words_per_step) is not None and run.wanted:
        least, paper = run.least_words_per_step / run.wanted, run.paper_words_per_step / run.wanted
        bounds = f"2k(P-1)/P is {least:.2f} k, 6k(P-1)/P {paper:.2f} k"
        parts.append(f"{words / run.wanted:.2f} k words moved per step ({bounds}), {run.kept_to_k:.2f} k entries kept")
    return " · ".join(parts)


def table_of(run: TelemetryRun) -> Table:
    """A row per tensor."""
    table = Table(title=title_of(run), title_justify="left", header_style="bold")
    table.add_column("tensor", overflow="fold")
    columns = _COLUMNS_OF_FIXED_SIZES if run.has_fixed_sizes else _COLUMNS
    for name in columns:
        table.add_column(name, justify="right")
    for one in summaries(run):
        table.add_row(escape(printable(one.name)), *(text_of(one) for text_of in columns.values()))
    return table


_COLUMNS: dict[str, Callable[[TensorSummary], str]] = {
    "elements": lambda one: f"{one.elements:,}",
    "k": lambda one: f"{one.k:,}",
    "selected/k": lambda one: f"{one.selected_to_k:.2f}",
    "least … most": lambda one: f"{one.selected_to_k_least:.2f} … {one.selected_to_k_most:.2f}",
    "compression": lambda one: _shown(one.compression, "{:.0f}x"),
    "residual/gradient": lambda one: _shown(one.late_residual_to_gradient, "{:.2f}"),
    "threshold": lambda one: _shown(one.late_threshold, "{:.3g}"),
}
_COLUMNS_OF_FIXED_SIZES = {
    "values sent" if name == "k" else name: text_of
    for name, text_of in _COLUMNS.items()
    if name not in ("selected/k", "least … most", "threshold")
}


def as_json(run: TelemetryRun) -> dict[str, Any]:
    """The table's figures."""
    return {
        "rank": run.rank,
        "world_sizes": run.world_sizes,
        "steps": len(run.steps),
        "dropped": run.dropped,
        "bytes_sent_per_step": run.bytes_per_step,
        "compressed_bytes_per_step": run.compressed_bytes_per_step,
        "ring_bytes_per_step": run.ring_bytes_per_step,
        "words_per_step": run.words_per_step,
        "least_words_per_step": run.least_words_per_step,
        "paper_words_per_step": run.paper_words_per_step,
        "kept_to_k": run.kept_to_k,
        "rounds": [{"round": step.step, **step.round} for step in run.steps if step.round],
        "tensors": [
            {name: getattr(one, name) for name in TensorSummary.__dataclass_fields__}  # slots: no vars()
            for one in summaries(run)
        ],
    }


def printable(name: str) -> str:
    """Control characters by their numbers."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in name)


def _shown(value: float | None, text: str) -> str:
    return "–" if value is None else text.format(value)


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


_WAITING = "residual norm / gradient norm"
FIGURES: dict[str, Callable[[TensorStep], float | None]] = {
    "selected / k": lambda one: one.selected_to_k,
    "compression (elements / selected)": lambda one: one.compression,
    _WAITING: lambda one: one.residual_to_gradient,
    "threshold": lambda one: one.threshold,
}
"""What is drawn, each in a panel. Of tensors with fixed sizes only the residual says anything."""


ROUND_FIGURES = {
    "norms of this replica's move, of the average, and of their difference": ("move", "average", "drift"),
    "seconds of an exchange, and that training waited": ("seconds", "waited"),
}
"""What is drawn of DiLoCo's rounds, each in a panel."""


_NAMED = 9  # of the largest tensors have a colour and a name; the others are grey
_LOGARITHMIC = ("compression", "threshold")


def plot(run: TelemetryRun, path: Path) -> None:
    """Writes a PNG with a panel for each figure and a line for each tensor, the largest ones with their names."""
    from matplotlib.ticker import StrMethodFormatter

    names, of_tensors = run.names, FIGURES if run.names else {}
    if names and run.has_fixed_sizes:
        of_tensors = {_WAITING: FIGURES[_WAITING]}
    rounds = ROUND_FIGURES if run.of_round("move") else {}
    looks = looks_of([printable(name) for name in names[:_NAMED]])
    with picture(path, title_of(run), height=0.5 + 2.4 * (len(rounds) + len(of_tensors))) as figure:
        grid = figure.subplots(len(rounds) + len(of_tensors), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (about, drawn) in zip(grid, rounds.items(), strict=False):
            for name, one in looks_of([*drawn]).items():
                axes.plot(*zip(*run.of_round(name), strict=True), **one.of_line() | {"label": name, "marker": "."})
            axes.set_title(about)
            name_lines(axes)
        for axes, (about, figure_of) in zip(grid[len(rounds) :], of_tensors.items(), strict=True):
            for place, tensor in reversed(list(enumerate(names))):  # the largest on top
                points = [(step, value) for step, one in run.of(tensor) if (value := figure_of(one)) is not None]
                points = [(step, value) for step, value in points if math.isfinite(value)]
                if not points:
                    continue
                look: dict[str, Any] = {"color": LIGHT_GREY, "linewidth": 0.6, "marker": ""}
                if place < _NAMED:
                    look = looks[printable(tensor)].of_line() | {"label": printable(tensor), "marker": ""}
                axes.plot(*zip(*points, strict=True), **look | ({"marker": "."} if len(points) < 3 else {}))
            values = [value for line in axes.get_lines() for value in line.get_ydata()]
            if values and about.startswith(_LOGARITHMIC) and min(values) > 0:
                axes.set_yscale("log")
                log_ticks(axes.yaxis)
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            if about.startswith("selected"):
                axes.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
                axes.set_ylim(bottom=0)
            axes.set_title(about)
            name_lines(axes)
        grid[-1].set_xlabel("round" if rounds else "step")
        if len(names) > _NAMED:
            key_of_marks(figure, {f"{len(names) - _NAMED} smaller tensors": {"color": LIGHT_GREY}})
