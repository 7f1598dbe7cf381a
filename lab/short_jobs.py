"""What compression costs a short job: a small CNN with AdamW, clipping and accumulated passes.

Each rank draws images whose labels a fixed random teacher gives. All methods see the same images in the same order,
from the same weights. Averages are clipped; with top-k, each rank's own gradient. Ranks share memory, so nothing here
is a time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.progress import TextColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad.launch import join
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.plan import JsonFields, peers_store, run_job
from telegrad.tools.cli.options import JobTimeout, RowsFile, among
from telegrad.tools.cli.outputs import check_writable, counting, table_console, write_result

Row = dict[str, Any]

CLASSES, COARSE, SIDE = 10, 4, 32
_LOW_RANK = ("lowrank-8", "lowrank-16", "lowrank-8-warm", "lowrank-16-warm", "lowrank-16-local")
METHODS = ("dense", "dense-local", *_LOW_RANK, "topk", "topk-cold")
"""``topk``: 1 % of the entries, a tenth of the steps dense, as in ``…-warm``; ``topk-cold``: no dense steps.
``…-local``: each rank clips its own gradient, as always with ``topk``."""
TASKS: tuple[str, ...] = ("colours", "noise")
"""``colours``: coarse colours under noise, for a CNN with GroupNorm. ``noise``: labels of noise alone, which take
longer to learn, for one with BatchNorm."""


@dataclass(frozen=True)
class ShortJob(JsonFields):
    """``steps`` of the optimizer, each of ``accumulate`` passes of ``batch`` images a rank."""

    method: str
    seed: int = 0
    steps: int = 120
    ranks: int = 2
    batch: int = 16
    accumulate: int = 4
    learning_rate: float = 1e-3
    clip_norm: float = 1.0
    task: str = "colours"
    network: str = "shm"
    store: str = ""


def network_of(seed: int, task: str = "colours") -> nn.Module:
    """3.3 million parameters; with BatchNorm 2.7 million."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    if task == "noise":
        sizes = ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2), (256, 256, 1), (256, 384, 2))
        for inputs, outputs, stride in sizes:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(384 * 4, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    head = [nn.Flatten(), nn.Linear(128 * COARSE**2, 1536), nn.ReLU(), nn.Linear(1536, CLASSES)]
    return nn.Sequential(*layers, *head)


def images(seed: int, step: int, number: int, rank: int, count: int, task: str = "colours") -> tuple[Tensor, Tensor]:
    """The teacher sees the coarse colours alone, of noise those of its 8 x 8 parts."""
    own = torch.Generator().manual_seed(((seed * 100_000 + step) * 64 + number) * 64 + rank)
    of_teacher = torch.Generator().manual_seed(1000 + seed)
    if task == "noise":
        noise = torch.randn(count, 3, SIDE, SIDE, generator=own)
        seen = nn.functional.avg_pool2d(noise, COARSE).flatten(1)
        return noise, (seen @ torch.randn(seen.shape[1], CLASSES, generator=of_teacher)).argmax(1)
    teacher = torch.randn(3 * COARSE**2, CLASSES, generator=of_teacher)
    coarse = torch.randn(count, 3, COARSE, COARSE, generator=own)
    fine = nn.functional.interpolate(coarse, size=SIDE) + 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=own)
    return fine, (coarse.flatten(1) @ teacher).argmax(1)


