"""Texts as rows of hashed n-grams of bytes. Source: Weinberger et al., "Feature hashing for large scale multitask
learning" (ICML 2009), without signs, which few collisions in many features do not need.

Bytes rather than characters: a text in UTF-8 needs no decoding, and Webspam's trigrams are of bytes too. The hash is
a fixed function of the n-gram: the same in every process and on every machine. This module must not know of files.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from telegrad.linear.rows import MOST_FEATURES, Rows, joined

LONGEST = 8  # bytes of an n-gram, which are hashed as one number
_BLOCK_BYTES = 1 << 20  # of text at a time

U64 = npt.NDArray[np.uint64]


def hashed_ngrams(
    texts: Sequence[str | bytes],
    labels: npt.ArrayLike | None = None,
    *,
    lengths: tuple[int, int] = (3, 3),
    features: int = 2**24,
    counts: bool = False,
    normalised: bool = True,
) -> Rows:
    """A row for each text: its n-grams of ``lengths[0]`` to ``lengths[1]`` bytes, of which each is one of ``features``.

    A ``str`` is taken in UTF-8. An entry's value is 1, or with ``counts`` how often the text has its n-grams; with
    ``normalised`` a row's values are then divided by its length (2-norm). ``labels``: a number for each text, else 0.
    Raises ``TypeError`` for texts that are neither ``str`` nor ``bytes`` and ``ValueError`` for lengths that are not
    within 1 to 8, ``features`` out of range, and other numbers of labels.
    """
    shortest, longest = (operator.index(one) for one in lengths)
    if not 1 <= shortest <= longest <= LONGEST:
        raise ValueError(f"lengths={lengths} must be a shortest and a longest n-gram, from 1 to {LONGEST} bytes")
    if not 1 <= operator.index(features) <= MOST_FEATURES:
        raise ValueError(f"features={features} must be from 1 to {MOST_FEATURES}")
    if isinstance(texts, str | bytes):
        raise TypeError(f"texts is one {type(texts).__name__}: give a list of texts")
    targets = np.zeros(len(texts), np.float32) if labels is None else np.asarray(labels, np.float32).reshape(-1)
    if targets.size != len(texts):
        raise ValueError(f"labels has {targets.size} elements, but there are {len(texts)} texts: give one each")
    parts, done = [], 0
    for block in _blocks(texts):
        own = targets[done : done + len(block)]
        parts.append(_rows_of(block, own, range(shortest, longest + 1), features, counts, normalised))
        done += len(block)
    return joined(parts, features)


def _blocks(texts: Sequence[str | bytes]) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    size = 0
    for place, text in enumerate(texts):
        if not isinstance(text, str | bytes):
            raise TypeError(f"texts[{place}] is {type(text).__name__}: it must be str or bytes")
        block.append(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        size += len(block[-1])
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _rows_of(
    texts: list[bytes], labels: npt.NDArray[np.float32], lengths: range, features: int, counts: bool, normalised: bool
) -> Rows:
    sizes = np.array([len(text) for text in texts], np.int64)
    data = np.frombuffer(b"".join(texts), np.uint8)
    row = np.repeat(np.arange(len(texts)), sizes)
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(data.size)  # bytes of the text from here on
    found = []
    for length in lengths:
        whole = left >= length
        gram = np.zeros(int(whole.sum()), np.uint64)
        begin = np.flatnonzero(whole)
        for place in range(length):
            gram |= data[begin + place].astype(np.uint64) << np.uint64(8 * place)
        found.append(row[begin] * features + _feature_of(gram, length, features))
    entries, times = np.unique(np.concatenate(found), return_counts=True)
    borders = np.searchsorted(entries, np.arange(len(texts) + 1) * features)
    which = np.repeat(np.arange(len(texts)), np.diff(borders))
    values = times.astype(np.float32) if counts else np.ones(times.size, np.float32)
    if normalised:
        squares = np.bincount(which, values.astype(np.float64) ** 2, len(texts))
        values = (values / np.sqrt(squares)[which]).astype(np.float32)
    indices = (entries - which * features).astype(np.uint32)
    return Rows(borders.astype(np.uint64), indices, values, labels, features)


def _feature_of(gram: U64, length: int, features: int) -> npt.NDArray[np.int64]:
    """Which feature an n-gram of so many bytes is."""
    mixed = gram + np.uint64(length * 0x9E3779B97F4A7C15 % 2**64)  # n-grams of different lengths may be the same number
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64's mixing of bits
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(32)) * np.uint64(features) >> np.uint64(32)).astype(np.int64)
