"""``telegrad env``: the machine and the installation, for a bug report."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from telegrad.doctor.environment import as_text, describe_environment


def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Describe the installation and the machine, for a bug report.

    Of the environment it shows only UCX_*, TELEGRAD_*, GLOO_*, NCCL_SOCKET*, MASTER_*, and the ranks' and Slurm's
    numbers. Addresses of the network interfaces are in it.
    """
    described = describe_environment()
    typer.echo(json.dumps(described, indent=1) if as_json else as_text(described))
