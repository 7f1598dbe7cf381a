"""How wide commands print where they do not print to a terminal."""

from __future__ import annotations

import itertools
from importlib import metadata

import pytest
from typer.testing import CliRunner

from telegrad.tools.bench.plan import PEERS
from telegrad.tools.cli import make_app
from telegrad.tools.cli.bench import table_of
from telegrad.tools.cli.outputs import table_console


def test_a_file_holds_the_widest_table_of_sums_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row: dict[str, object] = {"op": "allreduce", "algorithm": "recursive_doubling, interleaved", "chosen": None}
    row |= {"ranks": 8, "bytes": 1 << 20, "wire_bytes": 1835008.0, "bound_s": 0.01, "wrong": 0, "measured_again": True}
    row |= {"median_s": 0.12883, "p90_s": 0.17658}
    for peer in PEERS:
        row |= {f"{peer}_median_s": 0.12883, f"{peer}_p90_s": 0.17658, f"{peer}_wrong": 0, f"ratio_to_{peer}": 2.95}
    console = table_console()
    with console.capture() as printed:
        console.print(table_of([row], "all_reduce, 8 ranks on 2 nodes, 1gbit"))
    assert "…" not in printed.get()


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(make_app(), ["--version"])
    assert done.exit_code == 0
    assert done.output == f"telegrad {metadata.version('telegrad')}\n"


def test_the_help_fills_the_lines_of_a_narrow_terminal() -> None:
    """Lines of the source, each broken twice, left some with three words."""
    said = CliRunner().invoke(make_app(), ["linear", "train", "--help"], terminal_width=80).output
    about = said[said.index("Each rank reads") : said.index("╭")]
    lines = [line.strip() for line in about.splitlines() if line.strip()]
    assert len(lines) > 4
    for line, after in itertools.pairwise(lines):
        assert len(line) + 1 + len(after.split()[0]) > 78, f"{after.split()[0]!r} has room behind {line!r}"
