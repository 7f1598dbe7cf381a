"""Whether to compress, and how to merge: a whole job is predicted for every scheme, and the best one is recommended.

A job has dense first steps where its optimizer needs them, and passes that only accumulate gradients. All of it is
arithmetic on assumptions that the caller states. The loss of accuracy is the one that a study found for small models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telegrad.cost.send_method import GroupCost, LinearCost, SendMethod
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import (
    Cluster,
    dense,
    fill_in,
    gathered,
    inside_nodes,
    low_rank,
    ok_topk,
    qsgd,
    sparse,
)
from telegrad.tools.advise.step import Step, StepGroup, planned, simulate
from telegrad.tools.advise.workload import ELEMENT_BYTES, Device, Workload

# A recipe says how many first steps are dense, the density, and who applies the momentum. Its accuracy comes from the
# study in docs/results/accuracy.md. That study trained small models, so a figure of it is no promise for a large one.

FAMILIES = ("vision", "language")


@dataclass(frozen=True)
class Recipe:
    """``density``: the one that the study judges for this optimizer. ``dense_share``: of all steps, the first ones.
    ``momentum``: of an SGD whose momentum telegrad applies, 0 for none. ``title``: as torch names the optimizer."""

    optimizer: str
    title: str
    density: float
    dense_share: float = 0.0
    momentum: float = 0.0

    def dense_steps(self, steps: int) -> int:
        """The first steps of a job of so many that send all values. Raises ``ValueError`` for a job of none."""
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1: the optimizer steps of the whole job")
        return math.floor(steps * self.dense_share + 1e-9)  # a tenth of 30 is 3, and not 2.9999999999999996

    def share_of(self, steps: int | None) -> float:
        """Which share of the steps is dense; ``None``: the job is long. Raises ``ValueError`` as ``dense_steps``."""
        return self.dense_share if steps is None else self.dense_steps(steps) / steps

    def options(self, steps: int | None) -> str:
        """Arguments for DDPState that go with ``compress=``. Without ``steps`` they name ``total_steps``."""
        said = []
        if self.dense_share:
            count = f"total_steps // {round(1 / self.dense_share)}" if steps is None else str(self.dense_steps(steps))
            said.append(f"warmup=telegrad.Warmup(steps={count})")
        if self.momentum:
            said += [f"momentum=telegrad.Momentum({self.momentum:g})", "optimizer=optimizer"]
        return ", ".join(said)


RECIPES = {
    one.optimizer: one
    for one in (
        Recipe("adamw", "AdamW", 0.01, dense_share=0.1),
        Recipe("adam", "Adam", 0.01, dense_share=0.1),
        Recipe("sgd", "SGD", 0.01),
        Recipe("sgd-momentum", "SGD with momentum", 0.001, dense_share=0.1, momentum=0.9),
    )
}
"""By the optimizer's name. See docs/how-to/adamw.md and docs/how-to/sgd-momentum.md."""


def recipe_of(optimizer: str) -> Recipe:
    """Raises ``ValueError`` for a name that is none of ``RECIPES``."""
    if optimizer not in RECIPES:
        raise ValueError(f"optimizer={optimizer!r} is not known: use one of {', '.join(RECIPES)}")
    return RECIPES[optimizer]


ACCURACY_SOURCE = "benchmarks/results/2026-11-23-accuracy.json"
"""4 ranks, 3,000 steps, models of 77 to 167 thousand parameters: docs/results/accuracy.md."""
LOW_RANK_SOURCE = "benchmarks/results/2026-11-29-adamw-frontier.json"
"""4 ranks, 220 steps, no dense first ones, a GPT of 5.3 million parameters: docs/results/adamw.md."""
SLOW_SOURCE = "benchmarks/results/2026-11-29-short-jobs-noise.json"
"""2 ranks, 120 steps, a CNN of 2.7 million parameters that learns slowly: docs/results/rivals.md."""
LONG_LOW_RANK_SOURCE = "benchmarks/results/2026-11-28-accuracy-lowrank.json"
"""As ``ACCURACY_SOURCE``, with matrices of rank 4."""
_PAGES = {LOW_RANK_SOURCE: "adamw.md", SLOW_SOURCE: "rivals.md"}


