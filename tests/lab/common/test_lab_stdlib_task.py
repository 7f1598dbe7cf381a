"""The text task that is made of the standard library."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lab.common.ngrams import hashed_ngrams
from lab.common.stdlib_task import stdlib_pieces, stdlib_sources
from telegrad.linear import TrainingSettings, train


def sources(folder: Path) -> Path:
    for name, text in {
        "a/one.py": b"import os\n" * 300,
        "a/b/two.py": b"import sys\n" * 300,
        "c.py": b"class Thing: pass\n" * 30,
        "d/empty.py": b"",
        "d/notes.txt": b"no source",
        "site-packages/x.py": b"foreign" * 3000,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def test_the_library_is_cut_into_pieces(tmp_path: Path) -> None:
    texts, packages = stdlib_sources(sources(tmp_path))
    assert packages == ["a", "a", "c", "d"]
    assert [len(text) for text in texts] == [3300, 3000, 540, 0]
    pieces, labels = stdlib_pieces(1000, tmp_path)
    assert sorted(len(piece) for piece in pieces) == [300, 540, *[1000] * 6]
    assert Counter(b"".join(pieces)) == Counter(b"".join(texts))
    assert [label for piece, label in zip(pieces, labels, strict=True) if b"Thing" in piece] == [-1]
    assert sorted(labels.tolist()) == [-1] + [1] * 7
    with pytest.raises(FileNotFoundError, match="has no Python sources"):
        stdlib_sources(tmp_path / "none")


def test_the_library_of_this_python_can_be_learnt() -> None:
    pieces, labels = stdlib_pieces(4096)
    few = hashed_ngrams(pieces[:1500], labels[:1500])
    trained = train(few, TrainingSettings(epochs=5, batch=50, learning_rate=5.0, held_out=0.2))
    assert trained.epochs[-1].auc > 0.8
