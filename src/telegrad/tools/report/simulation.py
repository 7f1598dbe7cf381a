"""How ``telegrad simulate`` shows what it found: tables, curves, rows for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from telegrad.cost.decision import TWO_LEVEL
from telegrad.tools.bench.plan import text_of
from telegrad.tools.sim.critical_path import KINDS, Stretch, shares
from telegrad.tools.sim.measure import SPARSE, Measurement, closed_form

Row = dict[str, Any]
_STRETCHES_SHOWN = 16


def row_of(found: Measurement) -> Row:
    """As it is written with --json. Times in virtual seconds; per rank: of the rank that sends most."""
    point, form = found.point, closed_form(found.point)
    row: Row = {
        "operation": point.operation,
        "algorithm": point.algorithm,
        "chosen": found.algorithm,
        "ranks": point.ranks,
        "bytes": point.size,
        "time_s": found.finish_s,
        "first_finish_s": float(found.finish_by_rank_s.min()),
        "closed_form_s": None if form is None else form.time_s,
        "messages_per_rank": int(found.messages_sent.max()),
        "bytes_per_rank": int(found.bytes_sent.max()),
        "messages": int(found.messages_sent.sum()),
        "bytes_sent": int(found.bytes_sent.sum()),
        "events": found.events,
        "seed": point.seed,
        "payloads": point.payloads or point.has_entries,
    }
    if point.operation in SPARSE:
        row |= {
            "nnz": point.nnz,
            "overlap": point.overlap,
            "wire": point.wire_format,
            "result_nnz": found.result_nnz,
        }
    if found.words_sent is not None and found.words_received is not None:
        row |= {
            "keep": point.keep or point.nnz,
            "calls": point.calls,
            "words": int(max(found.words_sent.max(), found.words_received.max())),
            "words_most": 6 * max(point.nnz, found.result_nnz or 0) + 2 * point.ranks,
        }
    return row


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line per algorithm; ratio is to the fastest at the same ranks and size."""
    has_size = any(row["bytes"] for row in rows)
    has_form = any(row["closed_form_s"] is not None for row in rows)
    is_sparse = any("nnz" in row for row in rows)
    has_words = any("words" in row for row in rows)
    has_auto = any(row["algorithm"] == "auto" for row in rows)
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = _caption(rows)
    table.caption_justify = "left"
    for name in ("ranks", *_if(has_size, "size"), "algorithm", *_if(has_auto, "auto"), "time", "ratio"):
        table.add_column(name, justify="left" if name in ("algorithm", "auto") else "right", no_wrap=True)
    names = (*_if(has_form, "closed form"), "messages", *_if(has_size, "sent"), *_if(is_sparse, "entries of the sum"))
    names += ("words", "at most") if has_words else ()
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)

    chosen_by_auto = {_what(row) for row in rows if row["algorithm"] == "auto"}
    fastest: dict[tuple[int, int], float] = {}
    for row in rows:
        fastest[_where(row)] = min(row["time_s"], fastest.get(_where(row), row["time_s"]))
    shown = set()
    previous = None
    for row in rows:
        if _what(row) in shown:  # auto, and what it chose
            continue
        shown.add(_what(row))
        if previous not in (None, _where(row)):
            table.add_section()
        previous = _where(row)
        cells = [f"{row['ranks']:,}", *_if(has_size, text_of(row["bytes"])), row["chosen"]]
        cells += [*_if(has_auto, "✓" if _what(row) in chosen_by_auto else ""), duration(row["time_s"])]
        cells += [_ratio(row["time_s"], fastest[previous]), *_if(has_form, duration(row["closed_form_s"]))]
        cells += [f"{row['messages_per_rank']:,}", *_if(has_size, text_of(row["bytes_per_rank"]))]
        cells += _if(is_sparse, f"{row.get('result_nnz') or 0:,}")
        cells += [f"{row['words']:,}", f"{row['words_most']:,}"] if has_words else []
        table.add_row(*cells, style="bold" if row["time_s"] == fastest[previous] else None)
    return table


def _caption(rows: Sequence[Row]) -> str:
    said = ["messages, sent: of the rank that sends most"]
    if any(row.get("calls", 1) > 1 for row in rows):
        said = [said[0] + ", over all calls", "entries of the sum, words: of the last call"]
    if any(row["algorithm"] == TWO_LEVEL != row["chosen"] for row in rows):
        said.append("two_level of ranks that are all on one node: what auto is there")
    return "\n".join(said)


def _where(row: Row) -> tuple[int, int]:
    return row["ranks"], row["bytes"]


def _what(row: Row) -> tuple[int, int, str]:
    return *_where(row), row["chosen"]


def _if(wanted: bool, cell: str) -> list[str]:
    return [cell] if wanted else []


