"""Texts as hashed n-grams."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.common.ngrams import hashed_ngrams
from telegrad.linear import Rows


def entries(rows: Rows, row: int) -> dict[int, float]:
    part = rows.part(row, row + 1)
    return dict(zip(part.indices.tolist(), part.values.tolist(), strict=True))


def feature_of(gram: bytes, features: int) -> int:
    (found,) = hashed_ngrams([gram], lengths=(len(gram), len(gram)), features=features).indices.tolist()
    return int(found)


@given(
    texts=st.lists(st.one_of(st.binary(max_size=30), st.text(max_size=12)), max_size=6),
    first=st.integers(1, 8),
    more=st.integers(0, 3),
    features=st.sampled_from([1, 7, 1000, 2**24, 2**32 - 1]),
)
def test_a_row_is_the_counted_ngrams_of_its_text(
    texts: list[str | bytes], first: int, more: int, features: int
) -> None:
    last = min(8, first + more)
    rows = hashed_ngrams(texts, lengths=(first, last), features=features, counts=True, normalised=False)
    assert len(rows) == len(texts)
    assert rows.n_features == features
    for place, text in enumerate(texts):
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        wanted: Counter[int] = Counter()
        for length in range(first, last + 1):
            for at in range(len(data) - length + 1):
                wanted[feature_of(data[at : at + length], features)] += 1
        assert entries(rows, place) == wanted


def test_values() -> None:
    texts = [b"abababc", b"", b"xyz"]
    binary = hashed_ngrams(texts, [1, -1, 1], normalised=False)
    assert set(binary.values.tolist()) == {1}
    assert binary.labels.tolist() == [1, -1, 1]
    assert np.diff(binary.offsets.astype(int)).tolist() == [3, 0, 1]
    scaled = hashed_ngrams(texts, counts=True)  # aba and bab twice, abc once
    assert sorted(scaled.values[:3].tolist()) == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert hashed_ngrams([]).labels.size == 0


def test_blocks_of_texts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [bytes([65 + i % 7, 66, 67 + i % 3, 68]) * (i % 5) for i in range(40)]
    whole = hashed_ngrams(texts, range(40), lengths=(2, 4))
    monkeypatch.setattr("lab.common.ngrams._BLOCK_BYTES", 30)
    parts = hashed_ngrams(texts, range(40), lengths=(2, 4))
    for name in ("offsets", "indices", "values", "labels"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_the_hash_is_the_same_everywhere() -> None:
    mixed = int.from_bytes(b"abc", "little") + 3 * 0x9E3779B97F4A7C15 & (wide := 2**64 - 1)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & wide
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & wide
    assert feature_of(b"abc", 1000) == (mixed ^ mixed >> 31) // 2**32 * 1000 // 2**32
    code = "from lab.common.ngrams import hashed_ngrams; print(hashed_ngrams(['abc', 'für']).indices.tolist())"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(hashed_ngrams(["abc", "für"]).indices.tolist())


def test_all_trigrams_spread_over_the_features() -> None:
    """As balls in as many boxes: 1/e of them empty."""
    grams = [bytes([a, b, c]) for a in range(64) for b in range(32) for c in range(32)]
    used = np.unique(hashed_ngrams(grams, features=2**16).indices)
    assert used.size / 2**16 == pytest.approx(1 - np.exp(-1), abs=0.01)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"lengths": (0, 3)}, ValueError, "lengths=(0, 3) must be"),
        ({"lengths": (3, 9)}, ValueError, "from 1 to 8 bytes"),
        ({"features": 0}, ValueError, "features=0 must be from 1"),
        ({"features": 2**32}, ValueError, "must be from 1 to 4294967295"),
        ({"labels": [1, 2]}, ValueError, "labels has 2 elements, but there are 1 texts"),
        ({"texts": "abc"}, TypeError, "texts is one str: give a list"),
        ({"texts": [b"abc", 3]}, TypeError, "texts[1] is int: it must be str or bytes"),
    ],
    ids=["too short", "too long", "no features", "many features", "labels", "one text", "no text"],
)
def test_what_cannot_be(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        hashed_ngrams(**{"texts": [b"abc"], **options})
