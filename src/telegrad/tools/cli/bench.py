"""``telegrad bench``: figures of this machine, beside those of a peer in the same run."""

from __future__ import annotations

import typer

from telegrad.tools.cli.bench_allreduce import allreduce
from telegrad.tools.cli.bench_sparse import sparse

app = typer.Typer(help="Measure telegrad on this machine, beside a peer in the same run.", no_args_is_help=True)
for command in (allreduce, sparse):
    app.command()(command)
