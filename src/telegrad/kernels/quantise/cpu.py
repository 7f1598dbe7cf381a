"""Encodings of values with the core's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.kernels.quantise import Draw, Quantisation

Floats = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]

_DTYPES = {"float16": _core.DType.f16, "uint16": _core.DType.bf16}


def quantise(
    how: Quantisation, draw: Draw, first: int, values: Floats, out: Octets, error: Floats | None = None
) -> None:
    _core.quantise(
        *(how.bits, how.bucket, how.stochastic, draw.seed, draw.call, draw.rank, first),
        *(_address(values), values.size, _address(out), _address(error)),
    )


def dequantise(how: Quantisation, encoded: Octets, values: Floats) -> int:
    how_ = (how.bits, how.bucket, how.stochastic)
    return not _core.dequantise(*how_, _address(encoded), encoded.size, _address(values), values.size)


def narrow(values: Floats, out: npt.NDArray[Any], error: Floats | None = None) -> None:
    _core.narrow(_DTYPES[out.dtype.name], _address(values), values.size, _address(out), _address(error))


def widen(encoded: npt.NDArray[Any], values: Floats) -> None:
    _core.widen(_DTYPES[encoded.dtype.name], _address(encoded), values.size, _address(values))


def mean_of_one_sign(values: Floats, out: Floats, error: Floats | None = None) -> bool:
    return _core.mean_of_one_sign(_address(values), values.size, _address(out), _address(error))


def fill_mean(encoded: Floats, values: Floats) -> int:
    return not _core.fill_mean(_address(encoded), encoded.nbytes, _address(values), values.size)


def _address(x: npt.NDArray[Any] | None) -> int:
    return 0 if x is None else int(x.__array_interface__["data"][0])
