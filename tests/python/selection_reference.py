"""The oracle of ``telegrad.kernels.select``: the same functions in plain numpy, slow and obvious."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from telegrad.kernels.select import Chosen, Sign

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.intp]

_LANES = 16  # of every sum of doubles: element i in lane i % 16, so that its bits do not depend on the processor


def accumulate(residual: Floats, gradient: Floats | None) -> None:
    """``residual += gradient``."""
    if gradient is not None:
        residual += gradient


def accumulate_select(
    residual: Floats,
    gradient: Floats | None,
    threshold: float,
    indices: Indices,
    values: Floats,
    offset: int,
    sign: Sign = 0,
) -> int:
    """Moves the entries of magnitude >= ``threshold``; returns how many there are."""
    accumulate(residual, gradient)
    return _move(residual, np.flatnonzero(_reaches(residual, threshold, sign)), indices, values, offset)


def accumulate_topk(
    residual: Floats, gradient: Floats | None, k: int, indices: Indices, values: Floats, offset: int, sign: Sign = 0
) -> Chosen:
    """Moves exactly the ``k`` entries of largest magnitude; of one sign, all of it if there are fewer."""
    accumulate(residual, gradient)
    return _move_topk(residual, k, indices, values, offset, sign)


def accumulate_trimmed(
    residual: Floats,
    gradient: Floats | None,
    k: int,
    step: float,
    indices: Indices,
    values: Floats,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """The entries of ``accumulate_topk``, ranked among those that reach a threshold alone."""
    accumulate(residual, gradient)
    mean, largest = _mean_and_max(residual, sign)
    ratio, steps = 1.0, 0
    while ratio > 0 and math.isfinite(mean) and math.isfinite(largest):
        steps += 1
        ratio = max(0.0, 1 - steps * step)
        survivors = np.flatnonzero(_reaches(residual, mean + ratio * (largest - mean), sign))
        if survivors.size >= k:
            return _move_topk(residual, k, indices, values, offset, sign, survivors)
    return _move_topk(residual, k, indices, values, offset, sign)


def accumulate_search(
    residual: Floats,
    gradient: Floats | None,
    k: int,
    tolerance: float,
    indices: Indices,
    values: Floats,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """Moves all entries of magnitude >= mean + ratio (max - mean), with a ratio for which they are k to 2k."""
    accumulate(residual, gradient)
    mean, largest = _mean_and_max(residual, sign)
    low, high = 0.0, 1.0
    while high - low > tolerance and math.isfinite(mean) and math.isfinite(largest):
        ratio = low + (high - low) / 2
        threshold = np.float32(mean + ratio * (largest - mean))
        reached = np.flatnonzero(_reaches(residual, float(threshold), sign))
        if reached.size < k:
            high = ratio
        elif reached.size > 2 * k:
            low = ratio
        else:
            peak = float(np.abs(residual).max())
            _move(residual, reached, indices, values, offset)
            return Chosen(reached.size, float(threshold), peak)
    return _move_topk(residual, k, indices, values, offset, sign)


def accumulate_buckets(
    residual: Floats,
    gradient: Floats | None,
    bucket: int,
    per_bucket: int,
    of_last: int,
    indices: Indices,
    values: Floats,
    offset: int,
) -> Chosen:
    """Moves the ``per_bucket`` largest of every ``bucket`` consecutive entries, and the ``of_last`` of what is left."""
    accumulate(residual, gradient)
    peak = float(np.abs(residual).max())
    starts = range(0, residual.size, bucket)
    lasts = [per_bucket if start + bucket <= residual.size else of_last for start in starts]
    pairs = zip(starts, lasts, strict=True)
    chosen = [start + np.sort(_topk(residual[start : start + bucket], k, 0)) for start, k in pairs]
    return Chosen(_move(residual, np.concatenate(chosen), indices, values, offset), 0.0, peak)


def accumulate_random(
    residual: Floats,
    gradient: Floats | None,
    k: int,
    draw: tuple[int, int, int, int],
    indices: Indices,
    values: Floats,
    offset: int,
) -> Chosen:
    """Moves ``k`` random entries, the same ones for the same ``draw``: seed, call, rank, stream."""
    accumulate(residual, gradient)
    peak = float(np.abs(residual).max())
    leaves = k > residual.size // 2  # then those that stay are drawn
    drawn: set[int] = set()
    positions = _positions(draw, residual.size)
    while len(drawn) < (residual.size - k if leaves else k):
        drawn.add(next(positions))
    chosen = np.array([i for i in range(residual.size) if (i in drawn) != leaves], np.intp)
    return Chosen(_move(residual, chosen, indices, values, offset), 0.0, peak)


def accumulate_normal(residual: Floats, gradient: Floats | None) -> tuple[float, float]:
    """Mean and standard deviation of residual + gradient."""
    accumulate(residual, gradient)
    sums = residual.astype(np.float64)
    mean = _sum(sums) / sums.size
    return mean, math.sqrt(max(0.0, _sum(sums * sums) / sums.size - mean * mean))


def _positions(draw: tuple[int, int, int, int], size: int) -> Iterator[int]:
    """Random positions below ``size``, each of two words; words are drawn in groups of 16 counters, word by word."""
    seed, call, rank, stream = draw
    for group in itertools.count(0, 16):
        words = np.array([_philox(group + lane, call, rank, stream, seed) for lane in range(16)], np.uint64).T
        for high, low in words.reshape(-1, 2).tolist():
            yield ((high << 32 | low) * size) >> 64


def _philox(counter: int, call: int, rank: int, stream: int, seed: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: Salmon, Moraes, Dror, Shaw, SC 2011."""
    words = (counter, call, rank, stream)
    key, word = [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = (second >> 32 ^ words[1] ^ key[0], second & word, first >> 32 ^ words[3] ^ key[1], first & word)
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return words


def _keys(x: Floats, sign: Sign) -> npt.NDArray[np.int64]:
    """What entries are ranked by: the bits of |x|; of one sign, those of ±x, negative for the other one."""
    bits: npt.NDArray[np.int64] = (np.negative(x) if sign == -1 else x).view(np.int32).astype(np.int64)
    return bits & 0x7FFFFFFF if sign == 0 else bits


def _reaches(x: Floats, threshold: float, sign: Sign) -> npt.NDArray[np.bool_]:
    bound = int(np.float32(max(threshold, 0)).view(np.int32))
    return _keys(x, sign) >= max(bound, abs(sign))


def _topk(x: Floats, k: int, sign: Sign) -> Positions:
    keys = _keys(x, sign)
    ranked = np.argsort(-keys, kind="stable")
    return ranked[keys[ranked] >= abs(sign)][:k]


def _move_topk(
    residual: Floats, k: int, indices: Indices, values: Floats, offset: int, sign: Sign, among: Positions | None = None
) -> Chosen:
    among = np.arange(residual.size) if among is None else among
    chosen = among[_topk(residual[among], k, sign)]
    last = _keys(residual, sign)[chosen[-1]] if chosen.size == k else 1
    threshold = float(np.int32(last).view(np.float32))
    peak = threshold if sign == 0 else float(np.abs(residual).max())
    return Chosen(_move(residual, np.sort(chosen), indices, values, offset), threshold, peak)


def _mean_and_max(x: Floats, sign: Sign) -> tuple[float, float]:
    keys = np.maximum(_keys(x, sign), 0)
    magnitudes = keys.astype(np.int32).view(np.float32).astype(np.float64)
    count = x.size if sign == 0 else np.count_nonzero(keys)
    return _sum(magnitudes) / count if count else 0.0, float(magnitudes[np.argmax(keys)])


def _sum(x: npt.NDArray[np.float64]) -> float:
    padded = np.zeros((-(-x.size // _LANES), _LANES))
    padded.reshape(-1)[: x.size] = x
    lanes: npt.NDArray[np.float64] = np.add.accumulate(padded)[-1]  # one after the other, unlike np.sum
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def _move(residual: Floats, chosen: Positions, indices: Indices, values: Floats, offset: int) -> int:
    moved = chosen[: len(indices)]
    indices[: len(moved)] = moved + offset
    values[: len(moved)] = residual[moved]
    residual[moved] = 0
    return len(chosen)
