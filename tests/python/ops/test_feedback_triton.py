"""Error feedback around selections, against its oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from scatter_checks import vector
from triton_arrays import SMALL_BLOCK, OnArrays, tensor_of, turn_blocks_round

from telegrad.compress.entries import Entry
from telegrad.ops.feedback import kernels_of, naive
from telegrad.ops.feedback import triton as kernels

GPU = OnArrays(kernels)
DTYPES = ["float32", "uint16"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter


@pytest.fixture(autouse=True)
def _in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
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


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("room", [1, 63, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collected_entries(dtype: str, room: int, masks: bool) -> None:
    indices, values = entries(room, 500)
    values[room // 2] = np.inf
    residual = np.zeros(3 * room + 1, np.float32)
    velocity = np.ones_like(residual) if masks else None
    for count in {0, 1, room // 3, room}:
        for broken in (0, 1):
            counted = 0 if broken else count
            to = np.full(room + 9, 77, np.uint32), np.full(room + 9, 77, dtype)
            found = check(
                *("collect", indices, values, number(counted), number(broken), number(counted + broken + 4)),
                *(residual, velocity, *to, number(0, "int32"), 500),
            )
            fault = found[-1]
            assert fault[0] == (counted > room // 2)
            if masks:
                assert found[6].sum() == velocity.size - counted


def test_what_is_beyond_a_wire_goes_back() -> None:
    indices, values = entries(64, 0)
    values[[3, 20, 40]] = 1e6, -1e6, np.inf
    left = check(
        *("collect", indices, values, number(64), number(0), number(64)),
        *(
            np.zeros(193, np.float32),
            None,
            np.zeros(64, np.uint32),
            np.zeros(64, np.float32),
            number(0, "int32"),
            0,
            65504.0,
        ),
    )
    sent, kept = left[7], left[5]
    assert sent[[3, 20, 40]].tolist() == [65504.0, -65504.0, np.inf]
    assert kept[indices[[3, 20, 40]]].tolist() == [1e6 - 65504, 65504 - 1e6, 0.0]
    assert np.count_nonzero(kept) == 2


def test_what_bfloat16_loses_is_in_the_residual() -> None:
    indices, values = entries(64, 0)
    residual, to = np.zeros(193, np.float32), np.zeros(64, np.uint16)
    left = check(
        *("collect", indices, values, number(64), number(0), number(64)),
        *(residual, None, np.zeros(64, np.uint32), to, number(0, "int32"), 0),
    )
    sent, kept = naive.as_float32(left[7]), left[5][indices]
    np.testing.assert_array_equal(sent.astype(np.float64) + kept, values.astype(np.float64))
    assert kept.any()


@pytest.mark.parametrize("size", [1, 64, 300])
def test_conditional_passes(size: int) -> None:
    x = vector(size, "float32", 5)
    x[0] = np.nan
    for told in (0, 1):
        (cleared, _) = check("clear_faults", x, number(told, "int32"))
        assert np.isfinite(cleared).all() == (told == 1)
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
