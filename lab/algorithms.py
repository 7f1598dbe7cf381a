"""Figures behind the choices of the algorithms: slices, top-k sums, bits of values, averages of f16.

Nothing here is timed: times are virtual, and the same command gives the same figures on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lab.common.commands import counts_of
from lab.topk.schemes import most_bytes
from telegrad import BoundedTopkState, GTopkState, OkTopkState, SparseVector
from telegrad.communicator.topk import TopkSum
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.cli.options import RowsFile
from telegrad.tools.cli.outputs import check_writable, write_result
from telegrad.tools.sim import World

Row = dict[str, Any]
Floats = npt.NDArray[np.float32]

ALPHA_S, BETA_S = 25e-6, 8e-9
"""1 Gbit/s, as the pages write it."""

# Slices


def slices(ranks: int = 8, dimension: int = 4 << 20, entries: int = 32768, seed: int = 1) -> Iterator[Row]:
    """A split + allgather with equal and with balanced slices, by where the entries lie: milliseconds."""
    random = np.random.default_rng(seed)

    def uniform() -> npt.NDArray[np.int64]:
        return random.choice(dimension, entries, replace=False)

    def in_one_slice() -> npt.NDArray[np.int64]:
        return random.choice(dimension // ranks, entries, replace=False)

    def clusters() -> npt.NDArray[np.int64]:
        width = 2 * entries // 16
        starts = np.sort(np.random.default_rng(seed).choice(dimension // width, 16, replace=False)) * width
        return (starts[:, None] + np.sort(random.random((16, width)).argsort(1)[:, : entries // 16], 1)).ravel()

    for name, drawn in (("all in one rank's slice", in_one_slice), ("16 clusters", clusters), ("uniform", uniform)):
        vectors = [
            SparseVector(np.sort(drawn()).astype(np.uint32), np.ones(entries, np.float32), dimension)
            for _ in range(ranks)
        ]
        row: Row = {"section": "slices", "entries": name}
        for kind in ("equal", "balanced"):
            with _world(ranks) as world:
                _all(
                    world,
                    lambda one, x, kind=kind: one.all_reduce(
                        x, algorithm="split_allgather", slices=kind, async_op=True
                    ),
                    vectors,
                )
                row[f"{kind}_ms"] = 1e3 * world.now_s
        yield row


# Top-k sums


def topk(ranks: Sequence[int], dimension: int = 1 << 20, density: float = 0.01, calls: int = 3) -> Iterator[Row]:
    """The last of ``calls`` calls of each top-k sum, with uniform entries of normal values. Bytes are of the busiest
    rank, all counted: k indices and k values of 4 bytes each are 2."""
    k = round(density * dimension)
    states = {
        "Ok-Topk": lambda: OkTopkState(k),
        "gTopk": lambda: GTopkState(k),
        "bounded, slack 1.5": lambda: BoundedTopkState(k, slack=1.5),
        "split_allgather": None,
    }
    for name, state in states.items():
        for size in ranks:
            random = np.random.default_rng(size)
            mine = [state() for _ in range(size)] if state else []
            with _world(size) as world:
                before, before_s = np.zeros(size), 0.0
                for _ in range(calls):
                    before, before_s = _bytes(world), world.now_s
                    vectors = [_normal(random, dimension, k) for _ in range(size)]
                    if state:
                        works = [
                            one.all_reduce_topk(x, own, wire="raw", async_op=True)
                            for one, x, own in zip(world.communicators, vectors, mine, strict=True)
                        ]
                    else:
                        works = [
                            one.all_reduce(x, algorithm="split_allgather", wire="raw", async_op=True)
                            for one, x in zip(world.communicators, vectors, strict=True)
                        ]
                    results = [work.result() for work in works]
                kept = (results[0].sum if state else results[0]).nnz
                yield {
                    "section": "topk",
                    "sum": name,
                    "ranks": size,
                    "bytes_over_4k": float((_bytes(world) - before).max() / (4 * k)),
                    "ms": 1e3 * (world.now_s - before_s),
                    "of_bound": _of_bound(results, k, size, dimension) if name == "Ok-Topk" else None,
                    "kept_over_k": kept / k,
                }


def _of_bound(sums: Sequence[TopkSum], k: int, ranks: int, dimension: int) -> float:
    reports = [one.report for one in sums]
    most = max(reports[0].local_most, reports[0].selected)
    moved = max(max(one.bytes_sent, one.bytes_received) for one in reports)
    return moved / most_bytes(most, k, ranks, dimension)


# Values


def values(count: int = 1 << 20, seed: int = 7) -> Iterator[Row]:
    """Bits of a value whose exponent takes its entropy, with the other bits as they are: the least that a coder of
    exponents can reach (ZipNN, arXiv 2411.05239). ``benchmark_pack_values`` says what ours takes."""
    random = np.random.default_rng(seed)
    tailed = 1e-3 * random.standard_t(3, count)
    scales = np.exp(2 * random.standard_normal(100))
    layers = np.repeat(scales, -(-count // 100))[:count] * random.standard_normal(count)
    largest = tailed[np.abs(tailed) >= np.quantile(np.abs(tailed), 0.985)]
    for name, drawn in (("Student's t", tailed), ("its largest 1.5 %", largest), ("100 layers of normals", layers)):
        bits = drawn.astype(np.float32).view(np.uint32)
        exponents = np.bincount((bits >> 23) & 0xFF) / len(bits)
        entropy = float(-sum(p * np.log2(p) for p in exponents if p))
        yield {"section": "values", "values": name, "f32_bits": 24 + entropy, "bf16_bits": 8 + entropy}


# Averages of f16


def averages(seed: int = 3, count: int = 4096) -> Iterator[Row]:
    """The error of averages of f16 against f64, in units of f16's last place: root mean square and worst."""
    for scale in (1.0, 1e-4):
        for size in (8, 64):
            random = np.random.default_rng(seed)
            inputs = [(scale * random.uniform(0.5, 2, count)).astype(np.float16) for _ in range(size)]
            exact = np.mean(np.array(inputs, np.float64), axis=0)
            unit = np.spacing(exact.astype(np.float16)).astype(np.float64)
            for algorithm in ("ring", "recursive_doubling"):
                with _world(size) as world:
                    outputs = [x.copy() for x in inputs]
                    _all(
                        world,
                        lambda one, x, how=algorithm: one.all_reduce(x, "avg", algorithm=how, async_op=True),
                        outputs,
                    )
                error = np.abs(outputs[0].astype(np.float64) - exact) / unit
                yield {
                    "section": "averages",
                    "around": scale,
                    "ranks": size,
                    "algorithm": algorithm,
                    "root_mean_square": float(np.sqrt(np.mean(error**2))),
                    "worst": float(error.max()),
                }


