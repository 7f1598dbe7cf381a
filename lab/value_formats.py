"""What formats of values lose of a real pseudo-gradient and gradient, and the bits that an entry takes in messages.

The demo's GPT trains in this process. Its pseudo-gradient is the move of its parameters over the last steps, as DiLoCo
exchanges it, and its gradient is that of the last step. Errors are relative: of the squares, summed over all values.
A second table has other codebooks of four levels than codebook2, which is that of 512 values and 2 iterations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table

from lab.common.growing_result import GrowingResult
from telegrad import Communicator, SparseVector
from telegrad.communicator.operands import WIRES
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.cli.options import RowsFile
from telegrad.tools.cli.outputs import check_all_writable, table_console
from telegrad.tools.demo.job import Corpus, ModelSize, Settings, training_batch
from telegrad.tools.demo.training import ByteGPT, loss_of, optimizer_of

Floats = npt.NDArray[np.float32]

CHUNK = 4096
"""Entries of which the ``k`` largest are sent."""
BLOCKS = (256, 512, 1024, 4096)
"""Values that share a codebook of eight bytes."""
ITERATIONS = (0, 1, 2, 4)
"""Of Lloyd's algorithm, on bins that begin 1.5 mean absolute deviations from the mean."""


def vectors_of(text: npt.NDArray[np.uint8], size: ModelSize, steps: int, every: int, batch: int) -> dict[str, Floats]:
    """By name, of all parameters: the move over the last ``every`` of ``steps``, and the last gradient."""
    torch.manual_seed(0)
    model = ByteGPT(size)
    optimizer = optimizer_of(model, Settings("telegrad-dense", "", steps, "lo"))
    before = _flat(model.parameters())
    for step in range(steps):
        if step == steps - every:
            before = _flat(model.parameters())
        tokens = training_batch(text, seed=0, step=step, rank=0, batch=batch, context=size.context)
        inputs, targets = (torch.from_numpy(one) for one in tokens)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gradient = _flat(one.grad for one in model.parameters() if one.grad is not None)
    return {"pseudo-gradient": before - _flat(model.parameters()), "gradient": gradient}


