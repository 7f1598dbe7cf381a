"""Whether to compress, and how to merge: every scheme's step is predicted, and the best one is recommended in words.

Pure arithmetic on assumptions that the caller states. What compression does to accuracy is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telegrad.cost.send_method import SendMethod
from telegrad.tools.advise.sending import Cluster, dense, fill_in, gathered, ok_topk, qsgd, sparse
from telegrad.tools.advise.step import NONE, Step, StepGroup, Stragglers, expected, planned
from telegrad.tools.advise.workload import Device, Workload

WORTH = 0.05
"""By how much compression must shorten the step to be recommended: what it does to accuracy costs a check."""
_NEAR = 0.01
_DENSE_FROM = 2 / 3  # δ of SparCML §5.1 with 16-bit indices: 4 bytes of a value over 4 + 2


@dataclass(frozen=True)
class Scheme:
    """``ways``: one or more ways to send a group, of which each group takes the cheapest by bytes. ``line``: of code.
    ``selects``: it sends entries at a density, and not all of them."""

    name: str
    about: str
    ways: Callable[[Cluster, Device, float], list[SendMethod]]
    plan: str
    line: Callable[[float], str]
    compresses: bool = False
    selects: bool = True


def _state(options: str) -> str:
    return f"ddp.register_comm_hook(telegrad.DDPState(comm, ddp, {options}), telegrad.ddp_hook)"


def _synchronizer(options: str) -> str:
    return f"sync = telegrad.Synchronizer(model, comm, {options})  # instead of DDP"


def _dense(cluster: Cluster, device: Device, density: float) -> list[SendMethod]:
    return [dense(cluster)]


SCHEMES = (
    Scheme("ddp", "dense, DDP's buckets of 25 MiB", _dense, "fixed", lambda density: _state("compress=None")),
    Scheme(
        "optimal",
        "dense, merged by the planner",
        _dense,
        "optimal",
        lambda density: "sync = telegrad.Synchronizer(model, comm)  # instead of DDP",
    ),
    Scheme(
        "wfbp",
        "dense, each gradient by itself",
        _dense,
        "wfbp",
        lambda density: 'sync = telegrad.Synchronizer(model, comm, plan="wfbp")  # instead of DDP',
    ),
    Scheme(
        "single",
        "dense, all in one message",
        _dense,
        "single",
        lambda density: 'sync = telegrad.Synchronizer(model, comm, plan="single")  # instead of DDP',
    ),
    Scheme(
        "topk",
        "selected entries, all summed",
        lambda cluster, device, density: [sparse(cluster, device, density)],
        "fixed",
        lambda density: _synchronizer(f'plan="fixed", compress=telegrad.TopK({density:g})'),
        compresses=True,
    ),
    Scheme(
        "allgather",
        "selected entries, gathered",
        lambda cluster, device, density: [gathered(cluster, device, density)],
        "fixed",
        lambda density: _synchronizer(f'plan="fixed", compress=telegrad.TopK({density:g}, combine="allgather")'),
        compresses=True,
    ),
    Scheme(
        "oktopk",
        "selected, and again of the sum",
        lambda cluster, device, density: [ok_topk(cluster, device, density)],
        "fixed",
        lambda density: _synchronizer(f'plan="fixed", compress=telegrad.TopK({density:g}, combine="oktopk")'),
        compresses=True,
    ),
    Scheme(
        "qsgd8",
        "all values, in 8 bits",
        lambda cluster, device, density: [qsgd(cluster, 8)],
        "fixed",
        lambda density: _synchronizer('plan="fixed", compress=telegrad.Quantised("qsgd8")'),
        compresses=True,
        selects=False,
    ),
    Scheme(
        "qsgd4",
        "all values, in 4 bits",
        lambda cluster, device, density: [qsgd(cluster, 4)],
        "fixed",
        lambda density: _synchronizer('plan="fixed", compress=telegrad.Quantised("qsgd4")'),
        compresses=True,
        selects=False,
    ),
)


@dataclass(frozen=True)
class Prediction:
    """A scheme's step. ``samples_per_s``: of all ranks."""

    scheme: Scheme
    groups: tuple[StepGroup, ...]
    step: Step
    samples_per_s: float


@dataclass(frozen=True)
class Advice:
    """``predictions`` by scheme; ``recommended``: one of them. ``verdict``: a sentence that says what to do;
    ``reasons``: why; ``cautions``: what the prediction does not know; ``line``: of code."""

    workload: Workload
    cluster: Cluster
    density: float
    predictions: tuple[Prediction, ...]
    recommended: Prediction
    verdict: str
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def line(self) -> str:
        return self.recommended.scheme.line(self.density)

    def of(self, name: str) -> Prediction:
        """Of the scheme of that name. Raises ``KeyError`` for another one."""
        return {one.scheme.name: one for one in self.predictions}[name]


