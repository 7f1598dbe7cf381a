"""How the rows of ``python -m lab topk`` look as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from telegrad.tools.report.figures import duration

Row = Mapping[str, Any]


def names_of(rows: Sequence[Row]) -> list[str]:
    """The schemes, in the order in which they come."""
    return list(dict.fromkeys(row["scheme"] for row in rows))


def last_calls(rows: Sequence[Row]) -> list[Row]:
    """Of each gradients, scheme and number of ranks the row of the last call."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["gradients"], row["scheme"], row["ranks"])
        if key not in found or row["call"] >= found[key]["call"]:
            found[key] = row
    return list(found.values())


def words_table(rows: Sequence[Row], title: str) -> Table:
    """By ranks and scheme: the most words of any call, in k; and both bounds. ``of 6k'+2E``: of oktopk."""
    table = _table(title, ["ranks", "2k(P-1)/P", *names_of(rows), "6k(P-1)/P", "of 6k'+2E"])
    for ranks, there in _by_ranks(rows).items():
        k = there[0]["k"]
        cells = [f"{ranks:,}", f"{there[0]['least_words'] / k:.2f}"]
        for name in names_of(rows):
            most = max((row["words_max"] for row in there if row["scheme"] == name), default=None)
            cells.append("–" if most is None else _in_k(most / k))
        shares = [row["of_bound"] for row in there if row["scheme"] == "oktopk"]
        cells += [f"{there[0]['paper_words'] / k:.2f}", f"{max(shares):.2f}" if shares else "–"]
        table.add_row(*cells)
    return table


def bytes_table(rows: Sequence[Row], title: str) -> Table:
    """By ranks and scheme: the most bytes of any call, in 4k, everything counted; and oktopk's share of its bound."""
    table = _table(title, ["ranks", *names_of(rows), "of the bound"])
    for ranks, there in _by_ranks(rows).items():
        most = {
            name: max((row["bytes_max"] for row in there if row["scheme"] == name), default=None)
            for name in names_of(rows)
        }
        cells = ["–" if one is None else _in_k(one / (4 * there[0]["k"])) for one in most.values()]
        shares = [row["bytes_of_bound"] for row in there if row["scheme"] == "oktopk"]
        table.add_row(f"{ranks:,}", *cells, f"{max(shares):.2f}" if shares else "–")
    return table


def times_table(rows: Sequence[Row], title: str) -> Table:
    """By ranks and scheme: time of the last call, the fastest in bold."""
    last = last_calls(rows)
    return _times(_by_ranks(last), names_of(last), "time_s", title)


def parts_table(rows: Sequence[Row], title: str) -> Table:
    """Of the last calls among the most ranks of each scheme: what the time is made of, and what fills in."""
    table = _table(
        title, ["scheme", "ranks", "selection", "communication", "reduction", "selected/k", "result/k", "payloads"]
    )
    last = last_calls(rows)
    for name in names_of(last):
        row = max((row for row in last if row["scheme"] == name), key=lambda row: int(row["ranks"]))
        parts = [row["selection_s"], row["communication_s"], row["reduction_s"]]
        table.add_row(
            name,
            f"{row['ranks']:,}",
            *("–" if part is None else duration(part) for part in parts),
            f"{row['selected'] / row['k']:.2f}",
            f"{row['fill_in']:.2f}",
            row["payloads"],
        )
    return table


def patterns_table(rows: Sequence[Row], title: str) -> Table:
    """By pattern and scheme: the most words of any call and number of ranks, of 6k'+2E."""
    names = names_of(rows)
    table = _table(title, ["gradients", *names])
    for gradients in dict.fromkeys(row["gradients"] for row in rows):
        cells = [gradients]
        for name in names:
            there = [row for row in rows if row["gradients"] == gradients and row["scheme"] == name]
            if not there:
                cells.append("–")
                continue
            worst = max(there, key=lambda row: float(row["of_bound"]))
            share = f"{worst['of_bound']:.2f}"
            broken = f"[red]{share}[/]" if worst["of_bound"] > 1 else share
            cells.append(f"{broken} ({worst['ranks']:,} ranks)")
        table.add_row(*cells)
    return table


def weak_scaling_tables(rows: Sequence[Row]) -> list[Table]:
    """One for each model: time of an iteration."""
    tables = []
    for model in dict.fromkeys(row["model"] for row in rows):
        there = [row for row in rows if row["model"] == model]
        about = f"{model}, {there[0]['n']:,} parameters, {there[0]['density']:.3g} of them: an iteration (virtual time)"
        tables.append(_times(_by_ranks(there), names_of(there), "iteration_s", about))
    return tables


