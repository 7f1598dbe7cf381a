"""What the commands that measure on a GPU have in common."""

from __future__ import annotations

import typer
from rich.console import Console


def present_gpu(console: Console) -> str:
    """The name of the machine's GPU. Ends the command with status 1 where torch sees none."""
    from telegrad.tools.bench.device import gpu_name

    gpu = gpu_name()
    if gpu is None:
        console.print("no GPU: torch sees none here, and nothing was measured")
        raise typer.Exit(1)
    return gpu


def described_gpu(console: Console) -> dict[str, object]:
    """The machine and its GPU, for result files. Ends the command with status 1 where torch sees none, 2 where what
    communication of its tensors needs is not installed."""
    import importlib.util

    from telegrad.tools.bench.device import ENVIRONMENT, describe_gpu

    gpu = present_gpu(console)
    try:
        found = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        console.print("cuda-bindings is not installed: pip install 'telegrad[gpu]'", markup=False)
        raise typer.Exit(2)
    return {**describe_gpu(gpu), "environment": ENVIRONMENT}
