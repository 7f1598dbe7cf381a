"""Every kernel at every SIMD level that this processor has, and no zeros in new tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from telegrad import _core


@pytest.fixture(autouse=True)
def _new_memory_is_garbage() -> Iterator[None]:
    if "torch" not in sys.modules:
        yield
        return
    from new_tensors import garbage_in_new_tensors

    with garbage_in_new_tensors():
        yield


@pytest.fixture(
    params=range(_core.best_simd_level() + 1), ids=lambda level: ("portable", "avx2", "avx512", "avx512_vbmi2")[level]
)
def simd_level(request: pytest.FixtureRequest) -> Iterator[int]:
    _core.force_simd_level(request.param)
    yield request.param
    _core.force_simd_level(_core.best_simd_level())