@dataclass(frozen=True)
class AccuracyRow:
    """``loss``: by how much a compressed run ends behind dense training, percent of the loss, or ``points`` of
    top-1 accuracy; below 0 it ends ahead. ``method``: the study's name of what is compressed and how;
    ``density``: of entries, ``None`` where none are selected; ``steps``: of its training; ``source``: its rows."""

    task: str
    family: str
    optimizer: str
    scheme: str
    method: str
    density: float | None
    loss: float
    seeds: int
    steps: int = 3000
    source: str = ACCURACY_SOURCE
    points: bool = False

    @property
    def text(self) -> str:
        """``loss +1.4 %``, ``top-1 -0.15 points``."""
        return f"top-1 {-self.loss:+.2f} points" if self.points else f"loss {self.loss:+.1f} %"

    def text_at(self, density: float) -> str:
        """``text``, and the row's density if it is another one than this."""
        return self.text if self.density in (density, None) else f"{self.text} at {self.density:g}"

    @property
    def page(self) -> str:
        """That shows it."""
        return f"docs/results/{_PAGES.get(self.source, 'accuracy.md')}"

    @property
    def about(self) -> str:
        """On what it was measured."""
        seeds = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        how = self.method if self.density is None else f"density {self.density:g}"
        return f"{self.task}, {recipe_of(self.optimizer).title}, {how}, {seeds}, {self.steps:,} steps"


ACCURACY = tuple(
    AccuracyRow(task, family, optimizer, scheme, method, density, loss, seeds, points=family == "vision")
    for task, family, optimizer, scheme, method, density, loss, seeds in (
        ("vgg", "vision", "sgd", "topk", "reused", 0.01, -0.71, 1),
        ("vgg", "vision", "sgd", "topk", "reused", 0.001, 0.06, 3),
        ("vgg", "vision", "sgd", "allgather", "topka", 0.001, 0.09, 1),
        ("vgg", "vision", "sgd", "oktopk", "oktopk", 0.001, -0.05, 1),
        ("resnet", "vision", "sgd", "topk", "reused", 0.01, -0.52, 1),
        ("resnet", "vision", "sgd", "topk", "reused", 0.001, -0.09, 3),
        ("resnet", "vision", "sgd", "allgather", "topka", 0.001, -0.01, 1),
        ("resnet", "vision", "sgd", "oktopk", "oktopk", 0.001, 1.47, 1),
        ("vgg-momentum", "vision", "sgd-momentum", "topk", "momentum", 0.01, 0.38, 1),
        ("vgg-momentum", "vision", "sgd-momentum", "topk", "momentum", 0.001, 0.15, 3),
        ("lstm", "language", "sgd", "topk", "reused", 0.01, 0.5, 3),
        ("lstm", "language", "sgd", "topk", "reused", 0.001, 7.2, 1),
        ("lstm", "language", "sgd", "allgather", "topka", 0.01, 0.9, 1),
        ("lstm", "language", "sgd", "oktopk", "oktopk", 0.01, 3.3, 1),
        ("gpt", "language", "adamw", "topk", "reused", 0.01, 1.4, 3),
        ("gpt", "language", "adamw", "topk", "reused", 0.001, 4.5, 1),
        ("gpt", "language", "adamw", "allgather", "topka", 0.01, 1.3, 1),
        ("gpt", "language", "adamw", "oktopk", "oktopk", 0.01, 3.3, 1),
    )
)
"""Rounded as the page rounds them; a test compares them with the rows of ``ACCURACY_SOURCE``."""