def options_of(job: ShortJob) -> dict[str, Any]:
    """Of DDPState."""
    kind, *rest = job.method.split("-")
    if kind == "dense":
        return {"compress": None}
    tenth = telegrad.Warmup(steps=job.steps // 10)
    if kind == "lowrank":
        return {"compress": telegrad.LowRank(rank=int(rest[0])), "warmup": tenth if "warm" in rest else None}
    return {"compress": telegrad.TopK(density=0.01), "warmup": None if "cold" in rest else tenth}


def clips_locally(job: ShortJob) -> bool:
    """Each rank its own gradient, before compression."""
    return job.method.startswith("topk") or job.method.endswith("-local")


def rank_main(job_json: str) -> None:
    """One rank; rank 0 prints the losses and what it has sent."""
    job = ShortJob.from_json(job_json)
    torch.set_num_threads(1)
    with join() as comm:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{job.store}", rank=comm.rank, world_size=job.ranks
        )
        ddp = DistributedDataParallel(network_of(job.seed, job.task))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=job.learning_rate)
        clip_norm = job.clip_norm if clips_locally(job) else None
        state = telegrad.DDPState(comm, ddp, clip_norm=clip_norm, **options_of(job))
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        sent = comm.stats()["bytes_sent"]
        losses = [_step(job, ddp, optimizer, step, comm.rank) for step in range(job.steps)]
        sent = comm.stats()["bytes_sent"] - sent
        ddp.module.eval()
        with torch.no_grad():
            held_out = [_loss(job, ddp.module, 99_999, number, 63).item() for number in range(16)]
        if comm.rank == 0:
            said = {"loss": fmean(losses[-10:]), "held_out": fmean(held_out), "sent": sent}
            print(json.dumps(said), flush=True)
        comm.barrier()
        torch.distributed.destroy_process_group()


def _step(job: ShortJob, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    optimizer.zero_grad()
    total = 0.0
    for number in range(job.accumulate):
        with contextlib.nullcontext() if number == job.accumulate - 1 else ddp.no_sync():
            loss = _loss(job, ddp, step, number, rank) / job.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    if not clips_locally(job):
        nn.utils.clip_grad_norm_(ddp.parameters(), job.clip_norm)
    optimizer.step()
    return total


def _loss(job: ShortJob, model: nn.Module, step: int, number: int, rank: int) -> Tensor:
    x, y = images(job.seed, step, number, rank, job.batch, job.task)
    return nn.functional.cross_entropy(model(x), y)


def run(job: ShortJob, *, timeout_s: float) -> Row:
    """The job's row. Raises ``RankFailed`` and ``RanksTimedOut``."""
    found: Row = {}

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            found.update(json.loads(line))

    with peers_store() as store:
        run_job("lab.short_jobs:rank_main", replace(job, store=store), take, timeout_s=timeout_s)
    return {"task": job.task, "method": job.method, "seed": job.seed, "steps": job.steps, **found}


def table_of(rows: Sequence[Row]) -> Table:
    """Means over seeds; in brackets how far above dense training."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=0)
    for name in ("method", "seeds", "training loss, last 10 steps", "held-out loss", "MB sent"):
        table.add_column(name, justify="left" if name == "method" else "right")

    def mean(method: str, name: str) -> float:
        return fmean(row[name] for row in rows if row["method"] == method)

    methods = [*dict.fromkeys(row["method"] for row in rows)]
    for method in methods:
        cells = []
        for name in ("loss", "held_out"):
            above = f" ({mean(method, name) / mean('dense', name) - 1:+.0%})" if {"dense", method} <= {*methods} else ""
            cells.append(f"{mean(method, name):.3f}{'' if method == 'dense' else above}")
        seeds = sum(row["method"] == method for row in rows)
        table.add_row(method, str(seeds), *cells, f"{mean(method, 'sent') / 1e6:,.0f}")
    return table


def command(
    methods: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(METHODS),
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    steps: Annotated[int, typer.Option(min=10, help="Of the optimizer.")] = 120,
    task: Annotated[Literal["colours", "noise"], typer.Option(help="Images, and the CNN for them.")] = "colours",
    json_file: RowsFile = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Train a small CNN for few steps by each method, and compare losses and bytes."""
    console = table_console()
    check_writable(json_file, "--json")
    chosen = among(methods, METHODS, "--methods")
    rows: list[Row] = []
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        shown = bar.add_task("jobs", total=len(chosen) * seeds, latest="")
        for seed in range(seeds):
            for method in chosen:
                bar.update(shown, latest=method)
                rows.append(run(ShortJob(method, seed, steps, task=task), timeout_s=timeout))
                bar.advance(shown)
    console.print(table_of(rows))
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": describe_machine()})
