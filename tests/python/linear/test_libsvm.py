"""Files of LIBSVM text, plain and compressed, whole and in ranges of every border."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telegrad.linear import Rows, data, read_libsvm
from telegrad.linear import data as libsvm_files
from telegrad.linear.data import COMPRESSED

TEXT = b"+1 1:0.5 3:-2 9:1e-3\n\n-1\r\n# said\n0 2:.5 7:5. # and 8:9\r\n   \t\n\t1.5e0  4:+3\t11:0 \n-1 2:1\n+1 12:0.25"
LINES = [line.split(b"#")[0].split() for line in TEXT.splitlines()]
EXPECTED = [
    (float(words[0]), [(int(i) - 1, float(v)) for i, v in (word.split(b":") for word in words[1:])])
    for words in LINES
    if words
]


def listed(rows: Rows) -> list[tuple[float, list[tuple[int, float]]]]:
    found = []
    for row in range(len(rows)):
        at = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        entries = list(zip(rows.indices[at].tolist(), rows.values[at].tolist(), strict=True))
        found.append((float(rows.labels[row]), entries))
    return found


def as_float32(rows: list[tuple[float, list[tuple[int, float]]]]) -> list[tuple[float, list[tuple[int, float]]]]:
    return [(float(np.float32(label)), [(i, float(np.float32(v))) for i, v in entries]) for label, entries in rows]


def written(folder: Path, text: bytes, suffix: str = "") -> Path:
    path = folder / f"data.svm{suffix}"
    match suffix:
        case ".gz":
            path.write_bytes(gzip.compress(text))
        case ".bz2":
            path.write_bytes(bz2.compress(text))
        case ".xz":
            path.write_bytes(lzma.compress(text))
        case ".zst":
            zstandard = pytest.importorskip("zstandard")
            middle = len(text) // 2  # two frames, one after the other
            path.write_bytes(b"".join(zstandard.compress(part) for part in (text[:middle], text[middle:])))
        case _:
            path.write_bytes(text)
    return path


@pytest.fixture(params=["", *COMPRESSED], ids=lambda suffix: suffix[1:] or "plain")
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_ranks_divide_the_lines_whatever_their_lengths(
    tmp_path: Path, suffix: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_BLOCK_BYTES", 24)  # shorter and longer than lines
    for shift in range(13 if suffix else len(TEXT)):  # so every border lies everywhere
        text = b"#" + b"-" * shift + b"\n" + TEXT
        path = written(tmp_path, text, suffix)
        parts = [read_libsvm(path, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert [row for part in parts for row in listed(part)] == as_float32(EXPECTED)
        starts = [int(start) for part in parts if part.starts is not None for start in part.starts]
        assert [text[start:].split()[0] for start in starts] == [words[0] for words in LINES if words]


def test_more_ranks_than_lines(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, b"1 1:1\n-1 2:1\n", suffix)
    parts = [read_libsvm(path, rank=rank, world_size=7) for rank in range(7)]
    assert [len(part) for part in parts].count(0) == 5
    assert sum(len(part) for part in parts) == 2


def test_no_lines_at_all(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, b"" if suffix else b"\n", suffix)
    assert len(read_libsvm(path)) == 0
    assert len(read_libsvm(path, rank=1, world_size=2, features=5)) == 0
    assert read_libsvm(path, features=5).n_features == 5


@pytest.mark.parametrize("cache", [False, True])
def test_a_file_without_a_byte_is_refused_alike(tmp_path: Path, suffix: str, cache: bool) -> None:
    path = tmp_path / f"data.svm{suffix}"
    path.touch()
    for rank in range(2):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: the file is empty: name one that has rows$"):
            read_libsvm(path, rank=rank, world_size=2, cache=cache)


def test_features_are_those_declared_or_those_that_occur(tmp_path: Path) -> None:
    path = written(tmp_path, b"1 0:1 4:1\n")
    assert read_libsvm(path).n_features == 5
    assert read_libsvm(path, zero_based=True, features=9).n_features == 9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("yes 1:1", "'yes' is no label"),
        ("1 a:1", "'a:1' is no index:value pair"),
        ("1 1:", "'1:' has no value"),
        ("1 1:1e99", "'1:1e99' is more than float32 can hold"),
        ("1 2:1 1:1", "'1:1': indices must rise"),
        ("1 5000000000:1", "'5000000000:1': indices must be below 2"),
        ("1 12:1", "'12:1' is beyond the 11 features that are declared"),
        ("1 1:1 qid:3", "'qid:3': qid must be a whole number right behind the label"),
        ("1:-2 1:1", "'1:-2': a label's weight must be a finite number, 0 or more"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_damaged_line_is_named(tmp_path: Path, suffix: str, line: str, said: str, world_size: int) -> None:
    path = written(tmp_path, f"1 1:1\n\n1 2:1\n{line}\n-1 3:1\n".encode(), suffix)
    raised = []
    for rank in range(world_size):
        try:
            read_libsvm(path, features=11, rank=rank, world_size=world_size)
        except ValueError as error:
            raised.append(str(error))
    assert len(raised) == 1
    assert f"{path}, line 4: {said}" in raised[0]


def test_damaged_lines_are_counted_where_they_are_left_out(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, b"1 1:1\nx\n1 1:y\n-1 2:1", suffix)
    with pytest.raises(ValueError, match="line 2: .*strict=False leaves out damaged lines"):
        read_libsvm(path)
    rows = read_libsvm(path, strict=False)
    assert (len(rows), rows.damaged) == (2, 2)
    assert [text.partition(": ")[0] for text in rows.first_damaged] == [f"{path}, line 2", f"{path}, line 3"]


def test_more_features_than_declared_are_an_error_also_where_damage_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, b"x\n1 3:1\n")
    with pytest.raises(ValueError, match=r"line 2: '3:1' is beyond the 2 features that are declared"):
        read_libsvm(path, features=2, strict=False)
    path = written(tmp_path, b"1 3:1\n")
    with pytest.raises(ValueError, match=r"declared: declare more, or none$"):
        read_libsvm(path, features=2)


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_a_damaged_archive_is_an_error(tmp_path: Path, suffix: str, damage: str) -> None:
    path = written(tmp_path, b"1 1:1\n" * 1000, suffix)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] if damage == "cut" else b"noise" + whole)
    with pytest.raises(ValueError, match="data.svm.* is damaged"):
        read_libsvm(path)


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".bz2", "bzip2"), (".xz", "xz"), (".zst", "Zstandard")])
@pytest.mark.parametrize(("name", "stem"), [("data.svm", "data.svm"), ("data.v1", "data.v1"), ("data.GZ", "data")])
def test_an_archive_whose_name_does_not_say_so(tmp_path: Path, suffix: str, kind: str, name: str, stem: str) -> None:
    path = written(tmp_path, b"1 1:1\n", suffix).rename(tmp_path / name)
    said = f"{path} is compressed ({kind}), which its name does not say: name it {stem}{suffix}, or decompress it"
    with pytest.raises(ValueError, match=re.escape(said)):
        read_libsvm(path)
    assert len(read_libsvm(path.rename(tmp_path / f"{stem}{suffix}"))) == 1


def test_an_archive_in_a_pipe_is_read(tmp_path: Path) -> None:
    archive = gzip.compress(b"1 1:1\n")
    path = tmp_path / "data.gz"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(path.write_bytes, archive)
        assert len(read_libsvm(path)) == 1


@pytest.mark.parametrize("name", ["data", "data.gz"])
def test_a_pipe_is_read_by_one_rank(tmp_path: Path, name: str) -> None:
    pack = gzip.compress if name.endswith(".gz") else bytes
    path = tmp_path / name
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(path.write_bytes, pack(TEXT))
        rows = read_libsvm(path, cache=True)
        assert listed(rows) == as_float32(EXPECTED)
        pool.submit(path.write_bytes, pack(b"1 1:1\n1 x\n"))
        with pytest.raises(ValueError, match=f"{path}, line 2: 'x' is no index:value pair"):
            read_libsvm(path)
        pool.submit(path.write_bytes, b"")
        with pytest.raises(ValueError, match=f"^{path}: the file is empty: name one that has rows$"):
            read_libsvm(path)
    assert [one.name for one in tmp_path.iterdir()] == [name]  # nothing is kept of what cannot be read again
    with pytest.raises(ValueError, match=f"^{path} is no regular file, of which 2 ranks could read parts: write it to"):
        read_libsvm(path, rank=1, world_size=2)


def test_a_descriptor_has_no_cache_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "data.svm"
    path.write_bytes(TEXT)
    with path.open("rb") as file:
        name = Path("/dev/fd") / str(file.fileno())
        assert listed(read_libsvm(name, cache=True)) == as_float32(EXPECTED)
        assert not libsvm_files.cache_path(name, 0, 1).exists()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data, "keep", lambda *_: pytest.fail("rows are kept"))
            read_libsvm(name, cache=True)


def test_a_zst_file_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = tmp_path / "data.svm.zst"
    path.write_bytes(b"a frame")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"data.svm.zst needs zstandard: pip install 'telegrad\[linear\]'"):
        read_libsvm(path)


@pytest.mark.parametrize("name", ["data.svm", "data.svm.gz"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError):
        read_libsvm(tmp_path / name)


def test_a_folder_that_is_named_like_an_archive(tmp_path: Path) -> None:
    (tmp_path / "data.gz").mkdir()
    with pytest.raises(IsADirectoryError):
        read_libsvm(tmp_path / "data.gz")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_based": "one"}, "zero_based='one' must be 'auto', True or False"),
        ({"features": 0}, "features=0 must be from 1"),
        ({"features": 2**32}, "features=4294967296 must be from 1"),
        ({"rank": 2, "world_size": 2}, "rank=2 must be from 0 to world_size - 1, which is 1"),
        ({"rank": -1}, "rank=-1 must be"),
        ({"world_size": 0}, "world_size=0 must be at least 1"),
        ({"rank": -1, "world_size": -2}, "world_size=-2 must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_libsvm(written(tmp_path, TEXT), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0.5, "world_size": 2}, "rank=0.5 must be an int from 0 to world_size - 1, which is 1"),
        ({"rank": True, "world_size": 2}, "rank=True must be an int"),
        ({"rank": "0"}, "rank='0' must be an int"),
        ({"world_size": 2.0}, "world_size=2.0 must be an int of at least 1"),
        ({"world_size": None}, "world_size=None must be an int of at least 1"),
    ],
)
def test_shares_of_another_type_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        read_libsvm(written(tmp_path, TEXT), **options)


def test_shares_may_be_numpy_s_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    share: Any = {"rank": np.uint8(1), "world_size": np.uint8(2)}  # whose products would overflow
    assert listed(read_libsvm(path, **share)) == listed(read_libsvm(path, rank=1, world_size=2))


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_read_and_kept(tmp_path: Path, world_size: int) -> None:
    """As XGBoost writes them; ``qid`` is passed over."""
    path = tmp_path / "weights.svm"
    path.write_text("1:0.5 1:1\n0 qid:1 2:1\n0:3 qid:2 1:2 3:1\n1 2:2\n")
    for cache in (False, True, True):
        shares = [read_libsvm(path, rank=rank, world_size=world_size, cache=cache) for rank in range(world_size)]
        weights = np.concatenate([np.ones(len(one)) if one.weights is None else one.weights for one in shares])
        assert weights.tolist() == [0.5, 1, 3, 1]
        assert np.concatenate([one.labels for one in shares]).tolist() == [1, 0, 0, 1]
        assert sum(one.nnz for one in shares) == 5
    assert read_libsvm(path).total_weight == 5.5
    path.write_text("1 1:1\n0 2:1\n")
    assert read_libsvm(path).weights is None