LOW_RANK_ACCURACY = (
    AccuracyRow("demo", "language", "adamw", "lowrank", "rank 16", None, 0.6, 3, 220, LOW_RANK_SOURCE),
    AccuracyRow("cnn", "vision", "adamw", "lowrank", "rank 16, a tenth dense", None, 10.3, 1, 120, SLOW_SOURCE),
    *(
        AccuracyRow(task, family, optimizer, "lowrank", "rank 4", None, loss, 1, 3000, LONG_LOW_RANK_SOURCE, points)
        for task, family, optimizer, loss, points in (
            ("vgg", "vision", "sgd", -0.31, True),
            ("resnet", "vision", "sgd", -0.14, True),
            ("vgg-momentum", "vision", "sgd-momentum", 0.35, True),
            ("lstm", "language", "sgd", -0.1, False),
        )
    ),
)
"""Factors travelled in 8 bits."""

_AS = {"adam": "adamw"}
_SUMMED_AS = {"allgather": ("allgather", "topk")}  # both sum all entries of all ranks


def expected_loss(
    scheme: str, optimizer: str, family: str | None, density: float, steps: int | None = None
) -> AccuracyRow | None:
    """The row of the study that is nearest to this: the same scheme and optimizer (Adam counts as AdamW, gathered
    entries as summed ones), then the same family, if it is known, then the nearest density, of several the worst.
    ``None``: the study has no such run, or a job of so many ``steps`` is less than a third as long as the study's."""
    found = _nearest(scheme, _AS.get(optimizer, optimizer), family, density)
    return None if found is None or (steps is not None and 3 * steps < found.steps) else found


def _nearest(scheme: str, trained: str, family: str | None, density: float) -> AccuracyRow | None:
    schemes = _SUMMED_AS.get(scheme, (scheme,))
    found = [one for one in (*ACCURACY, *LOW_RANK_ACCURACY) if one.scheme in schemes and one.optimizer == trained]
    found = [one for one in found if one.family == family] or found
    if not found:
        return None
    apart = [round(abs(math.log(density / (one.density or density))), 9) for one in found]
    return max((one for one, far in zip(found, apart, strict=True) if far == min(apart)), key=lambda one: one.loss)


WORTH = 0.05
"""By how much compression must shorten the job to be recommended: what it does to accuracy costs a check. Schemes that
are closer together than this are ordered by accuracy."""
_NEAR = 0.01
_DENSE_FROM = 2 / 3  # δ of SparCML §5.1 with 16-bit indices: 4 bytes of a value over 4 + 2


@dataclass(frozen=True)
class Scheme:
    """``ways``: one or more ways to send a group, of which each group takes the cheapest by bytes. ``line``: of code,
    for a density and the recipe's options. ``selects``: it sends entries at a density, and not all of them.
    ``needs_rows``: of the trace; ``needs_gloo``: measured costs of torch's Gloo. Without them it is left out."""

    name: str
    about: str
    ways: Callable[[Cluster, Device, float, Trace], list[SendMethod]]
    plan: str
    line: Callable[[float, str], str]
    compresses: bool = False
    selects: bool = False
    needs_rows: bool = False
    needs_gloo: bool = False


def _state(*options: str) -> str:
    given = ", ".join(one for one in options if one)
    return f"ddp.register_comm_hook(telegrad.DDPState(comm, ddp, {given}), telegrad.ddp_hook)"


def _synchronizer(options: str) -> str:
    return f"sync = telegrad.Synchronizer(model, comm, {options})  # instead of DDP"