def balancing_table(rows: Sequence[Row]) -> Table:
    """By ranks and slices: reduction with its share of cutting, and gathering with and without shares made alike."""
    table = _table(
        "what balancing spares (virtual time)",
        ["ranks", "slices", "reduction", "to even", "words/k", "gathering", "balanced", "spared", "by default"],
    )
    for ranks, there in _by_ranks(rows).items():
        even_s = reduction_s(there[0])
        for row in there:
            table.add_row(
                f"{ranks:,}",
                row["slices"],
                duration(reduction_s(row)),
                f"{even_s / reduction_s(row):.2f}x",
                f"{row['words_max'] / row['k']:.2f}",
                duration(row["gather_s"]),
                duration(row["balanced_gather_s"]),
                f"{row['gather_s'] / row['balanced_gather_s']:.2f}x",
                "balanced" if row["triggered"] else "as it is",
            )
    return table


def reduction_s(row: Row) -> float:
    """Of a row of balancing: split and reduce, with its share of the call that cuts."""
    return float(row["reduce_s"] + row["cut_s"] / row["cut_every"])


def training_table(rows: Sequence[Row], averages: Row, title: str) -> Table:
    """Ten stretches of a training run, and all of it."""
    has_xi = any("xi" in row for row in rows)
    columns = ["steps", "selected/k", "|selected-k|/k", "kept/k", "|kept-k|/k", "words/k", "of 6k'+2E"]
    table = _table(title, [*columns, "ξ"] if has_xi else columns)
    length = max(1, -(-len(rows) // 10))
    for first in range(0, len(rows), length):
        part = rows[first : first + length]

        def mean(name: str, part: Sequence[Row] = part) -> float:
            return float(sum(row[name] for row in part)) / len(part)

        k = part[0]["k"]
        xis = [row["xi"] for row in part if "xi" in row]
        cells = [
            f"{first} to {first + len(part) - 1}",
            f"{mean('selected') / k:.2f}",
            f"{mean('local_deviation'):.1%}",
            f"{mean('kept') / k:.2f}",
            f"{mean('global_deviation'):.1%}",
            f"{max(row['words_max'] for row in part) / k:.2f}",
            f"{max(row['of_bound'] for row in part):.2f}",
        ]
        if has_xi:
            cells.append(f"{sum(xis) / len(xis):.2f}" if xis else "–")
        table.add_row(*cells)
    table.add_section()
    whole = ["all", "", f"{averages['local_deviation']:.1%}", "", f"{averages['global_deviation']:.1%}", ""]
    table.add_row(*whole, f"{averages['of_bound']:.2f}", *([""] if has_xi else []))
    return table


def traffic_table(lines: Sequence[Sequence[str]], title: str) -> Table:
    """Of ``lab.topk.traffic.summary``."""
    names = ("first call", "later, most", "of the bound", "kept/k", "exact", "first", "last")
    table = _table(title, ["entries", "k", "ranks", *names])
    for line in lines:
        table.add_row(*line)
    return table


def beside_table(rows: Sequence[Row]) -> Table:
    """Of ``lab.topk.beside.timed_rows``."""
    table = _table(
        "calls over a network, in turn", ["version", "network", "ranks", "k", "median", "mean", "bytes", "exact"]
    )
    for row in rows:
        table.add_row(
            row["version"],
            row["network"],
            str(row["ranks"]),
            f"{row['k']:,}",
            *(duration(row[name]) for name in ("median_s", "mean_s")),
            f"{row['bytes'] / 1e3:,.0f} kB",
            f"{row['exact']}/{row['samples']}",
        )
    return table


def measured_table(rows: Sequence[Row], title: str) -> Table:
    """The measured schemes, the slowest first."""
    table = _table(
        title,
        ["", "median", "to best", "communication", "reduction", "selection", "with selection", "sent/rank", "wrong"],
    )
    for row in sorted(rows, key=lambda row: -float(row["median_s"])):
        table.add_row(
            row["scheme"],
            duration(row["median_s"]),
            f"{row['times_of_best']:.2f}x",
            *(duration(row[name]) for name in ("communication_s", "reduction_s", "selection_s", "total_s")),
            f"{row['wire_bytes'] / 1e3:,.0f} kB",
            str(row["wrong"]),
        )
    return table


def _times(by_ranks: Mapping[int, Sequence[Row]], names: Sequence[str], figure: str, title: str) -> Table:
    table = _table(title, ["ranks", *names])
    for ranks, there in by_ranks.items():
        found = {row["scheme"]: row[figure] for row in there}
        best = min(found.values())
        cells = [f"[bold]{duration(one)}[/]" if one == best else duration(one) for one in found.values()]
        by_name = dict(zip(found, cells, strict=True))
        table.add_row(f"{ranks:,}", *(by_name.get(name, "–") for name in names))
    return table


def _in_k(words: float) -> str:
    return f"{words:.2f}" if words < 100 else f"{words:,.0f}"


def _by_ranks(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["ranks"], []).append(row)
    return dict(sorted(found.items()))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for place, name in enumerate(columns):
        heading = name.replace("-", "-\n") if name.startswith(("oktopk-", "dense-")) else name
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table
