"""What ``telegrad bench select`` measures, and the rows it makes of the times: without torch, which measuring needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from telegrad.bench.plan import Timing

Row = dict[str, object]

METHODS: Mapping[str, str] = {
    "reused-threshold": "reused",
    "exact": "topk",
    "trimmed": "trimmed",
    "threshold-search": "search",
    "sampled-threshold": "sampled",
    "bucket-topk": "buckets",
    "gaussian": "gaussian",
    "random": "random",
}
"""What is measured, and its name as ``selection=``."""

QUEUED: Mapping[str, str] = {"exact-queued": "topk", "reused-threshold-queued": "reused"}
"""What is measured on a GPU alone, as a training step has it: in the stream behind other kernels, and nobody waits."""

SELECTION_OF: Mapping[str, str] = {**METHODS, **QUEUED}
"""By method, what it is as ``selection=``."""

BOUND = (
    "The bytes that must move (12 of every element: its gradient and residual read, its residual written; 8 of every "
    "selected entry: its index and value), at the bandwidth of the faster of numpy's and torch's copy (on a GPU: "
    "torch's, queued for what is queued) of as many elements, 8 bytes of each, in the same run"
)
"""What ``bound_s`` means in result files."""

PEER = "torch.topk"
"""As a contender: residual += gradient, torch.topk of the magnitudes, gather, clear."""

GPU_COPY = "copy, torch"
QUEUED_PEER, QUEUED_COPY = f"{PEER}, queued", f"{GPU_COPY}, queued"
DEVICES = ("cpu", "cuda")
COPIES = {"cpu": ("copy, numpy", "copy, torch"), "cuda": (GPU_COPY,)}
SETTLING_STEPS = 4
"""Of error feedback, before anything is timed: what is left by then looks like a residual."""
GRADIENTS = 3
"""That take turns, so that a reused threshold meets other entries than those from which it was found."""


def methods_on(device: str) -> tuple[str, ...]:
    """All that can be measured there."""
    return (*METHODS, *QUEUED) if device == "cuda" else tuple(METHODS)


@dataclass(frozen=True)
class SelectPlan:
    """One length and density, on ``device``: ``"cpu"`` or ``"cuda"``. A contender is measured in ``samples`` samples,
    fewer (but three) where all of them together would take longer than about ``seconds``."""

    elements: int
    density: float
    methods: tuple[str, ...] = tuple(METHODS)
    samples: int = 25
    seconds: float = 10.0
    device: str = "cpu"

    @property
    def k(self) -> int:
        """As ResidualStore has it."""
        return max(1, round(self.density * self.elements))

    @property
    def contenders(self) -> tuple[str, ...]:
        """All that is timed: methods, and the peers that these are compared with."""
        peers = [name for method in self.methods for name in _peers_of(method, self.device)]
        return (*dict.fromkeys(peers), *self.methods)


@dataclass
class Outcome:
    """By contender: seconds per call, by method the entries selected in each call, and of what is queued, methods and
    peers, seconds that the host took for each call."""

    times: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    enqueued: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One call of a contender. ``count``: of a method, the entries selected; ``enqueue_s``: how long the host took for
    it, if it is queued."""

    seconds: float
    count: int | None = None
    enqueue_s: float | None = None


def rows_of(plan: SelectPlan, outcome: Outcome) -> list[Row]:
    """A row for each method."""
    rows: list[Row] = []
    for name in plan.methods:
        *copies, peer = _peers_of(name, plan.device)
        copy_s = min(Timing.of(outcome.times[copy]).median_s for copy in copies)
        peer_s = Timing.of(outcome.times[peer]).median_s
        timing, counts = Timing.of(outcome.times[name]), sorted(outcome.counts[name])
        selected = counts[len(counts) // 2]
        bound_s = bound_bytes(plan.elements, selected) * copy_s / (8 * plan.elements)
        rows.append(
            {
                "method": name,
                "name": SELECTION_OF[name],
                "elements": plan.elements,
                "density": plan.density,
                "k": plan.k,
                "selected": selected,
                "median_s": timing.median_s,
                "min_s": timing.min_s,
                "p90_s": timing.p90_s,
                "mean_s": sum(outcome.times[name]) / len(outcome.times[name]),
                "samples": len(outcome.times[name]),
                "enqueue_median_s": _enqueue_median_s(outcome, name),
                "device": plan.device,
                "threads": 1 if plan.device == "cpu" else None,
                "torch_topk_median_s": peer_s,
                "torch_topk_enqueue_median_s": _enqueue_median_s(outcome, peer),
                "times_faster_than_torch_topk": peer_s / timing.median_s,
                "copy_s": copy_s,
                "bound_s": bound_s,
                "of_bound": bound_s / timing.median_s,
            }
        )
    return rows


def bound_bytes(elements: int, selected: int) -> int:
    """The least that must move, see ``BOUND``."""
    return 12 * elements + 8 * selected


def _peers_of(method: str, device: str) -> tuple[str, ...]:
    """Copies, then torch.topk."""
    return (QUEUED_COPY, QUEUED_PEER) if method in QUEUED else (*COPIES[device], PEER)


def _enqueue_median_s(outcome: Outcome, name: str) -> float | None:
    return Timing.of(outcome.enqueued[name]).median_s if name in outcome.enqueued else None
