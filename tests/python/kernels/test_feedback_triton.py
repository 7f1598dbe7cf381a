"""Error feedback around selections, against its oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import feedback_reference
import numpy as np
import pytest
from scatter_checks import vector
from triton_arrays import DEVICE, SMALL_BLOCK, array_of, tensor_of, torch, turn_blocks_round

from telegrad.compress.residual import Entry
from telegrad.kernels.feedback import Collected, Kept, Moved, Remade, kernels_of
from telegrad.kernels.feedback import triton as kernels

DTYPES = ["float32", "uint16"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter


@pytest.fixture(autouse=True)
def _in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(kernels, "_CLEARED", 2 * SMALL_BLOCK)
    monkeypatch.setattr(kernels, "_BLOCKS", 2)
    turn_blocks_round(monkeypatch)


class Velocities(NamedTuple):
    """Of gradients that lie behind one another, from ``offset`` on, each with the place of another."""

    parts: list[Moved]
    gradient: np.ndarray
    out: np.ndarray
    active: np.ndarray
    faults: np.ndarray

    @classmethod
    def of(cls, velocities: Sequence[np.ndarray], gradient: np.ndarray, out: str, offset: int = 0) -> Velocities:
        begins = offset + np.cumsum([0, *(one.size for one in velocities)])
        places = range(len(velocities))[::-1]
        parts = [Moved(one, int(begin), place) for one, begin, place in zip(velocities, begins, places, strict=False)]
        room, faults = np.zeros(gradient.size, out), np.zeros(len(parts), np.int32)
        return cls(parts, gradient, room, np.ones(len(parts), np.int64), faults)

    def moved(self, *, nesterov: bool) -> Velocities:
        """By the oracle, whose bits the kernel has."""
        expected = copy.deepcopy(self)
        feedback_reference.accumulate_velocities(expected.parts, None, *expected[1:3], 0.9, *expected[3:], nesterov)
        parts = [part._replace(velocity=tensor_of(part.velocity)) for part in self.parts]
        gradient, out, active, faults = map(tensor_of, self[1:])
        table = kernels.velocity_table(parts).to(DEVICE)
        kernels.accumulate_velocities(parts, table, gradient, out, 0.9, active, faults, nesterov)
        for part, one in zip(parts, expected.parts, strict=True):
            assert array_of(part.velocity).tobytes() == one.velocity.tobytes()
        assert array_of(out).tobytes() == expected.out.tobytes()
        assert array_of(faults).tolist() == expected.faults.tolist()
        return expected


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_velocities(dtype: str, out: str, nesterov: bool) -> None:
    """Of one parameter and of several in one launch, at whole vectors and beside them; some take no part."""
    for sizes, offset in (([1], 0), ([64], 0), ([257], 3), ([1, 64, 300, 128, 5], 16)):
        gradient = vector(offset + sum(sizes) + 2, dtype, 1)
        gradient = np.where(np.isfinite(feedback_reference.as_float32(gradient)), gradient, gradient.dtype.type(0))
        velocities = [np.random.default_rng(size).standard_normal(size).astype(np.float32) for size in sizes]
        given = Velocities.of(velocities, gradient, out, offset)
        given.active[::2] = 0
        for _ in range(2):
            found = given.moved(nesterov=nesterov)
            for part, before in zip(found.parts, velocities, strict=True):
                assert (part.velocity.tobytes() == before.tobytes()) == (given.active[part.place] == 0)
            given.active[:] = 1 - given.active


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_velocity_that_overflows_becomes_zero(nesterov: bool) -> None:
    velocities = [np.ones(2, np.float32), np.array([1, 3e38, -3e38], np.float32)]
    gradient = np.array([1, 2, 1, 3e38, 1], np.float32)
    found = Velocities.of(velocities, gradient, "float32").moved(nesterov=nesterov)
    assert found.parts[1].velocity[1] == 0
    assert found.out[3] == np.inf
    assert np.isfinite(found.out[[0, 1, 2, 4]]).all()
    assert found.faults.tolist() == [1, 0]


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
        feedback_reference.collect(expected.parts, None, *expected[1:], most)
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
    assert np.isnan(feedback_reference.as_float32(found.to_values)).sum() == sum(broken)
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
        sent = feedback_reference.as_float32(found.to_values[end - count : end])
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
        feedback_reference.clear_faults(parts, None, faults)
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


@pytest.mark.parametrize("sizes", [[1], [64, 300, 5]])
def test_what_was_before_is_again(sizes: list[int]) -> None:
    for told in (-1, 0, 1):
        parts = [
            Kept(vector(size, "float32", 5), np.full(size, number + 7, np.float32)) for number, size in enumerate(sizes)
        ]
        there = [Kept(tensor_of(part.values), tensor_of(part.before)) for part in parts]
        wanted = np.array([told], np.int32)
        kernels.restore(there, kernels.kept_table(there).to(DEVICE), tensor_of(wanted))
        feedback_reference.restore(parts, None, wanted)
        for number, (one, part) in enumerate(zip(there, parts, strict=True)):
            assert array_of(one.values).tobytes() == part.values.tobytes()
            assert bool((part.values == number + 7).all()) == (told == 1)


def on_device(parts: Sequence[Remade]) -> list[Remade]:
    return [Remade(*(None if one is None else tensor_of(one) for one in part)) for part in parts]


@pytest.mark.parametrize("wanted", [2.0**-16, 2.0**-17, 1.0 / 3, 5e-324, 1e300, 0.0, -1.0, np.inf, np.nan])
def test_units(wanted: float) -> None:
    units, thresholds = [2.0**-16, 2.0**-16, 2.0**-16, 0.5, 1e200], [0.0, 0.7, 3e38, None, 1e-9]
    parts = [
        Remade(np.zeros(3, np.float32), np.array([unit]), None if held is None else np.array([held]))
        for unit, held in zip(units, thresholds, strict=True)
    ]
    told, ratios = np.array([wanted]), np.full(5, 7.0)
    there, found = on_device(parts), tensor_of(ratios)
    kernels.change_units(there, kernels.unit_table(there).to(DEVICE), tensor_of(told), found)
    feedback_reference.change_units(parts, None, told, ratios)
    assert array_of(found).tobytes() == ratios.tobytes()
    for one, part in zip(there, parts, strict=True):
        assert array_of(one.unit).tobytes() == part.unit.tobytes()
        if part.threshold is not None:
            assert array_of(one.threshold).tobytes() == part.threshold.tobytes()
    if 0 < wanted < np.inf:
        assert ratios.tolist() == [min(unit / wanted, 1e300) for unit in units]
        assert all(part.unit[0] == wanted for part in parts)
    else:
        assert ratios.tolist() == [1.0] * 5
        assert [float(part.unit[0]) for part in parts] == units


def test_rescaling_has_a_residuals_bits() -> None:
    ratios = [1.0, 2.0, 0.5, 1.0 / 3, 0.1 / 0.3, 2.0**-140, 1e-300, 2.0**110, 1e300]
    for size in (1, 64, 257):
        parts = []
        for number, ratio in enumerate(ratios):
            x = np.random.default_rng(number).standard_normal(size + number).astype(np.float32)
            x[::5] *= np.float32(1e-41)
            x[0] = 3e38 if ratio < 2.0**-100 else 1
            parts.append(Remade(x, np.ones(1), None))
        there = on_device(parts)
        kernels.rescale(there, kernels.unit_table(there).to(DEVICE), tensor_of(np.array(ratios)))
        for one, part, ratio in zip(there, parts, ratios, strict=True):
            entry = Entry("x", part.values.copy(), unit=ratio, peak=float(np.abs(part.values).max()))
            entry.rescale(1.0)
            assert array_of(one.values).tobytes() == entry.values.tobytes()
        feedback_reference.rescale(parts, None, np.array(ratios))
        for one, part in zip(there, parts, strict=True):
            assert array_of(one.values).tobytes() == part.values.tobytes()


def test_tensors_go_to_triton_and_arrays_are_refused() -> None:
    assert kernels_of(tensor_of(np.zeros(3, np.float32))) is kernels
    with pytest.raises(TypeError, match="x is a numpy array, whose error feedback is a Compressor's"):
        kernels_of(np.zeros(3, np.float32))
