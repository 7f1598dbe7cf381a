"""The oracle of ``cpu`` and ``triton``: bits one after the other, in Python's integers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from telegrad.kernels.pack import BLOCK_LEAST, BLOCK_MOST, RUN_LEAST

Numbers = npt.NDArray[np.uint32]
Octets = npt.NDArray[np.uint8]

_HEADER = 8


def pack_bits(numbers: Numbers, width: int, out: Octets) -> None:
    bits = sum((int(number) & (1 << width) - 1) << i * width for i, number in enumerate(numbers))
    out[:] = np.frombuffer(bits.to_bytes(out.size, "little"), np.uint8)


def unpack_bits(packed: Octets, width: int, numbers: Numbers) -> int:
    bits = int.from_bytes(packed.tobytes(), "little")
    for i in range(numbers.size):
        numbers[i] = bits >> i * width & (1 << width) - 1
    return (bits >> numbers.size * width).bit_count()


def pack_indices(indices: Numbers, out: Octets) -> int:
    numbers = [int(index) for index in indices]
    blocks: list[bytes] = []
    for begin in range(0, len(numbers), BLOCK_MOST):
        blocks += [block for block, _ in _cut(numbers[begin : begin + BLOCK_MOST], BLOCK_MOST)]
    packed = b"".join(blocks)
    out[: len(packed)] = np.frombuffer(packed, np.uint8)
    return len(packed)


def unpack_indices(packed: Octets, indices: Numbers) -> int:
    numbers: list[int] = []
    data = packed.tobytes()
    while len(numbers) < indices.size:
        header = int.from_bytes(data[:_HEADER], "little")
        count, payload = (header >> 32 & 1023) + 1, header >> 48
        if len(data) < _HEADER + payload or payload > 8191 or len(numbers) + count > indices.size:
            return 1
        block = _read(header, count, data[_HEADER : _HEADER + payload])
        if block is None:
            return 1
        numbers += block
        data = data[_HEADER + payload :]
    if data or any(number <= before for before, number in pairwise(numbers)):
        return 1
    indices[:] = numbers
    return 0


def _width(count: int, spread: int) -> int:
    return (spread // count).bit_length() - 1 if count and spread >= count else 0


def _lows(count: int, width: int) -> int:
    return (count * width + 7) // 8


def _highs(count: int, spread: int, width: int) -> int:
    return (count + (spread >> width) + 7) // 8 if count else 0


def _code(numbers: list[int], before: int, spread: int, width: int) -> tuple[bytes, bytes]:
    """The low and the high section."""
    low = high = 0
    for j, number in enumerate(numbers):
        offset = number - before - 1 - j
        low |= (offset & (1 << width) - 1) << j * width
        high |= 1 << (offset >> width) + j
    count = len(numbers)
    return low.to_bytes(_lows(count, width), "little"), high.to_bytes(_highs(count, spread, width), "little")


def _gap_code(numbers: list[int], width: int) -> bytes:
    """Both sections of the gaps between numbers."""
    low = high = unary = 0
    for j, (before, number) in enumerate(pairwise(numbers)):
        gap = number - before - 1
        low |= (gap & (1 << width) - 1) << j * width
        unary += gap >> width
        high |= 1 << unary + j
    count = len(numbers) - 1
    return low.to_bytes(_lows(count, width), "little") + high.to_bytes((count + unary + 7) // 8, "little")


def _read_gaps(lows: bytes, highs: bytes, first: int, width: int, count: int) -> list[int] | None:
    low, high = int.from_bytes(lows, "little"), int.from_bytes(highs, "little")
    places = [-1, *(bit for bit in range(8 * len(highs)) if high >> bit & 1)]
    if len(places) != count + 1:
        return None
    numbers = [first]
    for j, (before, place) in enumerate(pairwise(places)):
        gap = place - before - 1 << width | low >> j * width & (1 << width) - 1
        numbers.append(numbers[-1] + gap + 1)
    return [number & 0xFFFFFFFF for number in numbers]


def _decode(lows: bytes, highs: bytes, before: int, width: int, count: int) -> list[int] | None:
    low, high = int.from_bytes(lows, "little"), int.from_bytes(highs, "little")
    places = [bit for bit in range(8 * len(highs)) if high >> bit & 1]
    if len(places) != count:
        return None
    offsets = [place - j << width | low >> j * width & (1 << width) - 1 for j, place in enumerate(places)]
    return [before + 1 + j + offset & 0xFFFFFFFF for j, offset in enumerate(offsets)]


def _whole(numbers: list[int]) -> tuple[bytes, int]:
    """One block, and how many bytes it counts as: of gaps as many as in Elias-Fano code, no fewer than it has."""
    first, gaps = numbers[0], len(numbers) - 1
    missing = numbers[-1] - first - gaps
    width = runs = counted = 0
    payload = b""
    if missing:
        width = _width(gaps, missing)
        payload = _gap_code(numbers, width)
        counted = _lows(gaps, width) + _highs(gaps, missing, width)
        breaks = [i for i in range(1, gaps + 1) if numbers[i] != numbers[i - 1] + 1]
        if (len(breaks) + 1) * RUN_LEAST <= gaps + 1:
            skipped, held = missing - len(breaks), gaps - len(breaks)
            missing_width = _width(len(breaks), skipped)
            low, high = _code([numbers[i] - first - i for i in breaks], 0, skipped, missing_width)
            of_present = _code(breaks, 0, held, _width(len(breaks), held))
            as_runs = len(breaks).to_bytes(2, "little") + low + b"".join(of_present) + high
            if len(as_runs) < counted:
                width, runs, payload, counted = missing_width, 1, as_runs, len(as_runs)
    header = first | gaps << 32 | runs << 42 | width << 43 | len(payload) << 48
    return header.to_bytes(_HEADER, "little") + payload, _HEADER + counted


def _cut(numbers: list[int], most: int) -> list[tuple[bytes, int]]:
    """The blocks of the fewest counted bytes that halving gives."""
    if not numbers:
        return []
    one = _whole(numbers)
    if most == BLOCK_LEAST or one[1] <= 2 * _HEADER:
        return [one]
    half = most // 2
    halves = _cut(numbers[:half], half) + _cut(numbers[half:], half)
    return halves if sum(counted for _, counted in halves) < one[1] else [one]


def _read(header: int, count: int, payload: bytes) -> list[int] | None:
    first, width, gaps = header & 0xFFFFFFFF, header >> 43 & 31, count - 1
    if header >> 42 & 1:
        return _read_runs(first, width, count, payload)
    if not payload:
        return [first + i & 0xFFFFFFFF for i in range(count)]
    lows = _lows(gaps, width)
    if lows > len(payload):
        return None
    return _read_gaps(payload[:lows], payload[lows:], first, width, gaps)


def _read_runs(first: int, width: int, count: int, payload: bytes) -> list[int] | None:
    breaks = int.from_bytes(payload[:2], "little")
    if len(payload) < 2 or breaks >= count:
        return None
    held = count - 1 - breaks
    present_width = _width(breaks, held)
    missing_lows, present_lows = _lows(breaks, width), _lows(breaks, present_width)
    cuts = [2, 2 + missing_lows, 2 + missing_lows + present_lows]
    cuts.append(cuts[-1] + _highs(breaks, held, present_width))
    if cuts[-1] > len(payload):
        return None
    missing = _decode(payload[cuts[0] : cuts[1]], payload[cuts[3] :], 0, width, breaks)
    present = _decode(payload[cuts[1] : cuts[2]], payload[cuts[2] : cuts[3]], 0, present_width, breaks)
    if missing is None or present is None:
        return None
    ends = [0, *present, count]
    if any(end <= begin for begin, end in pairwise(ends)):
        return None
    skipped = [0, *missing]
    return [first + i + skipped[run] & 0xFFFFFFFF for run in range(breaks + 1) for i in range(ends[run], ends[run + 1])]
