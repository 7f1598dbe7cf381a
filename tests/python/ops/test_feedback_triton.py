"""Error feedback around selections, against its oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from scatter_checks import vector
from triton_arrays import DEVICE, SMALL_BLOCK, OnArrays, array_of, tensor_of, torch, turn_blocks_round

from telegrad.compress.entries import Entry
from telegrad.ops.feedback import Collected, kernels_of, naive
from telegrad.ops.feedback import triton as kernels

GPU = OnArrays(kernels)
DTYPES = ["float32", "uint16"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter


@pytest.fixture(autouse=True)
def _in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(kernels, "_CLEARED", 2 * SMALL_BLOCK)
    turn_blocks_round(monkeypatch)


def check(name: str, *given: object) -> list[np.ndarray]:
    """Both do the same to every array; returns them."""
    got = [one.copy() if isinstance(one, np.ndarray) else one for one in given]
    expected = [one.copy() if isinstance(one, np.ndarray) else one for one in given]
    getattr(GPU, name)(*got)
    getattr(naive, name)(*expected)
    found = [one for one in got if isinstance(one, np.ndarray)]
    wanted = [one for one in expected if isinstance(one, np.ndarray)]
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()
    return found


def number(value: int, dtype: str = "int64") -> np.ndarray:
    return np.array([value], dtype)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_velocities(dtype: str, out: str, nesterov: bool) -> None:
    for size in (1, 64, 257):
        gradient, room = vector(size, dtype, 1), np.zeros(size, out)
        gradient = np.where(np.isfinite(naive.as_float32(gradient)), gradient, gradient.dtype.type(0))
        velocity = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        for active in (0, 1):
            arrays = check(
                "accumulate_velocity", velocity, gradient, room, 0.9, number(active), number(0, "int32"), nesterov
            )
            assert (arrays[0].tobytes() == velocity.tobytes()) == (active == 0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_velocity_that_overflows_becomes_zero(nesterov: bool) -> None:
    velocity, gradient = np.array([1, 3e38, -3e38], np.float32), np.array([1, 3e38, 1], np.float32)
    moved, _, out, _, fault = check(
        "accumulate_velocity", velocity, gradient, np.zeros(3, np.float32), 0.9, number(1), number(0, "int32"), nesterov
    )
    assert moved[1] == 0
    assert out[1] == np.inf
    assert np.isfinite(out[[0, 2]]).all()
    assert fault.tolist() == [1]


def entries(room: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(room)
    where = np.sort(rng.choice(3 * room + 1, room, replace=False)) + offset
    return where.astype(np.uint32), rng.standard_normal(room).astype(np.float32)


class Taken(NamedTuple):
    """Parts whose first ``counts`` entries are to be collected, and where they go. ``broken`` and ``faults`` are of one
    gradient more, which is none of the parts'."""

    parts: list[Collected]
    indices: np.ndarray
    values: np.ndarray
    counts: np.ndarray
    broken: np.ndarray
    ends: np.ndarray
    to_indices: np.ndarray
    to_values: np.ndarray
    faults: np.ndarray

    @classmethod
    def of(
        cls,
        rooms: Sequence[int],
        counts: Sequence[int],
        broken: Sequence[int],
        dtype: str = "float32",
        *,
        masks: bool = False,
        spoilt: Mapping[int, float] | None = None,
    ) -> Taken:
        """``spoilt``: values by place, of every part that has one there."""
        parts, given, start, offset = [], [], 0, 500
        for number, room in enumerate(rooms):
            indices, values = entries(room, offset)
            for place, value in (spoilt or {}).items():
                values[place % room] = value
            given.append((indices, values))
            residual = np.zeros(3 * room + 1, np.float32)
            velocity = np.ones_like(residual) if masks else None
            parts.append(Collected(residual, velocity, start, start + room, offset, len(rooms) - number))
            start, offset = start + room, offset + residual.size
        found = [0 if told else count for count, told in zip(counts, broken, strict=True)]
        ends = 4 + np.cumsum(np.array(found) + broken, dtype=np.int64)
        by_place = np.array([1, *reversed(broken)], np.int64)
        return cls(
            parts,
            np.concatenate([indices for indices, _ in given]),
            np.concatenate([values for _, values in given]),
            np.array(found, np.int64),
            by_place,
            ends,
            np.full(int(ends[-1]) + 9, 77, np.uint32),
            np.full(int(ends[-1]) + 9, 77, dtype),
            np.zeros(len(rooms) + 1, np.int32),
        )

    def collected(self, most: float = math.inf) -> Taken:
        """By the oracle, whose bits the kernels have."""
        expected = copy.deepcopy(self)
        naive.collect(expected.parts, None, *expected[1:], most)
        parts = [Collected(*(tensor_of(x) if isinstance(x, np.ndarray) else x for x in part)) for part in self.parts]
        tensors = [tensor_of(x) for x in self[1:]]
        kernels.collect(parts, kernels.table(parts).to(DEVICE), *tensors, most)
        for x, wanted in zip(tensors, expected[1:], strict=True):
            assert array_of(x).tobytes() == wanted.tobytes()
        for part, of_part in zip(parts, expected.parts, strict=True):
            assert array_of(part.residual).tobytes() == of_part.residual.tobytes()
            assert (part.velocity is None) == (of_part.velocity is None)
            if part.velocity is not None:
                assert array_of(part.velocity).tobytes() == of_part.velocity.tobytes()
        return expected


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("room", [1, 63, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collected_entries(dtype: str, room: int, masks: bool) -> None:
    for count in {0, 1, room // 3, room}:
        for broken in (0, 1):
            spoilt = {room // 2: math.inf}
            found = Taken.of([room], [count], [broken], dtype, masks=masks, spoilt=spoilt).collected()
            counted = 0 if broken else count
            assert found.faults.tolist() == [0, int(counted > room // 2)]
            if masks:
                assert found.parts[0].velocity.sum() == found.parts[0].residual.size - counted


@pytest.mark.parametrize("rooms", [[1, 1], [200, 1, 63, 64, 65, 300], [5] * 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_of_many_parts_in_one_launch(dtype: str, rooms: list[int]) -> None:
    """Each behind those of the parts before, also where one of them is broken or has none."""
    numbers = range(len(rooms))
    counts = [room - number % 3 if room > 2 else room for number, room in zip(numbers, rooms, strict=True)]
    broken = [int(number % 4 == 1) for number in numbers]
    found = Taken.of(rooms, counts, broken, dtype, masks=True, spoilt={0: 1e38}).collected()
    sent = np.sort(found.to_indices[4 : int(found.ends[-1])])
    assert sent.size == found.counts.sum() + sum(broken)
    assert (np.diff(sent.astype(np.int64)) > 0).all()
    assert np.isnan(naive.as_float32(found.to_values)).sum() == sum(broken)
    assert (found.to_indices[:4] == 77).all()
    assert (found.to_indices[int(found.ends[-1]) :] == 77).all()


def test_what_is_beyond_a_wire_goes_back() -> None:
    taken = Taken.of([64, 64], [64, 64], [0, 0], spoilt={3: 1e6, 20: -1e6, 40: math.inf})
    found = taken.collected(65504.0)
    for number, part in enumerate(found.parts):
        own = slice(4 + 64 * number, 4 + 64 * (number + 1))
        assert found.to_values[own][[3, 20, 40]].tolist() == [65504.0, -65504.0, np.inf]
        kept = part.residual[found.indices[part.start : part.stop][[3, 20, 40]] - part.offset]
        assert kept.tolist() == [1e6 - 65504, 65504 - 1e6, 0.0]
        assert np.count_nonzero(part.residual) == 2


def test_what_bfloat16_loses_is_in_the_residual() -> None:
    found = Taken.of([64, 10], [64, 7], [0, 0], "uint16").collected()
    for part, count, end in zip(found.parts, found.counts, found.ends, strict=True):
        own = found.indices[part.start : part.start + count] - part.offset
        sent = naive.as_float32(found.to_values[end - count : end])
        total = sent.astype(np.float64) + part.residual[own]
        np.testing.assert_array_equal(total, found.values[part.start : part.start + count].astype(np.float64))
        assert part.residual.any()


@pytest.mark.parametrize("sizes", [[1], [64, 300], [1, 500, 3, 64, 65]])
def test_faults_are_cleared_where_they_are(sizes: list[int]) -> None:
    for told in itertools.product((0, 1), repeat=len(sizes)):
        parts, offset = [], 0
        for number, size in enumerate(sizes):
            x = vector(size, "float32", 5)
            x[0] = np.nan
            parts.append(Collected(x, None, 0, 0, offset, number))
            offset += size
        faults = np.array(told, np.int32)
        on_device = [part._replace(residual=tensor_of(part.residual)) for part in parts]
        kernels.clear_faults(on_device, kernels.table(on_device).to(DEVICE), tensor_of(faults))
        naive.clear_faults(parts, None, faults)
        for part, one, fault in zip(on_device, parts, told, strict=True):
            assert array_of(part.residual).tobytes() == one.residual.tobytes()
            assert np.isfinite(one.residual).all() == (fault == 1)


def test_few_programs_look_whether_there_was_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    programs: list[int] = []
    monkeypatch.setattr(kernels, "launch", lambda _, number, *__, **___: programs.append(number))
    parts = [Collected(torch.zeros(size), None, 0, 0, 0, 0) for size in (1, 8192, 100_000)]
    kernels.clear_faults(parts, kernels.table(parts), torch.zeros(1, dtype=torch.int32))
    assert programs == [1 + 1 + 13]


@pytest.mark.parametrize("size", [1, 64, 300])
def test_conditional_passes(size: int) -> None:
    x = vector(size, "float32", 5)
    x[0] = np.nan
    for told in (-1, 0, 1):
        (now, before, _) = check("restore", x, np.zeros(size, np.float32), number(told, "int32"))
        assert (now.tobytes() == before.tobytes()) == (told == 1)


def double(value: float) -> np.ndarray:
    return np.array([value])


@pytest.mark.parametrize("wanted", [2.0**-16, 2.0**-17, 1.0 / 3, 5e-324, 1e300, 0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("threshold", [0.0, 0.7, 3e38])
def test_units(wanted: float, threshold: float) -> None:
    unit, told, ratio, held = check("change_unit", double(2.0**-16), double(wanted), double(7.0), double(threshold))
    if 0 < wanted < np.inf:
        assert unit == told
        assert ratio == min(2.0**-16 / wanted, 1e300)
        assert held[0] in (threshold * ratio[0], 0.0)
    else:
        assert (unit[0], ratio[0], held[0]) == (2.0**-16, 1.0, threshold)
    check("change_unit", double(2.0**-16), double(wanted), double(7.0), None)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 0.5, 1.0 / 3, 0.1 / 0.3, 2.0**-140, 1e-300, 2.0**110, 1e300])
def test_rescaling_has_a_residuals_bits(ratio: float) -> None:
    for size in (1, 64, 257):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        x[::5] *= np.float32(1e-41)
        x[0] = 3e38 if ratio < 2.0**-100 else 1
        (found, _) = check("rescale", x, double(ratio))
        entry = Entry("x", x.copy(), unit=ratio, peak=float(np.abs(x).max()))
        entry.rescale(1.0)
        assert found.tobytes() == entry.values.tobytes()


def test_tensors_go_to_triton_and_arrays_are_refused() -> None:
    assert kernels_of(tensor_of(np.zeros(3, np.float32))) is kernels
    with pytest.raises(TypeError, match="x is a numpy array, whose error feedback is a Compressor's"):
        kernels_of(np.zeros(3, np.float32))