def split_table(splits: Sequence[tuple[Row, Mapping[str, float]]], title: str) -> Table:
    """Of rows and the seconds of their critical paths by kind: the kinds' shares, a line per algorithm."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    has_size = any(row["bytes"] for row, _ in splits)
    for name in ("ranks", *_if(has_size, "size"), "algorithm", *KINDS):
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    lines: dict[tuple[int, int, str], list[str]] = {}
    for row, split in splits:
        size = _if(has_size, text_of(row["bytes"]))
        shares_of = [_share(split[kind], row["time_s"]) for kind in KINDS]
        lines[_what(row)] = [f"{row['ranks']:,}", *size, row["chosen"], *shares_of]
    for cells in lines.values():
        table.add_row(*cells)
    return table


def path_table(path: Sequence[Stretch], title: str) -> Table:
    """The chain from the start to the last rank's end, work on one rank in one line; of a long one the first and the
    last lines."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("from", "for"):
        table.add_column(name, justify="right")
    table.add_column("what")
    table.add_column("rank", justify="right")
    for name in ("other rank", "step", "bytes"):
        table.add_column(name, justify="right")
    lines = _joined(path)
    half = _STRETCHES_SHOWN // 2
    left_out = len(lines) - _STRETCHES_SHOWN
    shown = [*lines[:half], None, *lines[-half:]] if left_out > 0 else lines
    for one in shown:
        if one is None:
            table.add_row("…", "", f"{left_out:,} more", "", "", "", "")
            continue
        others = ("–" if value is None else f"{value:,}" for value in (one.peer, one.step, one.bytes))
        table.add_row(duration(one.start_s), duration(one.time_s), one.kind, str(one.rank), *others)
    return table


def _joined(path: Sequence[Stretch]) -> list[Stretch]:
    lines: list[Stretch] = []
    for one in path:
        last = lines[-1] if lines else None
        if last is not None and one.kind == last.kind == "compute" and one.rank == last.rank:
            lines[-1] = replace(last, end_s=one.end_s, bytes=(last.bytes or 0) + (one.bytes or 0))
        else:
            lines.append(one)
    return lines


def path_for_json(path: Sequence[Stretch]) -> Row:
    return {"shares_s": shares(list(path)), "stretches": [asdict(one) for one in path]}


def counts_for_json(found: Measurement) -> Row:
    """What every rank and every link carried. Raises ``ValueError`` for a measurement without links."""
    if found.links is None:
        raise ValueError("this measurement has no links: measure it with links=True")
    by_rank = {
        "finish_s": found.finish_by_rank_s,
        "messages_sent": found.messages_sent,
        "messages_received": found.messages_received,
        "bytes_sent": found.bytes_sent,
        "bytes_received": found.bytes_received,
    }
    columns = {name: values.tolist() for name, values in by_rank.items()}
    ranks = [
        {"rank": rank, **{name: column[rank] for name, column in columns.items()}} for rank in range(found.point.ranks)
    ]
    links = zip(
        *(
            part.tolist()
            for part in (found.links.source, found.links.destination, found.links.messages, found.links.bytes)
        ),
        strict=True,
    )
    names = ("from", "to", "messages", "bytes")
    return {"row": row_of(found), "ranks": ranks, "links": [dict(zip(names, link, strict=True)) for link in links]}


def plot(panels: Sequence[tuple[str, str, Sequence[Row]]], title: str, path: Path) -> None:
    """A panel for each of (what the horizontal axis shows: "ranks" or "bytes"; its title; rows), a curve per algorithm:
    dots are simulated, thin lines closed forms. The format is that of the path's suffix; PNG without one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 5), layout="constrained", squeeze=False
    )
    figure.suptitle(title)
    for axes, (across, about, rows) in zip(all_axes[0], panels, strict=True):
        curves: dict[str, list[Row]] = {}
        for row in rows:
            curves.setdefault(row["algorithm"], []).append(row)
        for number, (name, points) in enumerate(curves.items()):
            points.sort(key=lambda row: row[across])
            places, times_s = [row[across] for row in points], [row["time_s"] for row in points]
            if name == "auto":  # lies on one of the others
                axes.plot(places, times_s, color="black", linestyle=":", linewidth=2, label=name)
                continue
            color = f"C{number}"
            forms_s = [row["closed_form_s"] for row in points]
            axes.plot(
                places,
                times_s,
                marker="o",
                markersize=4,
                color=color,
                label=name,
                linestyle="-" if None in forms_s else "",
            )
            if None not in forms_s:
                axes.plot(places, forms_s, color=color, linewidth=1)
        # One rank alone may take no time at all.
        scale = "log" if any(row["time_s"] > 0 for row in rows) else "linear"
        axes.set(xscale="log", yscale=scale, xlabel=across, ylabel="seconds (virtual)", title=about)
        if across == "ranks":
            axes.set_xscale("log", base=2)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(title="lines: closed forms" if any(row["closed_form_s"] is not None for row in rows) else None)
    figure.savefig(path, dpi=150, format=None if path.suffix else "png")
    pyplot.close(figure)


def duration(seconds: float | None) -> str:
    """``180 ns``, ``18.20 µs``, ``5.400 ms``, ``1.200 s``; a dash for None."""
    if seconds is None:
        return "–"
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"


def _ratio(seconds: float, least_s: float) -> str:
    return f"{seconds / least_s:.2f}" if least_s else "1.00"


def _share(seconds: float, whole_s: float) -> str:
    return f"{seconds / whole_s:.0%}" if whole_s else "–"
