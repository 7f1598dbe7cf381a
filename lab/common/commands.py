"""Options that several experiments have, values that they take as text, and how their commands end.

Each function names the option, the value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import count_of, numbers_of, present_gpu
from telegrad.tools.cli.outputs import write_result

TextFolder = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="Train language models on the *.py files in this folder instead of Python's standard library.",
        show_default=False,
    ),
]

_MOST_RANKS = 64


def rank_range(text: str, *, most: int, example: str) -> tuple[int, int]:
    """Fewest and most ranks of ``2..8`` or ``4``, from 2 to ``most``. Raises ``BadParameter``."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    lowest, highest = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 2 <= lowest <= highest <= most:
        raise typer.BadParameter(
            f"{text!r} is no range of ranks: use two numbers from 2 to {most}, as in {example}", param_hint="--ranks"
        )
    return lowest, highest


def counts_of(text: str, least: int, most: int, option: str) -> list[int]:
    """Of ``1000``, ``4Ki,1Mi`` or ``16Ki..64Mi``, ascending; a range grows by 4 and ends with its end. Raises
    ``BadParameter``."""
    return numbers_of(text, lambda one: count_of(one, least, most, option), 4, option)


def rank_counts(text: str) -> list[int]:
    """The numbers of ranks in ``1,2,4``. Raises ``BadParameter``."""
    return [count_of(one, 1, _MOST_RANKS, "--ranks") for one in text.split(",")]


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


def end_with_rows(console: Console, rows: Sequence[Mapping[str, Any]], json_file: Path | None) -> None:
    """Says which machine it was, writes ``rows`` and the machine into ``json_file`` if that is given, and ends the
    command with status 1 if a row counts ``"wrong"`` sums."""
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": machine})
    if any(row["wrong"] for row in rows):
        console.print("[red]some sums were wrong[/]")
        raise typer.Exit(1)
