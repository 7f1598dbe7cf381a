"""Why Ok-Topk loses with AdamW: variants of its sum and of its residuals, on the small GPT of the accuracy study.

One process plays four ranks. Each variant is defined here in full, on all parameters of more than 2,048 elements; the
others are averaged. A tenth of the steps, the first ones, are dense, as in the study.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from lab.accuracy import runs
from lab.accuracy.problems import open_problem
from lab.adamw import positive_numbers
from lab.common.commands import TextFolder
from lab.common.growing_result import GrowingResult
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import RowsFile, among
from telegrad.tools.cli.outputs import check_all_writable, counting, table_console
from telegrad.tools.demo.job import Corpus

RANKS, SMALL_ELEMENTS = 4, 2048
TASK = runs.TASKS["gpt"]


@dataclass(frozen=True)
class Variant:
    """``keeps``: of the sum of the ranks' entries: ``"all"`` (a plain sum), ``"largest"`` (Ok-Topk), the same of each
    ``"tensor"``, or ``"whole"``: at the places of ``"tensor"``, what all ranks hold there, chosen by them or not;
    ``"whole-model"``: at those of ``"largest"``.

    ``in_steps``: residuals hold gradients times the learning rate of their step. ``decay``: of residuals in each step.
    ``power``: entries are compared after a division by this power of the mean square of the averages. ``smooth``:
    the optimizer gets this share of what has come later. ``weight``: the sum's entries are compared after a division by
    this power of the root mean square of their tensor's averages. ``spread``: counts of tensors go with this power of
    their size. ``second_moments``: of AdamW: ``"sent"``: as it forms them
    of averages; ``"frozen"`` after the dense steps; ``"local"``: of the mean square of the ranks' own gradients.
    ``momentum``: in place of AdamW's, each rank sends entries of its own, which forgets what was sent (DGC).
    ``at_once``: a rank selects from all tensors together.
    Everything is sent in the ``first`` share of the steps, and later in one of ``every`` so many.
    """

    about: str
    keeps: str = "largest"
    density: float = 0.01
    in_steps: bool = False
    decay: float = 1.0
    power: float = 0.0
    smooth: float = 0.0
    second_moments: str = "sent"
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    at_once: bool = False
    first: float = 0.1
    every: int = 0
    weight: float = 0.0
    spread: float = 1.0

    def is_dense(self, step: int, steps: int) -> bool:
        """Whether everything is sent in ``step`` of ``steps``, what waits in the residuals too."""
        return step < round(self.first * steps) or (self.every > 0 and step % self.every == 0)


DENSE = "dense"
VARIANTS: Mapping[str, Variant] = {
    DENSE: Variant("plain averages"),
    "topk": Variant("the sum keeps every entry", "all"),
    "oktopk": Variant("Ok-Topk"),
    "oktopk-2": Variant("Ok-Topk at 2 %", density=0.02),
    "oktopk-4": Variant("Ok-Topk at 4 %", density=0.04),
    "tensor": Variant("its largest entries of each tensor", "tensor"),
    "whole": Variant("its largest entries of each tensor, there what all ranks hold", "whole"),
    "steps": Variant("residuals of steps", in_steps=True),
    "whole-steps": Variant("both", "whole", in_steps=True),
    "local": Variant("second moments of the ranks' own gradients", second_moments="local"),
    "local-steps": Variant("the same, residuals of steps", "tensor", in_steps=True, second_moments="local"),
    "frozen-steps": Variant("second moments of the dense steps, too", "tensor", in_steps=True, second_moments="frozen"),
    "decay-95": Variant("residuals times 0.95 a step", decay=0.95),
    "decay-99": Variant("residuals times 0.99 a step", decay=0.99),
    "quarter": Variant("entries compared by v^(1/4)", power=0.25),
    "curved": Variant("entries compared by v^(-1/4)", power=-0.25),
    "smooth": Variant("the optimizer gets a tenth of the sums at a time", smooth=0.9),
    "momentum": Variant("each rank's own momentum is sent (DGC)", momentum=0.9, betas=(0.0, 0.999)),
    "beta1-50": Variant("AdamW with beta1 = 0.5", betas=(0.5, 0.999)),
    "dense-50": Variant("plain averages, beta1 = 0.5", first=1.0, betas=(0.5, 0.999)),
    "dense-0": Variant("plain averages, beta1 = 0", first=1.0, betas=(0.0, 0.999)),
    "topk-50": Variant("the sum keeps every entry, beta1 = 0.5", "all", betas=(0.5, 0.999)),
    "topk-50-cold": Variant("the same without dense first steps", "all", first=0.0, betas=(0.5, 0.999)),
    "topk-0": Variant("the sum keeps every entry, beta1 = 0", "all", betas=(0.0, 0.999)),
    "steps-50": Variant("residuals of steps, beta1 = 0.5", in_steps=True, betas=(0.5, 0.999)),
    "steps-50-cold": Variant("the same without dense first steps", in_steps=True, first=0.0, betas=(0.5, 0.999)),
    "whole-steps-50": Variant(
        "its largest of each tensor, there what all ranks hold, too", "whole", in_steps=True, betas=(0.5, 0.999)
    ),
    "whole-model-steps-50": Variant(
        "the same, its largest of all tensors together", "whole-model", in_steps=True, betas=(0.5, 0.999)
    ),
    "whole-steps-50-cold": Variant(
        "the same without dense first steps", "whole", in_steps=True, first=0.0, betas=(0.5, 0.999)
    ),
    "tensor-steps-50": Variant("its largest entries of each tensor, too", "tensor", in_steps=True, betas=(0.5, 0.999)),
    "gain-steps-50": Variant("sums compared by v^(1/4) of their tensor", weight=0.5, in_steps=True, betas=(0.5, 0.999)),
    "unit-steps-50": Variant("the same, by v^(1/2)", weight=1.0, in_steps=True, betas=(0.5, 0.999)),
    "at-once-steps-50": Variant("a rank selects from all, too", at_once=True, in_steps=True, betas=(0.5, 0.999)),
    "at-once-tensor-50": Variant(
        "the same, its largest of each tensor", "tensor", at_once=True, in_steps=True, betas=(0.5, 0.999)
    ),
    "spread-steps-50": Variant("counts by the root of the size", spread=0.5, in_steps=True, betas=(0.5, 0.999)),
    "spread-tensor-50": Variant(
        "the same, its largest of each tensor", "tensor", spread=0.5, in_steps=True, betas=(0.5, 0.999)
    ),
    "decay-999-tensor-50": Variant(
        "its largest of each tensor, residuals times 0.999", "tensor", decay=0.999, in_steps=True, betas=(0.5, 0.999)
    ),
    "decay-99-tensor-50": Variant("the same, times 0.99", "tensor", decay=0.99, in_steps=True, betas=(0.5, 0.999)),
    "steps-0": Variant("residuals of steps, beta1 = 0", in_steps=True, betas=(0.0, 0.999)),
    "beta2-95": Variant("AdamW with beta2 = 0.95", betas=(0.9, 0.95)),
    "at-once": Variant("a rank selects from all tensors together", at_once=True),
    "decay-99-steps": Variant("residuals of steps, times 0.99 a step", in_steps=True, decay=0.99),
    "spread-steps": Variant("residuals of steps, dense steps spread", in_steps=True, first=0.02, every=12),
    "flush-steps": Variant("residuals of steps, one of 10 later steps dense, too", in_steps=True, every=10),
}

_MEMORY = 0.95  # of the mean square of averages


class Exchange:
    """The ranks' residuals. ``sizes``: of the tensors, one after another in every vector."""

    def __init__(self, sizes: Sequence[int], variant: Variant) -> None:
        self._sizes, self._variant = list(sizes), variant
        powers = [size**variant.spread for size in sizes]
        share = variant.density * sum(sizes) / sum(powers)
        self._counts = [max(1, round(share * one)) for one in powers]
        self.residuals = torch.zeros(RANKS, sum(sizes))
        self._momenta = torch.zeros(RANKS, sum(sizes))
        self._squares, self._late = torch.zeros(2, sum(sizes))
        self.kept = self.calls = 0

    def average(self, gradients: Tensor, rate: float) -> Tensor:
        """Averages for the optimizer to step with. ``gradients``: a row for each rank. ``rate``: the learning rate."""
        one = self._variant
        if one.momentum:
            self._momenta = one.momentum * self._momenta + (1 - one.momentum) * gradients
            gradients = self._momenta
        unit = self._unit(rate)
        self.residuals *= one.decay
        self.residuals += gradients * unit
        select = self._largest_of_all if one.at_once else self._largest
        chosen = torch.stack([select(self._compared(own)) for own in self.residuals])
        total = (self.residuals * chosen).sum(0)
        keeps = self._keeps(total)
        sent = chosen & keeps
        if one.keeps in ("whole", "whole-model"):
            total, sent = self.residuals.sum(0), keeps.expand_as(chosen)
        made: Tensor = total * keeps / (RANKS * unit)
        self.residuals[sent] = 0
        self._momenta[sent] = 0
        self.kept, self.calls = self.kept + int(keeps.sum()), self.calls + 1
        self._observe(made)
        if one.smooth:
            self._late += made
            made = (1 - one.smooth) * self._late
            self._late -= made
        return made

    def average_densely(self, mean: Tensor, rate: float) -> Tensor:
        """The same for a dense step, which sends the residuals too."""
        if self._variant.momentum:
            self._momenta = self._variant.momentum * self._momenta + (1 - self._variant.momentum) * mean
            mean = self._momenta.mean(0)
        mean = mean + self.residuals.mean(0) / self._unit(rate)
        self.residuals.zero_()
        self._observe(mean)
        return mean

    def _unit(self, rate: float) -> float:
        return max(1e-9, rate) if self._variant.in_steps else 1.0

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vector, self._sizes)

    def _observe(self, average: Tensor) -> None:
        self._squares += (1 - _MEMORY) * (average * average - self._squares)

    def _compared(self, values: Tensor) -> Tensor:
        power = self._variant.power
        return values.abs() * (self._squares + 1e-16).pow(-power) if power else values.abs()

    def _keeps(self, total: Tensor) -> Tensor:
        if self._variant.keeps == "all":
            return total != 0
        compared = self._compared(total)
        if self._variant.weight:
            roots = [(one.mean() + 1e-16).sqrt() for one in self.split(self._squares)]
            parts = zip(self.split(compared), roots, strict=True)
            compared = torch.cat([own / root**self._variant.weight for own, root in parts])
        select = self._largest_of_all if self._variant.keeps in ("largest", "whole-model") else self._largest
        return select(compared) & (total != 0)

    def _largest_of_all(self, compared: Tensor) -> Tensor:
        return _largest(compared, sum(self._counts))

    def _largest(self, compared: Tensor) -> Tensor:
        parts = zip(self.split(compared), self._counts, strict=True)
        return torch.cat([_largest(own, count) for own, count in parts])


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    return magnitudes >= magnitudes.topk(count).values[-1]


