"""``telegrad bench``: figures of this machine, beside those of a peer in the same run."""

from __future__ import annotations

import typer

from telegrad.cli.bench_accuracy import accuracy
from telegrad.cli.bench_allreduce import allreduce
from telegrad.cli.bench_checks import checks
from telegrad.cli.bench_errors import errors
from telegrad.cli.bench_faults import faults
from telegrad.cli.bench_linear import linear
from telegrad.cli.bench_nonblocking import nonblocking
from telegrad.cli.bench_overlap import overlap
from telegrad.cli.bench_predictions import predictions
from telegrad.cli.bench_select import select
from telegrad.cli.bench_simulator import simulator
from telegrad.cli.bench_sparse import sparse
from telegrad.cli.bench_topk import topk_allreduce
from telegrad.cli.bench_training_step import training_step
from telegrad.cli.bench_transfers import transfers

app = typer.Typer(help="Measure telegrad on this machine, beside a peer in the same run.", no_args_is_help=True)
for command in (
    allreduce,
    sparse,
    topk_allreduce,
    linear,
    select,
    nonblocking,
    transfers,
    overlap,
    checks,
    faults,
    errors,
    predictions,
    simulator,
    accuracy,
    training_step,
):
    app.command()(command)
