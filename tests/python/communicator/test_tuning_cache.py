"""The cache of tunings: what is found again, by what key, and what damage does."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from tunings import tuning_of

from telegrad.communicator.tuning_cache import (
    cache_folder,
    candidates,
    check_writable,
    file_of,
    newest_between_hosts,
    store,
)
from telegrad.cost import Place

_ENVIRONMENT = (("UCX_TLS", "tcp,self"),)
_PLACE = Place("ucx", (("node1", 4),), "eth0", _ENVIRONMENT)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))


def test_the_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("TELEGRAD_CACHE")
    assert cache_folder() == Path("/xdg/telegrad")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/home/me/.cache/telegrad")


def test_what_is_stored_is_found_and_replaced() -> None:
    assert candidates(_PLACE) == []
    first, second = tuning_of(_PLACE, 1000), tuning_of(_PLACE, 2000)
    path = store(first)
    assert path == file_of(_PLACE)
    assert candidates(_PLACE) == [first]
    assert store(second) == path
    assert candidates(_PLACE) == [second]
    assert [one.name for one in path.parent.iterdir()] == [path.name]  # nothing temporary stays


@pytest.mark.parametrize(
    "other",
    [
        Place("mpi", (("node1", 4),), "eth0", _ENVIRONMENT),
        Place("ucx", (("node2", 4),), "eth0", _ENVIRONMENT),
        Place("ucx", (("node1", 3),), "eth0", _ENVIRONMENT),
        Place("ucx", (("node1", 4),), "eth1", _ENVIRONMENT),
        Place("ucx", (("node1", 4),), None, _ENVIRONMENT),
        Place("ucx", (("node1", 4),), "eth0"),
        Place("ucx", (("node1", 4),), "eth0", (("UCX_TLS", "shm"),)),
        Place("ucx", (("node1", 4),), "eth0", (("UCX_NET_DEVICES", "tcp,self"),)),
        Place("ucx", (("node1", 4),), "eth0", (*_ENVIRONMENT, ("TELEGRAD_NETWORK", "netlab 1gbit"))),
    ],
    ids=str,
)
def test_another_place_has_another_file_and_no_part_in_this_one(other: Place) -> None:
    other = dataclasses.replace(other, environment=tuple(sorted(other.environment)))
    assert file_of(other) != file_of(_PLACE)
    store(tuning_of(_PLACE, 1000))
    assert candidates(other) == []


def test_host_sets_that_could_be_meant_are_all_candidates_the_newest_first() -> None:
    one = tuning_of(Place("ucx", (("node1", 2), ("node2", 2))), 1000)
    two = tuning_of(Place("ucx", (("node1", 3), ("node9", 1))), 2000)
    foreign = tuning_of(Place("ucx", (("node8", 2), ("node9", 2))), 3000)
    for age_s, tuning in ((30, one), (10, two), (20, foreign)):
        path = store(tuning)
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert candidates(Place("ucx", (("node1", 4),))) == [two, one]


@pytest.mark.parametrize("damage", ["", "{", "[" * 100_000, '{"format": "telegrad tuning"}', "\udcff"])
def test_a_damaged_file_is_left_out_with_a_warning_that_names_it(damage: str) -> None:
    path = store(tuning_of(_PLACE, 1000))
    path.write_text(damage, errors="surrogateescape")
    with pytest.warns(UserWarning, match=f"{path} is not used: "):
        assert candidates(_PLACE) == []


def test_a_link_to_nothing_hides_no_other_tuning() -> None:
    path = store(tuning_of(_PLACE, 1000))
    path.with_name(path.name.replace(".json", "x.json")).symlink_to(path.with_name("gone"))
    assert candidates(_PLACE) == [tuning_of(_PLACE, 1000)]


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TELEGRAD_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert candidates(_PLACE) == []


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "file"))
    for write in (check_writable, lambda: store(tuning_of(_PLACE, 1000))):
        with pytest.raises(OSError, match=r"^tunings cannot be kept in .*file \(it is no folder\): let TELEGRAD_CACHE"):
            write()
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    check_writable()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store(tuning_of(_PLACE, 1000))
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_newest_network_between_hosts_is_found() -> None:
    assert newest_between_hosts() is None
    store(dataclasses.replace(tuning_of(_PLACE, 1), measured_at="2026-12-31T00:00:00+00:00"))  # one host
    two = [Place("ucx", (("node1", 1), (f"node{n}", 1)), "eth0", _ENVIRONMENT) for n in (2, 3)]
    older, newer = (
        dataclasses.replace(tuning_of(place, 1), measured_at=f"2026-11-{day}T00:00:00+00:00")
        for place, day in zip(two, (20, 21), strict=True)
    )
    for tuning in (newer, older):  # the date counts, not the file's
        store(tuning)
    (cache_folder() / "ucx-p2-x-y.json").write_text("{")
    assert newest_between_hosts() == newer
