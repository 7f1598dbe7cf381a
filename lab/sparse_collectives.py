"""Sparse collectives other than the plain allreduce, in virtual time: always with real entries, and checked."""

from __future__ import annotations

from typing import Annotated

import typer

from telegrad import _core
from telegrad.communicator.operands import formats_named
from telegrad.tools.cli.simulate import WireOption
from telegrad.tools.cli.simulate_run import Asked, SimulationSettings, run, shared, sizes_of
from telegrad.tools.sim.measure import ALGORITHMS

_Bytes = Annotated[
    str, typer.Option("--bytes", help="The whole vector if it were dense, 4 bytes an entry; lists and ranges too.")
]
_Density = Annotated[float, typer.Option(help="Share of the vector's entries that each rank has, above 0 and up to 1.")]
_Overlap = Annotated[
    float, typer.Option(help="Share of its entries that a rank has in common with all others; the rest is random.")
]


@shared
def allreduce_topk(
    bytes_: _Bytes = "4MiB",
    density: _Density = 0.01,
    overlap: _Overlap = 0.0,
    keep: Annotated[int, typer.Option(min=0, help="Entries that the sum keeps; 0: as many as a rank has.")] = 0,
    calls: Annotated[
        int, typer.Option(min=1, help="One after another: the first cuts slices and finds the threshold, others reuse.")
    ] = 1,
    wire: WireOption = "auto",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum sparse vectors and keep the largest entries (Ok-Topk): time, messages, and words against the bound.

    Ranks have real entries of many magnitudes, others at each call, and every result is checked (where a wire rounds,
    within what that may do): so thousands of ranks take memory. [bold]words[/] are of the last call and the rank that
    moves most: an index is one and a value is one.

    [bold]Example:[/] python -m lab sparse-collectives allreduce-topk --ranks 2..256 --bytes 4MiB --calls 2
    """
    _run("allreduce_topk", bytes_, density, overlap, wire, settings, keep=keep, calls=calls)


@shared
def sparse_allgather(
    bytes_: _Bytes = "4MiB",
    density: _Density = 0.01,
    overlap: _Overlap = 0.0,
    wire: WireOption = "auto",
    *,
    settings: SimulationSettings,
) -> None:
    """Every rank's sparse vector to every rank. Real entries, and every result is checked.

    [bold]Example:[/] python -m lab sparse-collectives sparse-allgather --ranks 2..64 --bytes 4MiB --density 0.001
    """
    _run("sparse_allgather", bytes_, density, overlap, wire, settings)


@shared
def sparse_reduce_scatter(
    bytes_: _Bytes = "4MiB",
    density: _Density = 0.01,
    overlap: _Overlap = 0.0,
    wire: WireOption = "auto",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum sparse vectors, of which each rank gets a slice. Real entries, and every result is checked.

    [bold]Example:[/] python -m lab sparse-collectives sparse-reduce-scatter --ranks 2..64 --bytes 4MiB --density 0.001
    """
    _run("sparse_reduce_scatter", bytes_, density, overlap, wire, settings)


def _run(
    operation: str,
    bytes_: str,
    density: float,
    overlap: float,
    wire: str,
    settings: SimulationSettings,
    *,
    keep: int = 0,
    calls: int = 1,
) -> None:
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0 and up to 1", param_hint="--density")
    if not 0 <= overlap <= 1:
        raise typer.BadParameter(f"{overlap:g} is no share: use a number from 0 to 1", param_hint="--overlap")
    try:
        encoding = formats_named(wire, "f32").values
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--wire") from error
    if encoding != _core.ValueEncoding.native and operation != "allreduce_topk":
        raise typer.BadParameter(
            f"{wire!r} rounds values, and results could not be checked: use one that does not", param_hint="--wire"
        )
    run(Asked(operation, ALGORITHMS[operation], sizes_of(bytes_), density, overlap, wire, keep, calls), settings)


command = typer.Typer(help="Sparse collectives other than the plain allreduce, in virtual time.", no_args_is_help=True)
command.command(name="allreduce-topk")(allreduce_topk)
command.command(name="sparse-allgather")(sparse_allgather)
command.command(name="sparse-reduce-scatter")(sparse_reduce_scatter)
