"""Workloads and sweeps of steps: weak and strong scaling, and that thousands of ranks take seconds."""

from __future__ import annotations

import math

import pytest

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import SCHEMES, Cluster
from telegrad.tools.advise.step import PLANS, StepSweep
from telegrad.tools.advise.workload import DEVICES, Workload, of_model, scaled
from telegrad.tools.sim.measure import network_of

V100 = DEVICES["v100"]


def cluster_of(ranks: int) -> Cluster:
    return Cluster(ranks, network_of("10gbit").costs)


def test_a_workload_of_a_model() -> None:
    found = of_model("resnet50", V100)
    assert found.samples == 32
    assert found.trace.compute_s == pytest.approx(0.1000, rel=0.01)
    assert of_model("resnet50", V100, fixed_s=0.01).trace.compute_s == pytest.approx(found.trace.compute_s + 0.01)
    assert of_model("resnet50", V100, compute_s=0.25).trace.compute_s == pytest.approx(0.25)


def test_smaller_mini_batches_keep_the_fixed_part() -> None:
    work = of_model("vgg16", V100, samples=32, compute_s=0.4, fixed_s=0.08)
    half = work.of(16)
    assert half.samples == 16
    assert half.trace.compute_s == pytest.approx(0.08 + 0.16)
    assert half.trace.forward_s == pytest.approx(half.trace.compute_s / 3)
    assert half.trace.sizes == work.trace.sizes
    assert work.of(32) == work
    empty = Workload("none", Trace((), (), (), 0.0), 4)
    assert empty.of(2).samples == 2


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_mini_batches_are_above_0(bad: float) -> None:
    trace = Trace(("a",), (4,), (1.0,), 1.0)
    with pytest.raises(ValueError, match="samples="):
        Workload("x", trace, bad)
    with pytest.raises(ValueError, match="samples="):
        Workload("x", trace, 4).of(bad)
    with pytest.raises(ValueError, match="samples="):
        of_model("vgg16", V100, samples=bad)


def test_what_makes_no_sense_is_refused() -> None:
    trace = Trace(("a",), (4,), (1.0,), 1.0)
    for fixed_s in (-1.0, 2.1, math.nan):
        with pytest.raises(ValueError, match="fixed_s=.* must be from 0 to 2, which the whole step takes"):
            Workload("x", trace, 4, fixed_s)
    for factor in (-1.0, math.inf):
        with pytest.raises(ValueError, match="factor="):
            scaled(trace, factor)
    assert scaled(trace, 0.5) == Trace(("a",), (4,), (0.5,), 0.5)


def test_weak_scaling_to_4096_ranks_of_all_schemes() -> None:
    work = of_model("resnet50", V100)
    sweep = StepSweep(work, cluster_of, V100, [2, 64, 4096], SCHEMES, PLANS)
    rows = list(sweep.rows())
    assert len(rows) == 3 * len(SCHEMES) * len(PLANS)
    for row in rows:
        assert row["samples"] == 32
        assert row["step_s"] >= row["compute_s"]
        assert row["samples_per_s"] == pytest.approx(32 * row["ranks"] / row["step_s"])
        assert row["speedup"] == pytest.approx(row["ranks"] * row["efficiency"])


def test_strong_scaling_shares_the_mini_batch_out() -> None:
    work = of_model("resnet50", V100, fixed_s=0.004)
    rows = list(StepSweep(work, cluster_of, V100, [1, 8, 64, 256], global_samples=256).rows())
    assert [row["samples"] for row in rows] == [256, 32, 4, 1]
    assert rows[0]["speedup"] == pytest.approx(1)
    assert [row["compute_s"] for row in rows] == sorted((row["compute_s"] for row in rows), reverse=True)
    for row in rows[1:]:
        assert row["speedup"] < row["ranks"]
    fixed_only = rows[3]["compute_s"] - 0.004
    assert fixed_only == pytest.approx((rows[0]["compute_s"] - 0.004) / 256)


def test_without_overlap_no_row_is_faster() -> None:
    work = of_model("vit-b16", V100)
    on, off = (
        list(StepSweep(work, cluster_of, V100, [16], SCHEMES, ("fixed", "wfbp"), overlap=one).rows())
        for one in (True, False)
    )
    for one, other in zip(on, off, strict=True):
        assert other["step_s"] >= one["step_s"] * (1 - 1e-12)
