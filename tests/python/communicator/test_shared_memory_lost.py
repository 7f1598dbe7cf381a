"""Ranks of one host, some or all without shared memory of UCX's: they go on over TCP, and one of them warns."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from telegrad.launch import RankFailed, Ranks


def _can_mount() -> bool:
    try:
        made = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True)
    except OSError:
        return False
    return made.returncode == 0


pytestmark = pytest.mark.skipif(not _can_mount(), reason="needs root, unshare and mount: a /dev/shm of each rank's own")

SIZE = 3
_READ_ONLY = "mount -t tmpfs tmpfs /dev/shm && mount -o remount,ro /dev/shm"
_FULL = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
_FINE = "true"
_BY_TCP = {"sum": float(SIZE), "shares_memory": False, "has_segments": False}
_BY_MEMORY = {"sum": float(SIZE), "shares_memory": True, "has_segments": True}


def _ranks(
    mount_of: dict[int, str], transports: str = "", program: str = "meet", size: int = SIZE
) -> tuple[list[dict[str, Any]], list[str]]:
    """What each rank found, and its standard error. ``mount_of``: the command before each rank's program."""
    said: dict[int, dict[str, Any]] = {}
    with Ranks(
        f"shared_memory_program:{program}",
        size,
        timeout_s=100,
        environment={"PYTHONPATH": str(Path(__file__).parent), **({"UCX_TLS": transports} if transports else {})},
        prefix_of=lambda rank: ["unshare", "-m", "sh", "-c", f'{mount_of.get(rank, _FINE)} && exec "$@"', "sh"],
        on_line=lambda rank, line: said.update({rank: json.loads(line)}),
    ) as ranks:
        exits = ranks.wait()
    return [said[rank] for rank in range(size)], [one.stderr for one in exits]


def _warnings(errors: list[str]) -> list[tuple[int, str]]:
    return [(rank, line) for rank, text in enumerate(errors) for line in text.splitlines() if "RuntimeWarning" in line]


@pytest.mark.parametrize("transports", ["", "all", "shm,tcp,self", "^sysv"])
def test_no_rank_has_it(transports: str) -> None:
    found, errors = _ranks(dict.fromkeys(range(SIZE), _READ_ONLY), transports)
    assert found == [_BY_TCP] * SIZE
    ((rank, line),) = _warnings(errors)
    assert rank == 0
    assert f"no shared memory on host {os.uname().nodename} for rank 0, 1, 2 (/dev/shm: Read-only file system)" in line
    assert "go by TCP" in line
    assert "mount -o remount,rw,size=1g /dev/shm" in line
    assert "docker run --shm-size=1g" in line


def test_one_rank_has_not() -> None:
    """The others keep it among themselves, and all sums are right."""
    found, errors = _ranks({1: _READ_ONLY})
    assert [one["sum"] for one in found] == [float(SIZE)] * SIZE
    assert not any(one["shares_memory"] for one in found)
    assert [one["has_segments"] for one in found] == [True, False, True]
    ((rank, line),) = _warnings(errors)
    assert rank == 1
    assert "for rank 1 (/dev/shm" in line


def test_all_ranks_have_it() -> None:
    found, errors = _ranks({})
    assert found == [_BY_MEMORY] * SIZE
    assert _warnings(errors) == []


def test_a_group_of_ranks_that_share_memory_opens_no_network() -> None:
    found, _ = _ranks({}, program="split", size=4)
    assert found == [{"sum": 2.0, "tcp": 0, "memory": True}] * 4


def test_a_group_of_which_a_rank_has_no_memory_left_goes_by_tcp() -> None:
    """And the other group does not."""
    own = "mount -t tmpfs tmpfs /dev/shm && export FILLED=1"
    found, _ = _ranks({1: own}, program="split", size=4)
    assert [one["sum"] for one in found] == [2.0] * 4
    assert [one["memory"] for one in found] == [False, False, True, True]
    assert [one["tcp"] > 0 for one in found] == [True, True, False, False]


def test_who_wants_tcp_is_not_warned() -> None:
    found, errors = _ranks(dict.fromkeys(range(SIZE), _READ_ONLY), "tcp,self")
    assert found == [_BY_TCP] * SIZE
    assert _warnings(errors) == []


def test_where_it_is_full_system_v_has_memory_of_its_own() -> None:
    found, errors = _ranks(dict.fromkeys(range(SIZE), _FULL), "all")
    assert found == [_BY_MEMORY] * SIZE
    assert _warnings(errors) == []


def test_nothing_else_is_allowed() -> None:
    with pytest.raises(RankFailed) as failed:
        _ranks(dict.fromkeys(range(SIZE), _READ_ONLY), "shm,self")
    said = failed.value.exits[0].stderr
    assert "UCX's ucp_worker_create failed: Shared memory error (set: UCX_TLS=shm,self" in said
    assert "): make /dev/shm writable and large enough" in said