def advise(
    workload: Workload,
    cluster: Cluster,
    device: Device,
    *,
    density: float = 0.01,
    schemes: Sequence[Scheme] = SCHEMES,
    stragglers: Stragglers = NONE,
) -> Advice:
    """What to do with this workload on this cluster; at least one of ``schemes`` is dense and at least one compresses.

    Compression is recommended if it makes the step shorter by ``WORTH`` or more; of dense schemes DDP's buckets, unless
    another one is more than 1 % ahead. Raises ``ValueError`` for one rank, for a density that is no share, and for
    schemes of one kind only.
    """
    if cluster.ranks < 2:
        raise ValueError("ranks=1 must be 2 or more: one rank alone sends nothing")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} is no share: use a number above 0, up to 1")
    found = tuple(_predicted(scheme, workload, cluster, device, density, stragglers) for scheme in schemes)
    plain = _best([one for one in found if not one.scheme.compresses])
    lossy = [one for one in found if one.scheme.compresses]
    small = _best(lossy)
    fastest = min(lossy, key=lambda one: one.step.step_s)
    compress = plain.step.step_s >= (1 + WORTH) * fastest.step.step_s
    recommended, other = (small, small) if compress else (plain, fastest)
    return Advice(
        workload,
        cluster,
        density,
        found,
        recommended,
        _verdict(plain, other, density, compress=compress),
        tuple(_reasons(workload, cluster, density, found, plain, other)),
        tuple(_cautions(recommended)),
    )


def _predicted(
    scheme: Scheme, workload: Workload, cluster: Cluster, device: Device, density: float, stragglers: Stragglers
) -> Prediction:
    ways = scheme.ways(cluster, device, density)
    plans = [planned(workload.trace, scheme.plan, way) for way in ways]
    steps = [expected(workload.trace, groups, cluster.ranks, stragglers=stragglers) for groups in plans]
    step, groups = min(zip(steps, plans, strict=True), key=lambda pair: pair[0].step_s)
    per_s = cluster.ranks * workload.samples / step.step_s if step.step_s else 0.0
    return Prediction(scheme, tuple(groups), step, per_s)


def _best(predictions: Sequence[Prediction]) -> Prediction:
    """The first of those that are within 1 % of the shortest step."""
    if not predictions:
        raise ValueError("schemes must have one that is dense and one that compresses")
    shortest_s = min(one.step.step_s for one in predictions)
    return next(one for one in predictions if one.step.step_s <= shortest_s * (1 + _NEAR))


def _verdict(plain: Prediction, small: Prediction, density: float, *, compress: bool) -> str:
    times = plain.step.step_s / small.step.step_s
    which = f"{small.scheme.name} at {density:.3g}" if small.scheme.selects else small.scheme.name
    if compress:
        return (
            f"Compress: {which} makes a step {times:.2f} times as fast as the best dense scheme, {plain.scheme.name}."
        )
    if times < 1:
        return f"Do not compress: it would cost you {_percent(1 / times - 1)} ({which})."
    return (
        f"Do not compress: {which} would gain {_percent(times - 1)}, less than the {_percent(WORTH)} that make up for "
        "watching accuracy."
    )


def _reasons(
    workload: Workload,
    cluster: Cluster,
    density: float,
    found: Sequence[Prediction],
    plain: Prediction,
    small: Prediction,
) -> list[str]:
    trace, step = workload.trace, plain.step
    hidden = step.communicate_s - step.exposed_s
    reasons = [
        f"A rank computes {_ms(trace.compute_s)}, of which {_ms(trace.backward_s)} backward, and summing "
        f"{trace.bytes / 1e6:.0f} MB among {cluster.ranks:,} ranks keeps the network busy for "
        f"{_ms(step.communicate_s)}: {_ms(max(0.0, hidden))} of it beside the backward pass, so that the step is "
        f"{_ms(step.exposed_s)} longer ({plain.scheme.name}, scaling efficiency {step.efficiency:.0%})."
    ]
    extra = small.step.select_s + small.step.decompress_s
    reasons.append(
        f"{small.scheme.name} sends for {_ms(small.step.communicate_s)}, but selection holds the backward pass up for "
        f"{_ms(small.step.select_s)} and unpacking takes {_ms(small.step.decompress_s)}"
        + (
            f": at most {_ms(step.exposed_s)} could be saved."
            if step.exposed_s < 2 * extra
            else f"; its step is {_ms(small.step.exposed_s)} longer than the computation."
        )
    )
    filled = fill_in(cluster.ranks, max(1, trace.bytes // 4), density)
    if any(one.scheme.name == "topk" for one in found) and filled > min(2 * density, _DENSE_FROM):
        said = f"The sum of {cluster.ranks:,} ranks' random {density:.3g} has {filled:.0%} of the entries"
        if filled > _DENSE_FROM:
            said += (
                f", more than the {_DENSE_FROM:.0%} from which on it is shorter as it is: sparsity alone then gains at "
                f"most {2 / _DENSE_FROM:.0f}x (SparCML, Lemma 5.2)"
            )
        reasons.append(f"{said}.")
    merged = {one.scheme.name: one.step.step_s for one in found if not one.scheme.compresses}
    if {"ddp", "optimal"} <= merged.keys():
        ahead = merged["ddp"] / merged["optimal"] - 1
        gains = f"gains {_percent(ahead)}" if ahead > 0.001 else "gains nothing"
        reasons.append(f"Where all is sent, merging by the planner instead of DDP's buckets {gains}.")
    return reasons


def _cautions(recommended: Prediction) -> list[str]:
    said = []
    if recommended.scheme.compresses:
        said.append(
            "Compression changes what is trained: what is not sent waits in residuals. Compare accuracy with a dense "
            "run first (docs/results/accuracy.md), and mind momentum (docs/how-to/sgd-momentum.md)."
        )
    said.append(
        "For gradients on GPUs this is what to expect of the network, without copies to the host "
        "(docs/explanation/gpu.md). Nor are the optimiser and reading data counted. Indices are taken for random."
    )
    return said


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
