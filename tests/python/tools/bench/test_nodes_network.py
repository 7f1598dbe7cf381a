"""Networks whose ranks share nodes: memory inside, a link between, and what is measured there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from telegrad.tools.bench.netlab import Netlab, NetlabError, why_unavailable
from telegrad.tools.bench.plan import check_nodes, node_of, open_network
from telegrad.tools.cli.bench import app

needs_lab = pytest.mark.skipif(why_unavailable() is not None, reason="needs root, ip and tc")


def test_neighbours_live_together() -> None:
    assert [node_of(rank, 8, 2) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [node_of(rank, 5, 2) for rank in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("nodes", [0, 5])
def test_every_node_has_a_rank(nodes: int) -> None:
    with pytest.raises(ValueError, match="must be between 1 and ranks=4"):
        check_nodes("1gbit", 4, nodes)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_only_links_join_nodes(name: str) -> None:
    with pytest.raises(ValueError, match=f"network '{name}' has no nodes"):
        check_nodes(name, 4, 2)


@pytest.mark.parametrize("command", ["allreduce", "sparse"])
def test_the_command_says_what_is_wrong(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--network", "tcp", "--nodes", "2"])
    assert done.exit_code == 2
    assert "has no nodes" in " ".join(done.output.split())


def test_a_namespace_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    laboratory = Netlab(1)
    monkeypatch.setattr(laboratory, "_network_of", lambda _: ["false"])
    with pytest.raises(NetlabError, match="made no IPC namespace: the process needs the capability"):
        laboratory.open_memory()
    laboratory._close_memory()


@needs_lab
def test_ranks_of_a_node_share_memory_and_others_do_not() -> None:
    def spaces(prefix: Any) -> str:
        where = ["readlink", "/proc/self/ns/ipc", "/proc/self/ns/net"]
        return subprocess.run([*prefix, *where], check=True, capture_output=True, text=True).stdout

    with open_network("1gbit", 4, 2) as network:
        assert network.prefix_of is not None
        found = [spaces(network.prefix_of(rank)) for rank in range(4)]
        keeper = next(part for part in network.prefix_of(0) if part.startswith("--ipc="))
    assert found[0] == found[1] != found[2] == found[3]
    assert spaces([]) not in found
    assert not os.path.exists(keeper.removeprefix("--ipc="))


@needs_lab
@pytest.mark.timeout(200)
def test_sums_on_nodes_are_measured_and_right(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    options = ["--network", "1gbit", "--ranks", "4", "--nodes", "2", "--sizes", "64KiB", "--peers", "none"]
    chosen = ["--algorithms", "two_level,auto", "--seconds", "0.5", "--no-calibrate", "--json", str(rows_file)]
    done = CliRunner().invoke(app, ["allreduce", *options, *chosen])
    assert done.exit_code == 0, done.output
    rows = {row["algorithm"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert set(rows) == {"two_level", "auto"}
    assert all(row["wrong"] == 0 and row["nodes"] == 2 for row in rows.values())
    assert rows["auto"]["wire_bytes"] == rows["two_level"]["wire_bytes"] == 1.5 * (64 << 10)