@dataclass(frozen=True)
class Run:
    """``rate``: the learning rate, as a multiple of the study's."""

    variant: str
    seed: int
    steps: int
    rate: float = 1.0


def trained(run: Run, texts: Path, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A row of ``run``."""
    variant, begin = VARIANTS[run.variant], time.process_time()
    problem = open_problem(TASK.name, None, texts)
    plan = runs.Run(TASK.name, DENSE, 1.0, run.seed, run.steps, TASK.batch, RANKS, rate=run.rate)
    torch.manual_seed(run.seed)
    model = problem.model("small", "cpu")
    decay, betas = TASK.weight_decay, variant.betas
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=decay, betas=betas, fused=True)
    parameters = list(model.parameters())
    large = [one for one in parameters if one.numel() > SMALL_ELEMENTS]
    exchange, dense_steps = Exchange([one.numel() for one in large], variant), 0
    for step in range(run.steps):
        rate = plan.learning_rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batches = [problem.batch(plan, step, rank) for rank in range(RANKS)]
        is_dense = run.variant == DENSE or variant.is_dense(step, run.steps)
        dense_steps += is_dense
        if is_dense:
            batches = [(torch.cat([one for one, _ in batches]), torch.cat([other for _, other in batches]))]
        given = []
        for inputs, targets in batches:
            model.zero_grad()
            problem.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            given.append([_gradient(one) for one in parameters])
        for one, own in zip(parameters, zip(*given, strict=True), strict=True):
            one.grad = torch.stack(own).mean(0)
        if run.variant != DENSE:
            flat = torch.stack(
                [torch.cat([own.flatten() for own in of if own.numel() > SMALL_ELEMENTS]) for of in given]
            )
            average = exchange.average_densely(flat[0], rate) if is_dense else exchange.average(flat, rate)
            for one, part in zip(large, exchange.split(average), strict=True):
                one.grad = part.view_as(one).clone()
        moments = _second_moments(optimizer, large) if variant.second_moments != "sent" and not is_dense else []
        optimizer.step()
        if moments:
            squares = exchange.split((flat * flat).mean(0) / RANKS)
            for one, before, square in zip(large, moments, squares, strict=True):
                if variant.second_moments == "local":
                    after = betas[1] * before + (1 - betas[1]) * square.view_as(one)
                else:  # AdamW divides by 1 - beta2 ** step
                    after = before * ((1 - betas[1] ** (step + 1)) / (1 - betas[1] ** step))
                optimizer.state[one]["exp_avg_sq"].copy_(after)
        on_step()
    with torch.no_grad():
        loss = problem.held_out(model, final=True)["loss"]
    kept = exchange.kept / exchange.calls / sum(one.numel() for one in large) if exchange.calls else 1.0
    return vars(run) | {
        "about": variant.about,
        "density": variant.density,
        "loss": loss,
        "kept": kept,
        "dense": dense_steps / run.steps,
        "cpu_s": time.process_time() - begin,
    }


def _gradient(one: nn.Parameter) -> Tensor:
    assert one.grad is not None
    return one.grad.clone()


def _second_moments(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[one]["exp_avg_sq"].clone() for one in parameters]


def best_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each variant and number of steps the mean over the seeds that its best rate has, and ``behind``: percent
    above the dense runs on these seeds at their best rate; in order of loss."""
    groups: dict[tuple[int, str], dict[float, dict[int, float]]] = {}
    for row in rows:
        own = groups.setdefault((row["steps"], row["variant"]), {})
        own.setdefault(row["rate"], {})[row["seed"]] = row["loss"]
    best = {}
    for key, by_rate in groups.items():
        best[key] = min(by_rate, key=functools.partial(_badness, by_rate))
    found = []
    for (steps, variant), rate in best.items():
        losses = groups[steps, variant][rate]
        dense = groups.get((steps, DENSE), {}).get(best.get((steps, DENSE), 1.0), {})
        both = [(loss, dense[seed]) for seed, loss in losses.items() if seed in dense]
        behind = 100 * (sum(one for one, _ in both) / sum(other for _, other in both) - 1) if both else None
        about = {"steps": steps, "variant": variant, "about": VARIANTS[variant].about}
        about |= {"rate": rate, "rates": sorted(groups[steps, variant]), "seeds": len(losses)}
        found.append(about | {"loss": sum(losses.values()) / len(losses), "behind": behind})
    return sorted(found, key=lambda row: (row["steps"], row["loss"]))


def _badness(own: Mapping[float, Mapping[int, float]], rate: float) -> tuple[int, float]:
    losses = own[rate].values()
    return -len(losses), sum(losses) / len(losses)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of ``best_of``."""
    table = Table(box=None, pad_edge=False)
    for name in ("steps", "variant", "", "rate", "tried", "seeds", "held-out loss", "above dense"):
        table.add_column(name, justify="left" if name in ("variant", "") else "right")
    for row in best_of(rows):
        behind = "" if row["behind"] is None else f"{row['behind']:+.1f} %"
        tried = ", ".join(f"{one:g}" for one in row["rates"])
        cells = f"{row['rate']:g}", tried, str(row["seeds"]), f"{row['loss']:.3f}", behind
        table.add_row(str(row["steps"]), row["variant"], row["about"], *cells)
    return table


def command(
    variants: Annotated[str, typer.Option(help="Names, separated by commas; all without.", show_default=False)] = "",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a run.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 1,
    rates: Annotated[str, typer.Option(help="Learning rates, as multiples of the study's.")] = "1",
    text: TextFolder = None,
    json_file: RowsFile = None,
) -> None:
    """Train the small GPT of the accuracy study with AdamW and variants of Ok-Topk, on one thread.

    Runs of which the file of [bold]--json[/] has a row already are not made again: the same command goes on.

    [bold]Example:[/] python -m lab oktopk-adamw --variants dense,oktopk,steps --rates 0.5,1 --json rows.json
    """
    console = table_console()
    names = among(variants, tuple(VARIANTS), "--variants") if variants else tuple(VARIANTS)
    multiples = positive_numbers(rates, "--rates", "0.5,1")
    check_all_writable({"--json": json_file})
    machine = describe_machine()
    result = GrowingResult(json_file, {"machine": machine})
    if json_file is not None and json_file.is_file() and json_file.stat().st_size:
        result.rows += json.loads(json_file.read_text())["rows"]
    wanted = [Run(name, seed, steps, rate) for seed in range(seeds) for name in names for rate in multiples]
    fields = [one.name for one in dataclasses.fields(Run)]
    done = [Run(**{name: row[name] for name in fields}) for row in result.rows]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, counting(console) as progress:
        Corpus.prepare(Path(folder), text)
        for run in [one for one in wanted if one not in done]:
            bar = progress.add_task(f"{run.variant}, seed {run.seed}", total=run.steps)
            result.add(trained(run, Path(folder), lambda bar=bar: progress.advance(bar)))  # type: ignore[misc]
            progress.remove_task(bar)
    console.print(table_of(result.rows))
    console.print(machine_text(machine), style="dim")
    result.end(console)
