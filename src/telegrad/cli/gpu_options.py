"""What the commands that measure on a GPU have in common."""

from __future__ import annotations

import typer
from rich.console import Console

from telegrad.cli.options import count_of

_MOST_RANKS = 64


def rank_counts(text: str) -> list[int]:
    """The numbers of ranks in ``1,2,4``. Raises ``BadParameter``."""
    return [count_of(one, 1, _MOST_RANKS, "--ranks") for one in text.split(",")]


def present_gpu(console: Console) -> str:
    """The name of the machine's GPU. Ends the command with status 1 where torch sees none."""
    from telegrad.bench.device import gpu_name

    gpu = gpu_name()
    if gpu is None:
        console.print("no GPU: torch sees none here, and nothing was measured")
        raise typer.Exit(1)
    return gpu


def check_device(console: Console, device: str) -> None:
    """``device``: as torch names it. Raises ``BadParameter`` unless it is the CPU or a GPU, and as ``present_gpu``."""
    import torch

    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} does not exist: use cpu, cuda or cuda:0", param_hint="--device")
    if kind == "cuda":
        present_gpu(console)
        if index >= torch.cuda.device_count():
            raise typer.BadParameter(
                f"{device!r} does not exist: torch sees {torch.cuda.device_count()} GPUs here", param_hint="--device"
            )


def described_gpu(console: Console) -> dict[str, object]:
    """The machine and its GPU, for result files. Ends the command with status 1 where torch sees none, 2 where what
    communication of its tensors needs is not installed."""
    import importlib.util

    from telegrad.bench.device import ENVIRONMENT, describe_gpu

    gpu = present_gpu(console)
    try:
        found = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        console.print("cuda-bindings is not installed: pip install 'telegrad[gpu]'", markup=False)
        raise typer.Exit(2)
    return {**describe_gpu(gpu), "environment": ENVIRONMENT}