def largest(vector: Floats, k: int) -> SparseVector:
    """The ``k`` largest magnitudes of every ``CHUNK`` values; what is left over at the end has none."""
    chunks = vector[: vector.size // CHUNK * CHUNK].reshape(-1, CHUNK)
    found = np.sort(np.argpartition(-np.abs(chunks), k, axis=1)[:, :k], axis=1)
    indices = (found + CHUNK * np.arange(len(chunks))[:, None]).ravel()
    return SparseVector(indices.astype(np.uint32), vector[indices], vector.size)


def sparse_row(ranks: Sequence[Communicator], stream: SparseVector, wire: str) -> dict[str, float]:
    """Of an allgather between two ranks."""
    errors = [np.zeros(stream.n, np.float32) for _ in ranks]
    sent = ranks[0].stats()["bytes_sent"]
    works = [
        rank.all_gather(stream, wire=f"packed-{wire}", error=error, async_op=True)
        for rank, error in zip(ranks, errors, strict=True)
    ]
    for work in works:
        work.wait()
    bits = 8 * (ranks[0].stats()["bytes_sent"] - sent) / stream.nnz
    return {"bits": bits, "error": _part(errors[0], np.asarray(stream.values))}


def dense_row(alone: Communicator, vector: Floats, wire: str) -> dict[str, float]:
    error = np.empty_like(vector)
    alone.all_reduce(vector, wire=wire, out=np.empty_like(vector), error=error)
    return {"error": _part(error, vector)}


def rows_of(vectors: Mapping[str, Floats], k: int) -> list[dict[str, Any]]:
    """A row for each vector, entries and format."""
    rows: list[dict[str, Any]] = []
    ranks, (alone,) = Communicator.local(2), Communicator.local(1)
    for name, vector in vectors.items():
        stream = largest(vector, k)
        for wire in WIRES:
            about = {"vector": name, "wire": wire}
            rows.append({**about, "entries": stream.nnz, "sparse": True, **sparse_row(ranks, stream, wire)})
            rows.append({**about, "entries": vector.size, "sparse": False, **dense_row(alone, vector, wire)})
    for one in (*ranks, alone):
        one.close()
    return rows


def codebook_error(values: Floats, block: int, iterations: int | None) -> float:
    """Of values that have the nearest of four levels; ``None``: the means of the bins of SparseLoCo, over ±3 standard
    deviations around the mean, which the values keep."""
    lost = 0.0
    for begin in range(0, values.size, block):
        own = values[begin : begin + block].astype(np.float64)
        spread = 1.5 * (own.std() if iterations is None else np.abs(own - own.mean()).mean())
        bins = np.searchsorted(own.mean() + spread * np.array([-1, 0, 1]), own, side="right")
        for _ in range(iterations or 0):
            levels = _means(own, bins)
            bins = np.searchsorted((levels[:-1] + levels[1:]) / 2, own, side="right")
        levels = _means(own, bins)
        if iterations is not None:
            bins = np.searchsorted((levels[:-1] + levels[1:]) / 2, own, side="right")
        lost += float(np.square(own - levels[bins]).sum())
    return lost / float(np.square(values, dtype=np.float64).sum())


def _means(values: npt.NDArray[np.float64], bins: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Of four bins; an empty one has the nearest lower one's, or else the lowest one's."""
    counts = np.bincount(bins, minlength=4)
    held = np.maximum.accumulate(np.where(counts > 0, np.arange(4), np.flatnonzero(counts)[0]))
    means: npt.NDArray[np.float64] = (np.bincount(bins, values, minlength=4) / np.maximum(counts, 1))[held]
    return means


def codebook_rows(vectors: Mapping[str, Floats], k: int) -> list[dict[str, Any]]:
    """A row for each vector's largest entries, block, and number of iterations."""
    return [
        {"vector": name, "block": block, "iterations": iterations, "error": codebook_error(values, block, iterations)}
        for name, values in ((name, np.asarray(largest(vector, k).values)) for name, vector in vectors.items())
        for block in BLOCKS
        for iterations in (None, *ITERATIONS)
    ]


def codebook_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("largest of", "values", "±3σ", *(f"{one} iterations" for one in ITERATIONS))
    found = {(row["vector"], row["block"], row["iterations"]): f"{row['error']:.3g}" for row in rows}
    for name, block in dict.fromkeys(key[:2] for key in found):
        table.add_row(name, str(block), *(found[name, block, one] for one in (None, *ITERATIONS)))
    return table


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("values of", "format", "error", "bits an entry")
    for row in sorted(rows, key=lambda row: (row["vector"], not row["sparse"])):
        of = f"{row['vector']}, {'largest' if row['sparse'] else 'all'}"
        table.add_row(of, row["wire"], f"{row['error']:.3g}", f"{row['bits']:.2f}" if row["sparse"] else "")
    return table


def command(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 120,
    every: Annotated[int, typer.Option(min=1, help="Of these, the steps of the pseudo-gradient.")] = 30,
    batch: Annotated[int, typer.Option(min=1, help="Windows of text in a step.")] = 8,
    k: Annotated[int, typer.Option(min=1, max=CHUNK, help=f"Entries that are sent of every {CHUNK:,}.")] = 64,
    width: Annotated[int, typer.Option(min=7, help="Of the model; a multiple of 7.")] = ModelSize().width,
    json_file: RowsFile = None,
) -> None:
    """Compare formats of values: what each loses, and the bits that it takes.

    [bold]Example:[/] python -m lab value-formats
    """
    if every > steps:
        raise typer.BadParameter(f"{every} is more than the {steps} of --steps: use fewer", param_hint="--every")
    check_all_writable({"--json": json_file})
    with tempfile.TemporaryDirectory() as folder:
        text = Corpus.prepare(Path(folder)).training
        vectors = vectors_of(text, ModelSize(width=width), steps, every, batch)
    settings = {"steps": steps, "every": every, "batch": batch, "k": k, "chunk": CHUNK, "width": width}
    result = GrowingResult(json_file, {"experiment": "value-formats", "machine": describe_machine(), **settings})
    rows, codebooks = rows_of(vectors, k), codebook_rows(vectors, k)
    for row in (*rows, *codebooks):
        result.add(row)
    table_console().print(table_of(rows), codebook_table(codebooks))


def _flat(tensors: Any) -> Floats:
    flat: Floats = torch.cat([one.detach().reshape(-1) for one in tensors]).numpy()
    return flat


def _part(error: Floats, of: Floats) -> float:
    return float(np.square(error, dtype=np.float64).sum() / np.square(of, dtype=np.float64).sum())
