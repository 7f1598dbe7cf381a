"""The kernels are compiled for GPUs of two makers, which need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="GPU kernels work on torch tensors")
pytest.importorskip("triton", reason="GPU kernels are compiled, or interpreted, by Triton")

PROGRAM = Path(__file__).with_name("compile_kernels_program.py")


def _compiled(*target: str, cache: pytest.Cache) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *target],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"TRITON_CACHE_DIR": str(cache.mkdir("triton"))},  # by source, options and version
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["left_out"] == [] or len(target) > 3
    return found["rows"]  # type: ignore[no-any-return]


@pytest.mark.slow  # more than a minute; the passes before the last one are those that HIP's go through
@pytest.mark.timeout(600)
def test_all_for_cuda(cache: pytest.Cache) -> None:
    for row in _compiled("cuda", "90", "32", cache=cache):
        if row["kernel"] == "follow_reuse":
            continue  # it has a logarithm and an exponential of doubles, which are exact to the last bits or two
        assert [row["flushes_denormals"], row["fuses"], row["approximates"]] == [False] * 3, row["kernel"]


@pytest.mark.timeout(600)
def test_the_fused_pass_for_cuda(cache: pytest.Cache) -> None:
    rows = _compiled("cuda", "90", "32", "fused_pass", "fused_pass_of_many", cache=cache)
    assert [row["kernel"] for row in rows] == ["fused_pass"] * 3 + ["fused_pass_of_many"]
    for row in rows:
        assert [row["flushes_denormals"], row["fuses"], row["approximates"]] == [False] * 3
        assert row["orders_atomics"] == 0
        # 512 entries by 32 threads, four at once: each loads 4 vectors of the residual, 4 of the gradient, no more.
        # Where a launch is for many residuals, no less either.
        assert row["vector_loads"] <= 8
        assert row["vector_stores"] <= 4
    assert (rows[-1]["vector_loads"], rows[-1]["vector_stores"]) == (8, 4)


@pytest.mark.timeout(600)
def test_all_for_hip(cache: pytest.Cache) -> None:
    for row in _compiled("hip", "gfx942", "64", cache=cache):
        assert row["bytes"] > 1000, row["kernel"]
        # Nothing is read that they would order, but for what all programs have counted, by the last one.
        assert (row["orders_atomics"] > 0) == row["kernel"].startswith("count_digits"), row["kernel"]
        assert not row["flushes_denormals"] or row["kernel"] == "follow_reuse", row["kernel"]
