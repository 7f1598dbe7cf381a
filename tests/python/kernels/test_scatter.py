"""The core's scattering against its oracle, bit for bit, and streams that are checked before they are added."""

from __future__ import annotations

import numpy as np
import pytest
import scatter_checks as checks

from telegrad.kernels.scatter import add_streams, cpu, kernels_of, naive


@pytest.mark.parametrize("base", [0, 1000])
@pytest.mark.parametrize("index_type", [np.uint32, np.int64], ids=["u32", "i64"])
@pytest.mark.parametrize("count", checks.SIZES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_as_the_oracle(name: str, dtype: str, count: int, index_type: type, base: int) -> None:
    checks.check(cpu, name, dtype, count, index_type, base)


@pytest.mark.parametrize("held", checks.HELD)
@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_some_of_the_entries_count(name: str, held: int | None) -> None:
    checks.check(cpu, name, "float32", 130, np.uint32, 0, held)
    checks.check(cpu, name, "uint16", 130, np.int64, 7, held)


def test_faults() -> None:
    checks.check_faults(cpu)


def test_arrays_of_the_cpu_go_to_the_core() -> None:
    assert kernels_of(np.zeros(1, np.float32)) is cpu


def test_streams_are_added_in_their_order() -> None:
    dense, expected = np.zeros(50, np.float16), np.zeros(50, np.float16)
    rng = np.random.default_rng(0)
    streams = []
    for count in (20, 0, 50, 31):
        indices = np.sort(rng.choice(50, count, replace=False)).astype(np.uint32)
        streams.append((indices, rng.standard_normal(count).astype(np.float16)))
    add_streams(dense, streams)
    for indices, values in streams:
        naive.scatter_add(expected, indices, values)
    assert dense.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([1, 2], [1], r"stream 1 has 2 indices but 1 values: give one value for each index"),
        ([1, 1], [1, 2], r"stream 1 has 1 indices that are not above the one before, or not in 0 to 3: .* nothing was"),
        ([4], [1], r"stream 1 has 1 indices that are not above .* is damaged, or belongs to another vector"),
    ],
)
def test_damaged_streams_change_nothing(indices: list[int], values: list[int], message: str) -> None:
    dense = np.zeros(4, np.float32)
    good = (np.array([0, 3], np.uint32), np.ones(2, np.float32))
    with pytest.raises(ValueError, match=message):
        add_streams(dense, [good, (np.array(indices, np.uint32), np.array(values, np.float32))])
    assert not dense.any()
