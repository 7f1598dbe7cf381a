"""Vectors that a GPU encodes have the core's bytes; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton_arrays import OnArrays, turn_blocks_round

from telegrad import Communicator, _core
from telegrad.communicator.operands import WIRES
from telegrad.kernels.staging import triton as kernels

GPU = OnArrays(kernels)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, in the interpreter

SIZES = (1, 3, 255, 257, 512, 1023, 1025, 2300)
KINDS = ("ordinary", "tiny", "huge", "zero", "constant", "two", "ties", "spoilt", "mixed", "rounded")


@pytest.fixture(autouse=True)
def _turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_blocks_round(monkeypatch)


def values_of(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size).astype(np.float32)
    if kind == "tiny":
        return x * np.float32(1e-41)  # denormal: their scale has no finite reciprocal
    if kind == "huge":
        return np.clip(x.astype(np.float64) * 1e38, -3.4e38, 3.4e38).astype(np.float32)
    if kind == "zero":
        return np.where(rng.random(size) < 0.5, np.float32(0), np.float32(-0.0))
    if kind == "constant":
        return np.full(size, -1.5, np.float32)
    if kind == "two":  # a codebook of which two bins are empty
        return np.where(rng.random(size) < 0.1, np.float32(3), np.float32(-0.25))
    if kind == "ties":  # halfway between powers of two, and beside that
        halves = 1.5 * 2.0 ** rng.integers(-9, 0, size)
        x = np.nextafter(halves.astype(np.float32), rng.choice([0, 1, 2], size) * halves.astype(np.float32))
        return np.where(np.arange(size) % 300 == 0, np.float32(-1), x).astype(np.float32)
    if kind == "spoilt":  # a bucket or two of them
        x[size // 2 : size // 2 + 1] = np.nan
        x[-1:] = -np.inf
    if kind == "mixed":
        with np.errstate(over="ignore", under="ignore"):
            x = (x * 10.0 ** rng.integers(-44, 38, size)).astype(np.float32)
        x[np.isinf(x)] = 3e38
    if kind == "rounded":  # ties, what is too large and too small for 16 bits, and any bits but those of NaN
        halfway = (rng.integers(0x0, 0x7F80, size) << 16 | 0x8000).astype(np.uint32)
        tied = (rng.integers(0x38000, 0x47800, size) << 12 | 0x1000).astype(np.uint32)
        small = (rng.integers(0, 2**11, size) * 2.0**-25).astype(np.float32).view(np.uint32)
        sign = rng.integers(0, 2, size).astype(np.uint32) << 31
        odd = np.array([65504, 65519.99, 65520, 3.4e38, 6e-8, 2.9e-8, 1e-40], np.float32).view(np.uint32)
        bits = np.choose(rng.integers(0, 4, size), (halfway, tied, small, rng.choice(odd, size))) | sign
        return bits.astype(np.uint32).view(np.float32)
    return x


class HostEncoder:
    """The core's encoding of a host's vector: rank 0 of two sends it, and rank 1 receives the bytes as they are."""

    def __init__(self) -> None:
        self.comms = Communicator.local(2, timeout_s=60.0)
        self._word = np.zeros(1, np.uint32)

    def __call__(
        self, x: np.ndarray, wire: str, seed: int, error: np.ndarray | None = None, call: int = 0
    ) -> np.ndarray:
        encoding, core = getattr(_core.ValueEncoding, wire), self.comms[1]._usable()
        out = np.full(core.encoded_layout(x.size, encoding)[0], 0x5A, np.uint8)
        self._word[0] += 1
        gate = _core.Gate(0, self._word.ctypes.data, int(self._word[0]), 0, 0)
        self.comms[0]._encoded_calls = call
        work = self.comms[0].all_reduce(
            x, out=np.empty_like(x), wire=wire, error=error, seed=seed if error is None else 0, async_op=True
        )
        sent = np.zeros_like(out)
        how = (x.size, _core.Reduction.sum, encoding, seed, call, gate)
        core.all_reduce_encoded(sent.ctypes.data, 0, out.ctypes.data, 0, *how).wait()
        work.wait()
        return out


@pytest.fixture(scope="module")
def on_host() -> Iterator[HostEncoder]:
    encoder = HostEncoder()
    yield encoder
    for comm in encoder.comms:
        comm.close()


def check(on_host: HostEncoder, wire: str, x: np.ndarray, seed: int = 0, call: int = 0, loses: bool = False) -> None:
    """Bytes, errors, and what the bytes decode to."""
    lost = np.full_like(x, 7) if loses else None
    expected = on_host(x, wire, seed, lost, call)
    out, error = np.full_like(expected, 0xA5), np.full_like(x, 7) if loses else None
    GPU.encode(x, out, error, wire, seed, 0, call)
    assert out.tobytes() == expected.tobytes()
    if lost is None:
        return
    assert error is not None
    assert error.tobytes() == lost.tobytes()
    got = np.full_like(x, 7)
    GPU.decode(expected, None, got, None, wire, 1.0)
    finite = np.isfinite(got)
    assert (x[finite] - got[finite]).tobytes() == lost[finite].tobytes()
    assert not lost[~finite].any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wire", WIRES)
def test_sizes(on_host: HostEncoder, wire: str, size: int) -> None:
    check(on_host, wire, values_of("ordinary", size), loses=size % 2 == 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", WIRES)
def test_kinds_of_values(on_host: HostEncoder, wire: str, kind: str) -> None:
    check(on_host, wire, values_of(kind, 1100), loses=True)
    if wire.startswith("qsgd"):
        check(on_host, wire, values_of(kind, 1100), seed=3)


@pytest.mark.parametrize("wire", ["qsgd8", "qsgd4", "qsgd2"])
def test_draws_are_the_cores(on_host: HostEncoder, wire: str) -> None:
    for seed, call in ((2**64 - 3, 2**32 - 1), (2**31, 2**31), (12345, 6)):
        check(on_host, wire, values_of("ordinary", 70), seed, call)


@pytest.mark.parametrize("wire", WIRES)
def test_two_are_added(on_host: HostEncoder, wire: str) -> None:
    """Two encoded vectors are decoded and added as on the host. No infinities cancel here: their NaN would differ."""
    x, y = values_of("mixed", 1500), values_of("ordinary", 1500)
    encoded, mine = on_host(x, wire, 0, np.empty_like(x)), on_host(y, wire, 0, np.empty_like(y))
    decoded = [np.empty_like(x), np.empty_like(x)]
    for one, into in zip((encoded, mine), decoded, strict=True):
        GPU.decode(one, None, into, None, wire, 1.0)
    for factor in (1.0, 0.5):
        got = np.empty_like(x)
        GPU.decode(encoded, mine, got, None, wire, factor)
        with np.errstate(over="ignore"):
            assert got.tobytes() == ((decoded[1] + decoded[0]) * np.float32(factor)).tobytes()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_of_what_failed_sums_and_errors_are_nan(on_host: HostEncoder, wire: str, both: bool) -> None:
    x = values_of("ordinary", 2500)
    error = np.full_like(x, 3)
    sound = on_host(x, wire, 0, np.empty_like(x))
    GPU.decode(sound, sound if both else None, x, error, wire, 1.0)
    assert (error == 3).all()
    GPU.decode(np.full_like(sound, 0xFF), sound if both else None, x, error, wire, 1.0)
    assert np.isnan(x).all()
    assert np.isnan(error).all()


def test_nothing_is_no_launch() -> None:
    empty: Any = np.empty(0, np.float32)
    GPU.encode(empty, np.empty(0, np.uint8), None, "qsgd4", 0, 0, 0)
    GPU.decode(np.empty(0, np.uint8), None, empty, None, "qsgd4", 1.0)
