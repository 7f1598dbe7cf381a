"""``telegrad bench errors``: what happens when something goes wrong, with telegrad and with a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from telegrad.bench.error_scenes import SCENES
from telegrad.bench.error_table import BEGIN, END, around, insert, measure
from telegrad.bench.machine import describe_machine
from telegrad.bench.peers import why_missing
from telegrad.cli.outputs import check_writable, written
from telegrad.report.errors import markdown, table_of

_GIVE_UP_S = 15.0


def errors(
    peer: Annotated[str, typer.Option(help="Whom to put beside us: gloo (needs torch) or none.")] = "gloo",
    give_up: Annotated[float, typer.Option(min=1, help="Seconds to wait for an answer.")] = _GIVE_UP_S,
    into: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help=f"Write the table into this Markdown file, between {BEGIN} and {END}."
        ),
    ] = None,
    scenes: Annotated[str, typer.Option(help=f"Which, separated by commas: {', '.join(SCENES)}; or all.")] = "all",
) -> None:
    """Let the same things go wrong with telegrad and with Gloo, and say what every rank heard of it.

    Three ranks; rank 1 is killed, frozen, or calls something else than the others. Times are seconds from the fault, in
    a mismatch from the last rank's call.
    """
    console = Console()
    if peer not in ("gloo", "none"):
        raise typer.BadParameter(f"peer {peer!r} is not known: use gloo or none", param_hint="--peer")
    chosen = tuple(SCENES) if scenes == "all" else tuple(name.strip() for name in scenes.split(","))
    for name in chosen:
        if name not in SCENES:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(SCENES)}", param_hint="--scenes")
    if into is not None:
        _check_page(into, chosen)
    libraries = ["telegrad"] if peer == "none" else ["telegrad", peer]
    missing = why_missing("gloo")  # torch is wanted by scenes of our own too
    with console.status("starting") as status:
        rows = measure(
            libraries,
            give_up_s=give_up,
            without_torch=f"not measured: {missing}" if missing else None,
            scenes=chosen,
            on_start=lambda library, scene: status.update(f"{library}: {scene}"),
        )
    console.print(table_of(rows, libraries))
    if into is not None:
        command = f"telegrad bench errors --peer {peer}" + (f" --give-up {give_up:g}" if give_up != _GIVE_UP_S else "")
        with written(console, into):
            insert(markdown(rows, libraries, describe_machine(), command), into)
        console.print(f"table: {into}")
    if peer != "none" and missing:
        console.print(f"[yellow]Without Gloo:[/] {missing}")


def _check_page(page: Path, scenes: tuple[str, ...]) -> None:
    """Before anything is measured."""
    if left_out := [name for name in SCENES if name not in scenes]:
        raise typer.BadParameter(
            f"the table in {page} would lose {', '.join(left_out)}: leave out --scenes, or this", param_hint="--into"
        )
    check_writable(page, "--into")
    try:
        around(page)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--into") from error
