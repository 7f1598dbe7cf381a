"""Every kernel at every SIMD level that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad import _core


@pytest.fixture(
    params=range(_core.best_simd_level() + 1), ids=lambda level: ("portable", "avx2", "avx512", "avx512_vbmi2")[level]
)
def simd_level(request: pytest.FixtureRequest) -> Iterator[int]:
    _core.force_simd_level(request.param)
    yield request.param
    _core.force_simd_level(_core.best_simd_level())