def _by_gloo(cluster: Cluster, measured: LinearCost) -> GroupCost:
    return lambda size: measured(size * cluster.value_bytes // ELEMENT_BYTES)


def _dense(cluster: Cluster, device: Device, density: float, trace: Trace) -> list[SendMethod]:
    return [dense(cluster)]


LOW_RANK = 16
"""The default of ``LowRank``."""
_SHORT = 1000
"""In a job of fewer steps a slow learner with Adam loses much of its loss to low rank without dense first steps."""


def _merged(plan: str, about: str) -> Scheme:
    given = "" if plan == "optimal" else f', plan="{plan}"'
    line = f"sync = telegrad.Synchronizer(model, comm{given})  # instead of DDP"
    return Scheme(plan, f"dense, {about}", _dense, plan, lambda density, options: line)


def _selecting(name: str, about: str, way: Callable[[Cluster, Device, float], SendMethod], given: str = "") -> Scheme:
    def line(density: float, options: str) -> str:
        return _state(f"compress=telegrad.TopK(density={density:g}{given})", options)

    return Scheme(name, about, lambda *of: [way(*of[:3])], "fixed", line, compresses=True, selects=True)


def _quantised(bits: int) -> Scheme:
    line = _synchronizer(f'plan="fixed", compress=telegrad.Quantised("qsgd{bits}")')
    about, plan = f"all values, in {bits} bits", "fixed"
    return Scheme(f"qsgd{bits}", about, lambda *of: [qsgd(of[0], bits)], plan, lambda *_: line, compresses=True)


_DDP = Scheme(
    "ddp", "dense, DDP's buckets of 25 MiB", _dense, "fixed", lambda density, options: _state("compress=None")
)
SCHEMES = (
    Scheme(
        "gloo",
        "dense, DDP over Gloo, as it is",
        lambda cluster, *of: [] if cluster.gloo is None else [SendMethod("gloo", _by_gloo(cluster, cluster.gloo))],
        "fixed",
        lambda density, options: "ddp = torch.nn.parallel.DistributedDataParallel(model)",
        needs_gloo=True,
    ),
    _DDP,
    _merged("optimal", "merged by the planner"),
    _merged("wfbp", "each gradient by itself"),
    _merged("single", "all in one message"),
    _selecting("topk", "selected entries, all summed", sparse),
    _selecting("allgather", "selected entries, gathered", gathered, ', combine="allgather"'),
    _selecting("oktopk", "selected, and again of the sum", ok_topk, ', combine="oktopk"'),
    Scheme(
        "lowrank",
        f"matrices of rank {LOW_RANK}, 8 bits",
        lambda cluster, device, density, trace: [low_rank(cluster, device, trace, LOW_RANK)],
        "fixed",
        lambda density, options: _state(f"compress=telegrad.LowRank(rank={LOW_RANK})", options),
        compresses=True,
        needs_rows=True,
    ),
    Scheme(
        "topk-node",
        "as topk, of averages of nodes",
        lambda cluster, *of: (
            [inside_nodes(cluster, lambda owners: sparse(owners, *of[:2]))] if cluster.has_levels else []
        ),
        "fixed",
        lambda density, options: _state(f"compress=telegrad.TopK(density={density:g})", 'node="auto"', options),
        compresses=True,
        selects=True,
    ),
    _quantised(8),
    _quantised(4),
)


@dataclass(frozen=True)
class Prediction:
    """A scheme's job. ``step``: with this scheme, the pass whose gradients are exchanged. ``alone_s``: of the passes
    before it and the optimizer. ``mean_s``: of an optimizer step, over the whole job with its dense first steps.
    ``samples_per_s``: of all ranks, over the whole job. ``dense_share``: of its steps, the first ones. ``accuracy``:
    what the study found nearest to it."""

    scheme: Scheme
    groups: tuple[StepGroup, ...]
    step: Step
    alone_s: float
    mean_s: float
    samples_per_s: float
    dense_share: float = 0.0
    accuracy: AccuracyRow | None = None

    @property
    def step_s(self) -> float:
        """Of an optimizer step after the dense ones."""
        return self.alone_s + self.step.step_s

    @property
    def efficiency(self) -> float:
        """Samples a second over the whole job, as a share of those without communication."""
        compute_s = self.alone_s + self.step.compute_s
        return compute_s / self.mean_s if self.mean_s > 0 else 1.0


@dataclass(frozen=True)
class Advice:
    """``predictions`` by scheme; ``recommended``: one of them, ``plain``: the best dense one. ``verdict``: a sentence
    that says what to do; ``reasons``: why; ``cautions``: what the prediction does not know; ``line``: of code.
    ``steps``: of the job, ``None`` if it is long."""

    workload: Workload
    cluster: Cluster
    recipe: Recipe
    steps: int | None
    density: float
    predictions: tuple[Prediction, ...]
    recommended: Prediction
    plain: Prediction
    verdict: str
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """Of the whole job as it is recommended, beside the best dense scheme."""
        return _ratio(self.plain.mean_s, self.recommended.mean_s)

    @property
    def line(self) -> str:
        return self.line_of(self.recommended)

    def line_of(self, prediction: Prediction) -> str:
        """Of code, with the options that its recipe needs."""
        with_recipe = prediction.scheme.selects or prediction.dense_share
        options = self.recipe.options(self.steps) if with_recipe else ""
        return prediction.scheme.line(self.density, options)

    def of(self, name: str) -> Prediction:
        """Of the scheme of that name. Raises ``KeyError`` for another one."""
        return {one.scheme.name: one for one in self.predictions}[name]


def advise(
    workload: Workload,
    cluster: Cluster,
    device: Device,
    *,
    optimizer: str = "adamw",
    steps: int | None = None,
    density: float | None = None,
    schemes: Sequence[Scheme] = SCHEMES,
) -> Advice:
    """What to do with a job of this workload on this cluster; at least one of ``schemes`` is dense.

    ``optimizer``: whose recipe is followed, a name in ``RECIPES``. ``steps``: optimizer steps of the job; ``None``: so
    many that a tenth of them is a tenth. ``density``: ``None`` for the recipe's.

    Compression is recommended if it makes the job shorter by ``WORTH`` or more, with a scheme whose accuracy was
    measured if there is one. Of dense schemes DDP's buckets are, unless another one is more than 1 % ahead. Raises
    ``ValueError`` for one rank, an unknown optimizer, no step, a density outside (0, 1], and no dense scheme.
    """
    recipe = recipe_of(optimizer)
    chosen = recipe.density if density is None else density
    if cluster.ranks < 2:
        raise ValueError("ranks=1 must be 2 or more: one rank alone sends nothing")
    if not 0 < chosen <= 1:
        raise ValueError(f"density={chosen} is no share: use a number above 0, up to 1")
    if all(one.compresses for one in schemes):
        raise ValueError("schemes must have one that is dense")
    job = _Job(workload, cluster, device, recipe, steps, chosen)
    found = tuple(job.prediction(one) for one in schemes if job.knows(one))
    plain = _best([one for one in found if not one.scheme.compresses], _NEAR)
    lossy = [one for one in found if one.scheme.compresses] or [plain]
    worth = [one for one in lossy if _ratio(plain.mean_s, one.mean_s) >= 1 + WORTH]
    known = [one for one in worth if one.accuracy is not None]
    small = _best(known or worth or lossy, WORTH)
    fastest = min(lossy, key=lambda one: one.mean_s)
    compress = _ratio(plain.mean_s, fastest.mean_s) >= 1 + WORTH
    recommended, other = (small, small) if compress else (plain, fastest)
    return Advice(
        workload,
        cluster,
        recipe,
        steps,
        chosen,
        found,
        recommended,
        plain,
        _verdict(plain, other, chosen, compress=compress, gloo=found[0] if found[0].scheme.needs_gloo else None),
        (*(_gains(job, plain, small, fastest) if compress else ()), *_reasons(job, found, plain, other)),
        tuple(_cautions(recommended, recipe)),
    )


@dataclass(frozen=True)
class _Job:
    workload: Workload
    cluster: Cluster
    device: Device
    recipe: Recipe
    steps: int | None
    density: float

    def knows(self, scheme: Scheme) -> bool:
        """What the scheme needs."""
        has_rows, trace = bool(self.workload.trace.rows), self.workload.trace
        fits = self.cluster.value_bytes == ELEMENT_BYTES or scheme.selects or not scheme.compresses  # no encoding
        return fits and (has_rows or not scheme.needs_rows) and bool(scheme.ways(self.cluster, self.device, 1.0, trace))

    def dense_share(self, scheme: Scheme) -> float:
        """Of the steps. Matrices of low rank need dense ones with Adam in a short job only."""
        recipe = self.recipe
        short = self.steps is not None and self.steps < _SHORT and not recipe.momentum
        return recipe.share_of(self.steps) if scheme.selects or (scheme.needs_rows and short) else 0.0

    def prediction(self, scheme: Scheme) -> Prediction:
        workload, cluster = self.workload, self.cluster
        step, groups = self.exchanged(scheme)
        alone_s = (workload.accumulate - 1) * (step.forward_s + step.backward_s) + workload.trace.rest_s
        mean_s = step.step_s
        accuracy = expected_loss(
            scheme.name.removesuffix("-node"), self.recipe.optimizer, workload.family, self.density, self.steps
        )
        share = self.dense_share(scheme)
        if share:  # DDPState sends its dense steps in DDP's buckets
            dense_s = self.exchanged(_DDP)[0].step_s
            mean_s = share * dense_s + (1 - share) * step.step_s
        mean_s += alone_s
        per_s = _ratio(cluster.ranks * workload.samples * workload.accumulate, mean_s)
        return Prediction(scheme, tuple(groups), step, alone_s, mean_s, per_s, share, accuracy)

    def exchanged(self, scheme: Scheme) -> tuple[Step, list[StepGroup]]:
        """The pass whose gradients are exchanged."""
        trace = self.workload.trace
        plans = [
            planned(trace, scheme.plan, way) for way in scheme.ways(self.cluster, self.device, self.density, trace)
        ]
        steps = [simulate(trace, groups) for groups in plans]
        return min(zip(steps, plans, strict=True), key=lambda pair: pair[0].step_s)


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 0.0


def _best(predictions: Sequence[Prediction], near: float) -> Prediction:
    """The first of those whose jobs are that near to the shortest."""
    shortest_s = min(one.mean_s for one in predictions)
    return next(one for one in predictions if one.mean_s <= shortest_s * (1 + near))


def _verdict(plain: Prediction, small: Prediction, density: float, *, compress: bool, gloo: Prediction | None) -> str:
    if small is plain:
        return "Do not compress: no scheme takes these gradients."
    times = _ratio(plain.mean_s, small.mean_s)
    which = _named(small, density)
    if compress:
        beside = f"{times:.2f} times as fast as the best dense scheme, {plain.scheme.name}"
        if gloo is not None and gloo is not plain:
            beside = f"{_ratio(gloo.mean_s, small.mean_s):.2f} times as fast as DDP over Gloo, and {beside}"
        return f"Compress: {which} makes the whole job {beside}."
    if 0 < times < 1:
        return f"Do not compress: it would cost you {_percent(1 / times - 1)} ({which})."
    return (
        f"Do not compress: {which} would gain {_percent(max(0.0, times - 1))}, less than the {_percent(WORTH)} that "
        "make up for watching accuracy."
    )


def _named(one: Prediction, density: float) -> str:
    return f"{one.scheme.name} at {density:.3g}" if one.scheme.selects else one.scheme.name


def _gains(job: _Job, plain: Prediction, small: Prediction, fastest: Prediction) -> list[str]:
    """What the recommended compression brings and costs."""
    said = [_expected_accuracy(job, small)]
    if small.dense_share:
        count = "a tenth" if job.steps is None else f"{job.recipe.dense_steps(job.steps):,} of {job.steps:,}"
        said.append(
            f"A compressed step alone is {_ratio(plain.step_s, small.step_s):.2f} times as fast. But {count} of the "
            f"steps must be dense, the first ones, for {job.recipe.title}. So nothing makes the job more than "
            f"{1 / small.dense_share:.3g} times as fast."
        )
    if small.accuracy is not None and fastest.mean_s * (1 + WORTH) < small.mean_s:
        said.append(
            f"{_named(fastest, job.density)} would be {_ratio(plain.mean_s, fastest.mean_s):.2f} times as fast. "
            + (
                "But no accuracy was measured with it."
                if fastest.accuracy is None
                else f"It costs more accuracy: {fastest.accuracy.text} ({fastest.accuracy.about})."
            )
        )
    return said


def _reasons(job: _Job, found: Sequence[Prediction], plain: Prediction, small: Prediction) -> list[str]:
    cluster, density = job.cluster, job.density
    trace, step = job.workload.trace, plain.step
    reasons = []
    if job.workload.accumulate > 1:
        reasons.append(
            f"An optimizer step has {job.workload.accumulate:,} passes of {_ms(trace.compute_s)}. Only the last one "
            "exchanges gradients, and only its backward pass hides some of the exchange."
        )
    hidden = step.communicate_s - step.exposed_s
    reasons.append(
        f"A rank computes {_ms(trace.compute_s)}, of which {_ms(trace.backward_s)} backward, and summing "
        f"{trace.bytes / 1e6:.0f} MB among {cluster.ranks:,} ranks keeps the network busy for "
        f"{_ms(step.communicate_s)}: {_ms(max(0.0, hidden))} of it beside the backward pass, so that the step is "
        f"{_ms(step.exposed_s)} longer ({plain.scheme.name}, scaling efficiency {plain.efficiency:.0%})."
    )
    extra = small.step.select_s + small.step.decompress_s
    if small is not plain:
        reasons.append(
            f"{small.scheme.name} sends for {_ms(small.step.communicate_s)}, but selection holds the backward pass up "
            f"for {_ms(small.step.select_s)} and unpacking takes {_ms(small.step.decompress_s)}"
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
    merged = {one.scheme.name: one.mean_s for one in found if not one.scheme.compresses}
    if {"ddp", "optimal"} <= merged.keys():
        ahead = merged["ddp"] / merged["optimal"] - 1
        gains = f"gains {_percent(ahead)}" if ahead > 0.001 else "gains nothing"
        reasons.append(f"If all values are sent, merging by the planner instead of DDP's buckets {gains}.")
    return reasons


def _expected_accuracy(job: _Job, small: Prediction) -> str:
    """Of a compressed job, beside the dense one."""
    row = small.accuracy
    if row is None:
        return (
            f"Expected accuracy: unknown. The study has no run of {small.scheme.name} with {job.recipe.title} "
            "of at most three times as many steps: compare with a dense run (docs/results/accuracy.md)."
        )
    return (
        f"Expected accuracy beside dense training: {row.text} ({row.about}). The study's models are small: compare "
        f"with a dense run of your own ({row.page})."
    )


def _cautions(recommended: Prediction, recipe: Recipe) -> list[str]:
    said = []
    if recommended.scheme.compresses:
        clips = "give clip_norm=" if recommended.scheme.selects else "call clip_grad_norm_ before step(), as with DDP"
        said.append(
            "Compression changes the training: unsent gradients wait in residuals. Compare accuracy with a dense "
            f"run first (docs/results/accuracy.md). If you clip, {clips} (docs/how-to/clipping.md)."
        )
        if recommended.scheme.needs_rows and recipe.dense_share and not (recipe.momentum or recommended.dense_share):
            said.append(f"In a job of less than {_SHORT:,} steps send all values in the first tenth: give --steps.")
        elif recommended.scheme.selects and recipe.optimizer.startswith("sgd"):
            said.append("Who applies the momentum matters (docs/how-to/sgd-momentum.md).")
    said.append(
        "For gradients on GPUs this is what to expect of the network, without copies to the host "
        "(docs/explanation/gpu.md). Reading data is not counted, nor is the optimizer unless a trace has it. Indices "
        "are taken for random."
    )
    return said


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
