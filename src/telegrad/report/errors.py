"""How the table of ``telegrad bench errors`` looks: on the terminal, and in Markdown for docs/errors.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from telegrad.bench.error_scenes import RANKS
from telegrad.bench.error_table import Row

_NAMES = {"telegrad": "telegrad", "gloo": "Gloo"}


def table_of(rows: Sequence[Row], libraries: Sequence[str]) -> Table:
    """A line per scene, a column per library, a line in a cell per fate."""
    table = Table(
        title=f"What happens to rank 1 of {RANKS}", title_justify="left", header_style="bold", show_lines=True
    )
    table.add_column("")
    for library in libraries:
        table.add_column(_NAMES[library])
    for row in rows:
        table.add_row(row.scene, *(row.cells[library].replace("; ", "\n") for library in libraries))
    return table


def markdown(rows: Sequence[Row], libraries: Sequence[str], machine: Mapping[str, object], command: str) -> str:
    """The same as Markdown, with the command that makes it and what it was made with."""
    lines = [
        "| " + " | ".join([f"What happens to rank 1 of {RANKS}", *(_NAMES[library] for library in libraries)]) + " |",
        "|" + "---|" * (1 + len(libraries)),
    ]
    for row in rows:
        cells = [row.scene, *(row.cells[library] for library in libraries)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    torch = f", torch {machine['torch']}" if machine["torch"] else ""
    day = str(machine["date"]).partition("T")[0]
    made = f"Measured by `{command}` on {day}, {machine['cores']} cores{torch}, commit {machine['commit']}."
    return "\n".join([*lines, "", made])
