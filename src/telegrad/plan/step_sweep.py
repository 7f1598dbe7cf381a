"""Steps of one workload among more and more ranks, by scheme, plan and collective: a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from telegrad.plan.cluster import Cluster
from telegrad.plan.device import Device
from telegrad.plan.sending import way_of
from telegrad.plan.step import NONE, Step, Stragglers, expected
from telegrad.plan.step_plans import planned
from telegrad.plan.workload import Workload

Row = dict[str, Any]

COMPRESSED = "–"  # the collective of schemes that have their own


@dataclass(frozen=True)
class StepSweep:
    """What is asked. ``global_samples``: of all ranks together (strong scaling); ``None``: each rank has the
    workload's own. ``collectives`` are those of dense sums; other schemes have one of their own."""

    workload: Workload
    cluster_of: Callable[[int], Cluster]
    device: Device
    ranks: Sequence[int]
    schemes: Sequence[str] = ("dense",)
    plans: Sequence[str] = ("fixed",)
    collectives: Sequence[str] = ("telegrad",)
    density: float = 0.01
    global_samples: float | None = None
    overlap: bool = True
    stragglers: Stragglers = NONE

    def rows(self) -> Iterator[Row]:
        """By ranks, scheme, collective and plan. ``speedup``: of samples a second over one rank with the whole global
        mini-batch, or, in weak scaling, with its own. Raises ``ValueError`` for what does not exist."""
        alone = self.workload if self.global_samples is None else self.workload.of(self.global_samples)
        per_s_alone = alone.samples / alone.trace.compute_s if alone.trace.compute_s else 0.0
        for count in self.ranks:
            here = self.workload if self.global_samples is None else self.workload.of(self.global_samples / count)
            cluster = self.cluster_of(count)
            for scheme in self.schemes:
                for collective in self.collectives if scheme == "dense" else (COMPRESSED,):
                    yield from self._rows(here, cluster, scheme, collective, per_s_alone)

    def _rows(
        self, here: Workload, cluster: Cluster, scheme: str, collective: str, per_s_alone: float
    ) -> Iterator[Row]:
        named = "telegrad" if collective == COMPRESSED else collective
        way = way_of(scheme, cluster, self.device, density=self.density, collective=named)
        for plan in self.plans:
            groups = planned(here.trace, plan, way)
            step = expected(here.trace, groups, cluster.ranks, overlap=self.overlap, stragglers=self.stragglers)
            per_s = cluster.ranks * here.samples / step.step_s if step.step_s else 0.0
            yield {
                "model": here.model,
                "ranks": cluster.ranks,
                "samples": here.samples,
                "scheme": scheme,
                "collective": collective,
                "plan": plan,
                "overlap": self.overlap,
                **times_of(step, cluster.ranks),
                "samples_per_s": per_s,
                "speedup": per_s / per_s_alone if per_s_alone else 1.0,
            }


def times_of(step: Step, ranks: int) -> Row:
    """A step's figures for a row; ``speedup``: samples a second of all ranks over those of one alone."""
    return {
        "groups": len(step.groups),
        "compute_s": step.compute_s,
        "step_s": step.step_s,
        "exposed_s": step.exposed_s,
        "select_s": step.select_s,
        "communicate_s": step.communicate_s,
        "decompress_s": step.decompress_s,
        "efficiency": step.efficiency,
        "speedup": ranks * step.efficiency,
    }
