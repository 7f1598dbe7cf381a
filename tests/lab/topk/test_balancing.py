"""What Ok-Topk's balancing spares: reductions of even and of cut slices, shares made alike before they are gathered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from topk_recordings import recording

from lab.topk.balancing import balancing_rows
from lab.topk.plots import grids_of
from lab.topk.processes import simulate_all
from lab.topk.recording import Recorder, Recording
from lab.topk.simulated import SimulatedPlan
from lab.topk.tables import balancing_table, reduction_s
from lab.topk.weak_scaling import Model
from telegrad.cost import Costs
from telegrad.tools.sim.measure import Network

_BYTES_COST = Network(Costs(alpha_s=1e-9, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10), "messages cost little")
_MODEL = Model("small", 40_000, 0.02, 1, 1e6)


def _clustered() -> Recording:
    """Nearly all that is large lies in the last tenth, at the same indices on all ranks."""
    random = np.random.default_rng(0)
    common = random.standard_t(3, 4000) * np.where(np.arange(4000) >= 3600, 100.0, 1.0)
    recorder = Recorder("lstm", 5, {"a": 4000}, 8)
    for row in range(8):
        recorder.take(row, (common + 0.1 * random.standard_t(3, 4000)).astype(np.float32))
    return recorder.recording()


def test_cut_slices_spare_words_and_time_where_entries_cluster() -> None:
    even, averaged, pooled = balancing_rows(8, _clustered(), _BYTES_COST, model=_MODEL, blocks=1)
    assert [row["slices"] for row in (even, averaged, pooled)] == ["even", "averaged", "pooled"]
    assert even["cut_s"] == 0.0
    assert even["words_max"] > 2 * pooled["words_max"]
    assert even["reduce_s"] > averaged["reduce_s"] >= 0.9 * pooled["reduce_s"]
    assert reduction_s(pooled) > pooled["reduce_s"]
    assert even["kept"] == averaged["kept"] == pooled["kept"] > 0
    assert even["triggered"]
    assert not pooled["triggered"]
    assert even["gather_s"] > even["balanced_gather_s"] > 0


def test_rows_tables_and_panels_of_a_simulation_with_balancing() -> None:
    plan = SimulatedPlan((2,), 0.02, 1, ("oktopk",), ())
    found = simulate_all(plan, (), recording(), Path("none"), processes=1, balanced_ranks=(2, 4))
    assert [(row["ranks"], row["slices"]) for row in found.balancing] == [
        (ranks, slices) for ranks in (2, 4) for slices in ("even", "averaged", "pooled")
    ]
    assert balancing_table(found.balancing).row_count == 6
    assert list(grids_of({"balancing": found.balancing})) == [
        "split and reduce (virtual time)",
        "gathering the sum (virtual time)",
    ]
