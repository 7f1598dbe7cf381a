"""The binary file beside a LIBSVM file: when it is used, and when not."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telegrad.linear import Rows, data, read_libsvm
from telegrad.linear.data import cache_path

TEXT = b"".join(b"%d %d:%d\n" % (i % 2, 1 + i % 7, i) for i in range(40)) + b"x\n1 9:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "data.svm"
    found.write_bytes(TEXT)
    return found


def same(a: Rows, b: Rows) -> bool:
    names = ("offsets", "indices", "values", "labels", "starts")
    alike = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
    return alike and a.damaged == b.damaged and a.first_damaged == b.first_damaged


def read(path: Path, **options: Any) -> Rows:
    return read_libsvm(path, strict=False, cache=True, **options)


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is parsed."""

    def refuse(*_: object) -> None:
        raise AssertionError("the text was parsed")

    monkeypatch.setattr(data, "_parse", refuse)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("suffix", ["", ".gz"], ids=["plain", "gz"])
def test_every_share_comes_from_the_cache_as_from_the_text(
    path: Path, world_size: int, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix:
        path = path.with_name("data.svm.gz")
        path.write_bytes(gzip.compress(TEXT))
    shares = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    direct = [read_libsvm(path, strict=False, **share) for share in shares]
    first = [read(path, **share) for share in shares]
    unreadable(monkeypatch)
    second = [read(path, **share) for share in shares]
    assert all(map(same, direct, first))
    assert all(map(same, direct, second))
    assert not second[0].values.flags.writeable


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_the_whole_file_s_cache_serves_every_share(
    path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    direct = [read_libsvm(path, strict=False, **share) for share in shares]
    whole = read(path)
    unreadable(monkeypatch)
    cut = [read(path, **share) for share in shares]
    for one, other in zip(direct, cut, strict=True):
        assert one.to_csr().toarray().tolist() == other.to_csr().toarray()[:, : one.n_features].tolist()
        assert np.array_equal(one.labels, other.labels)
    assert sum(one.damaged for one in cut) == whole.damaged == 1


@pytest.mark.parametrize("change", ["longer", "later", "features", "zero_based", "strict"])
def test_a_cache_of_something_else_is_not_used(path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read(path, zero_based=True)
    options: dict[str, Any] = {"zero_based": True, "strict": False, "cache": True}
    match change:
        case "longer":
            path.write_bytes(TEXT + b"\n1 1:1")
            os.utime(path, ns=(0, path.stat().st_mtime_ns))
        case "later":
            state = path.stat()
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
        case "features":
            options["features"] = 50
        case "zero_based":
            options["zero_based"] = False
        case "strict":
            options["strict"] = True
    unreadable(monkeypatch)
    with pytest.raises(AssertionError, match="the text was parsed"):
        read_libsvm(path, **options)


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "not json", "index"])
def test_a_damaged_cache_is_not_used(path: Path, damage: str) -> None:
    expected = read(path)
    place = cache_path(path, 0, 1)
    kept = bytearray(place.read_bytes())
    match damage:
        case "cut":
            kept = kept[:-1]
        case "empty":
            kept = bytearray()
        case "noise":
            kept[:8] = b"noise..."
        case "not json":
            kept[20:30] = b"x" * 10
        case "index":  # one beyond the features must never reach the core
            at = kept.index(np.array([0, 1, 2, 3], np.uint32).tobytes())
            kept[at : at + 4] = b"\xff\xff\xff\xff"
    place.write_bytes(kept)
    assert same(read(path), expected)
    assert place.read_bytes() != kept  # it has been replaced


def test_nothing_is_kept_without_being_asked_or_where_that_cannot_be(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_libsvm(path, strict=False)
    assert [one.name for one in path.parent.iterdir()] == ["data.svm"]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr("telegrad.linear.data.os.replace", refuse)
    assert len(read(path)) == 41
    assert [one.name for one in path.parent.iterdir()] == ["data.svm"]


def test_shares_of_other_numbers_of_ranks_are_removed(path: Path) -> None:
    others = [
        path.with_name(name) for name in ("data.svm.backup.0of3.rows", "data.svm.0of3.rows.txt", "data.svm2.0of3.rows")
    ]
    for other in others:
        other.write_bytes(b"of somebody else")
    for world_size in (3, 2):
        for rank in range(world_size):
            read(path, rank=rank, world_size=world_size)
    found = {one.name for one in path.parent.iterdir()} - {path.name} - {other.name for other in others}
    assert found == {"data.svm.0of2.rows", "data.svm.1of2.rows"}
    assert all(other.exists() for other in others)
    mapped = read(path, rank=1, world_size=2)
    read(path)
    assert {one.name for one in path.parent.iterdir()} & found == set()
    assert mapped.labels.sum() > 0
