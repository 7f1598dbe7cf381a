"""LIBSVM files as scikit-learn, LIBSVM's svm-scale and users of XGBoost write them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from telegrad.linear import Rows, read_libsvm
from telegrad.linear.data import DamagedLine

COLUMNS = 9


def zstd(text: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.compress(text))


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".svm": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
TOOLS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}


def matrix() -> Any:
    """The first column and the last row have entries, another row has none."""
    random = np.random.default_rng(0)
    dense = np.where(random.random((40, COLUMNS)) < 0.3, random.normal(size=(40, COLUMNS)), 0)
    dense[7], dense[3, 0], dense[-1, -1] = 0, 1 / 3, 1e-30
    return sparse.csr_array(dense)


def written(folder: Path, y: Any, suffix: str = ".svm", **options: Any) -> Path:
    plain = folder / "plain"
    dump_svmlight_file(matrix(), y, str(plain), **options)
    path = folder / f"data{suffix}"
    path.write_bytes(PACKED[suffix](plain.read_bytes()))
    return path


def shares(path: Path, ranks: int) -> list[Rows]:
    return [read_libsvm(path, rank=rank, world_size=ranks, cache=False) for rank in range(ranks)]


def is_read_as(path: Path, wanted: Any, labels: Any, ranks: int = 1) -> None:
    parts = shares(path, ranks)
    assert max(part.n_features for part in parts) == wanted.shape[1]
    found = [replace(part, n_features=wanted.shape[1]).to_csr().toarray() for part in parts]
    np.testing.assert_array_equal(np.concatenate(found), wanted.toarray().astype(np.float32))
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), np.asarray(labels, np.float32))


@pytest.mark.parametrize("query", [False, True], ids=["", "qid"])
@pytest.mark.parametrize("comment", [None, "made by me\n1 2:3, and more"], ids=["", "comment"])
@pytest.mark.parametrize("zero_based", [True, False])
@pytest.mark.parametrize("suffix", PACKED)
def test_scikit_learn_s_files(tmp_path: Path, suffix: str, zero_based: bool, comment: str | None, query: bool) -> None:
    y = np.random.default_rng(1).integers(0, 2, 40)
    queries = np.arange(40) // 3 if query else None
    path = written(tmp_path, y, suffix, zero_based=zero_based, comment=comment, query_id=queries)
    for ranks in (1, 3):
        is_read_as(path, matrix(), y, ranks)
    theirs, labels = load_svmlight_file(str(tmp_path / "plain"), zero_based=zero_based, n_features=COLUMNS)
    is_read_as(path, theirs, labels)


def test_numbers_for_a_regression(tmp_path: Path) -> None:
    y = np.random.default_rng(1).normal(size=40) * 10.0 ** np.arange(-20, 20)
    is_read_as(written(tmp_path, y), matrix(), y, 2)


@pytest.mark.parametrize("suffix", TOOLS)
def test_files_that_the_formats_own_tools_have_compressed(tmp_path: Path, suffix: str) -> None:
    tool = shutil.which(TOOLS[suffix])
    if tool is None:
        pytest.skip(f"{TOOLS[suffix]} is not installed")
    y = np.arange(40) % 2
    plain = written(tmp_path, y, zero_based=False)
    path = tmp_path / f"packed{suffix}"
    path.write_bytes(subprocess.run([tool, "-c", str(plain)], capture_output=True, check=True).stdout)
    is_read_as(path, matrix(), y, 3)


@pytest.mark.parametrize("query", [False, True], ids=["", "qid"])
def test_rows_of_several_labels_or_none_are_named(tmp_path: Path, query: bool) -> None:
    """A row without a label begins with a blank, and its first entry is no label with a weight."""
    marks = np.zeros((40, 3), int)
    marks[np.arange(40), np.arange(40) % 3] = 1
    marks[5] = 0
    options: dict[str, Any] = {"multilabel": True, "query_id": np.arange(40) if query else None}
    with pytest.raises(DamagedLine, match=r"line 6: '.*:.*' is no label.*, and not with several or none"):
        shares(written(tmp_path, marks, **options), 1)
    marks[2] = 1
    with pytest.raises(DamagedLine, match=r"line 3: '0,1,2' is no label"):
        shares(written(tmp_path, marks, **options), 1)


SCALED = b"1 1:0.5 2:0.708455 3:1 \n-1 1:1 2:1 \n1 \n"  # by svm-scale 3.24 of the text below
BEFORE = b"+1 1:2 3:5\n-1 1:4 2:1.23456789\n1 2:-3\n"


def test_files_of_svm_scale(tmp_path: Path) -> None:
    """Each line ends with a blank, and zeros are left out, so that a row may be empty."""
    path = tmp_path / "scaled.svm"
    path.write_bytes(SCALED)
    wanted = sparse.csr_array([[0.5, 0.708455, 1], [1, 1, 0], [0, 0, 0]])
    for ranks in (1, 2, 4):
        is_read_as(path, wanted, [1, -1, 1], ranks)
    if tool := shutil.which("svm-scale"):
        (tmp_path / "before").write_bytes(BEFORE)
        asked = [tool, "-l", "0", str(tmp_path / "before")]
        assert subprocess.run(asked, capture_output=True, check=True).stdout == SCALED


def test_liblinear_s_reader_finds_the_same(tmp_path: Path) -> None:
    reader = pytest.importorskip("liblinear.commonutil")
    path = written(tmp_path, np.arange(40) % 2 * 2 - 1, zero_based=False)
    labels, rows = reader.svm_read_problem(str(path), return_scipy=True)
    is_read_as(path, sparse.csr_array(rows)[:, -COLUMNS:], labels, 2)  # whose first column is that of index 0


@pytest.mark.parametrize("suffix", ["", "qid:{} "], ids=["", "qid"])
def test_xgboost_s_reader_finds_the_same(tmp_path: Path, suffix: str) -> None:
    """``label:weight`` on all rows: where some lack it, XGBoost 3.2 moves the weights that there are to the front."""
    xgboost = pytest.importorskip("xgboost")
    path = tmp_path / "weights.svm"
    lines = ["# made by hand"]
    for i in range(30):
        lines.append(f"{i % 2}:{0.5 + i % 4} {suffix.format(i)}{i % 3}:{1 + i / 8} {5 + i % 4}:-1 # row {i}")
    path.write_text("\n".join(lines) + "\n")
    theirs = xgboost.DMatrix(f"{path}?format=libsvm")
    is_read_as(path, sparse.csr_array(theirs.get_data()), theirs.get_label(), 3)
    if not suffix:  # with groups its weights are of these
        weights = np.concatenate([part.weights for part in shares(path, 3)])
        np.testing.assert_array_equal(weights, theirs.get_weight())