# What they share


def _world(size: int) -> contextlib.closing[World]:
    return contextlib.closing(World(size, alpha_s=ALPHA_S, beta_s_per_byte=BETA_S))


def _all(world: World, begin: Callable[..., Any], inputs: Sequence[Any]) -> None:
    for work in [begin(one, x) for one, x in zip(world.communicators, inputs, strict=True)]:
        work.wait()


def _bytes(world: World) -> npt.NDArray[np.float64]:
    stats = [one.stats() for one in world.communicators]
    return np.array([max(one["bytes_sent"], one["bytes_received"]) for one in stats], np.float64)


def _normal(random: np.random.Generator, dimension: int, k: int) -> SparseVector:
    indices = np.sort(random.choice(dimension, k, replace=False)).astype(np.uint32)
    return SparseVector(indices, random.standard_normal(k).astype(np.float32), dimension)


def _shown(value: object) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def tables_of(rows: Sequence[Row]) -> Iterator[Table]:
    """A table for each section, with its keys as columns."""
    for section in dict.fromkeys(row["section"] for row in rows):
        table = Table(title=section, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
        found = [row for row in rows if row["section"] == section]
        for name in list(found[0])[1:]:
            table.add_column(name.replace("_", " "), justify="left" if isinstance(found[0][name], str) else "right")
        for row in found:
            table.add_row(*[_shown(one) for one in list(row.values())[1:]])
        yield table


def command(
    ranks: Annotated[str, typer.Option(help="Of the top-k sums: a list [bold]4,8[/].")] = "4,8,16,32,64,128",
    json_file: RowsFile = None,
) -> None:
    """Print four tables: slices, top-k sums, bits of values at their entropy, and averages of f16."""
    console = Console()
    sizes = counts_of(ranks, 2, 1024, "--ranks")
    check_writable(json_file, "--json")
    rows = [*slices(), *topk(sizes), *values(), *averages()]
    for table in tables_of(rows):
        console.print(table)
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": describe_machine()})
