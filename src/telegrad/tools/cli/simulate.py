"""``telegrad simulate``: collectives among any number of ranks, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from telegrad import _core
from telegrad.communicator.operands import formats_named
from telegrad.tools.cli.simulate_run import Asked, SimulationSettings, run, shared, sizes_of
from telegrad.tools.cli.simulate_training_step import training_step
from telegrad.tools.sim.measure import ALGORITHMS

WireOption = Annotated[
    str,
    typer.Option(
        help="How messages hold entries: [bold]raw[/] or [bold]blocked[/] indices, [bold]packed[/] indices and values "
        "or packed [bold]indices[/] alone, and values as they are or as bf16, f16, int8, qsgd8, qsgd4, qsgd2 or their "
        "mean: [bold]packed-bf16[/]. [bold]auto[/]: as a communicator does that is calibrated on this network."
    ),
]


def sparse_algorithms(chosen: Sequence[str], wire: str, *, all_of_them: bool) -> tuple[str, ...]:
    """``chosen``, and of ``all_of_them`` only those that ``wire`` is for: recursive doubling takes no rounded values.
    Raises ``BadParameter``."""
    try:
        encoding = formats_named(wire, "f32").values
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--wire") from error
    if encoding == _core.ValueEncoding.native:
        return tuple(chosen)
    if "recursive_doubling" in chosen and not all_of_them:
        raise typer.BadParameter(
            f"recursive_doubling takes no rounded values, as {wire!r} makes them: use another --algorithm",
            param_hint="--wire",
        )
    return tuple(name for name in chosen if name != "recursive_doubling")


app = typer.Typer(
    help="Run the real algorithms among any number of ranks in virtual time.",
    no_args_is_help=True,
)

_Bytes = Annotated[
    str,
    typer.Option("--bytes", help="One rank's vector: one size, a list [bold]4,64KiB[/], or a range (×4): 4..64MiB."),
]


@app.command()
@shared
def allreduce(
    bytes_: _Bytes = "1MiB",
    algorithm: Annotated[
        str,
        typer.Option(
            help="ring, recursive_doubling, rabenseifner, two_level (with --ranks-per-node), auto (the fastest by the "
            "closed forms), several with commas, or all."
        ),
    ] = "all",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum a vector of floats over all ranks: how long does each algorithm take?

    The coroutines that run on a real network run here, one per rank, on a network that is a formula: a message takes
    α and then β per byte, each rank has one port out and one port in, adding takes γ per byte. [bold]ratio[/] is to the
    fastest at the same ranks and size, [bold]auto[/] marks what would be chosen, [bold]closed form[/] is what theory
    says. docs/simulation.md tells what the model leaves out.

    [bold]Example:[/] telegrad simulate allreduce --ranks 2048 --bytes 8KiB --network 100gbit --plot
    """
    run(Asked("allreduce", _algorithms(algorithm, "allreduce", settings), sizes_of(bytes_)), settings)


@app.command(name="sparse-allreduce")
@shared
def sparse_allreduce(
    bytes_: Annotated[
        str, typer.Option("--bytes", help="The whole vector if it were dense, 4 bytes an entry; lists and ranges too.")
    ] = "64MiB",
    density: Annotated[
        float, typer.Option(help="Share of the vector's entries that each rank has, above 0 and up to 1.")
    ] = 0.01,
    overlap: Annotated[
        float, typer.Option(help="Share of its entries that a rank has in common with all others; the rest is random.")
    ] = 0.0,
    algorithm: Annotated[
        str,
        typer.Option(
            help="auto (what ranks come to by themselves), split_allgather, split_dense_allgather, recursive_doubling, "
            "ring, two_level (with --ranks-per-node), several with commas, or all."
        ),
    ] = "split_allgather",
    wire: WireOption = "auto",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum sparse vectors over all ranks: how long does each algorithm take?

    Without [bold]--payloads[/] indices and values are counted, not stored: sizes on the wire are those of random
    indices. [bold]entries of the sum[/] tells how far it has filled in. Packing is free here, but for its bytes.

    [bold]Example:[/] telegrad simulate sparse-allreduce --ranks 2..256 --bytes 64MiB --density 0.01 --network 25gbit
    """
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0 and up to 1", param_hint="--density")
    if not 0 <= overlap <= 1:
        raise typer.BadParameter(f"{overlap:g} is no share: use a number from 0 to 1", param_hint="--overlap")
    named = _algorithms(algorithm, "sparse_allreduce", settings)
    chosen = sparse_algorithms(named, wire, all_of_them="all" in algorithm)
    run(Asked("sparse_allreduce", chosen, sizes_of(bytes_), density, overlap, wire), settings)


@app.command()
@shared
def allgather(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """Every rank's block to every rank. [bold]--bytes[/] is the length of one block.

    Short blocks go by Bruck's algorithm, long ones round a ring.

    [bold]Example:[/] telegrad simulate allgather --ranks 16 --bytes 4..1MiB --network 10gbit
    """
    run(Asked("allgather", ALGORITHMS["allgather"], sizes_of(bytes_)), settings)


@app.command()
@shared
def gather(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """Every rank's block to one rank. [bold]--bytes[/] is the length of one block.

    Short blocks of many ranks go up a binomial tree, others directly.

    [bold]Example:[/] telegrad simulate gather --ranks 2..4096 --bytes 1KiB --network 25gbit
    """
    run(Asked("gather", ALGORITHMS["gather"], sizes_of(bytes_)), settings)


@app.command()
@shared
def scatter(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """One rank's blocks to all ranks, a block each. [bold]--bytes[/] is the length of one block.

    Short blocks of many ranks go down a binomial tree, others directly.

    [bold]Example:[/] telegrad simulate scatter --ranks 2..4096 --bytes 1KiB --network 25gbit
    """
    run(Asked("scatter", ALGORITHMS["scatter"], sizes_of(bytes_)), settings)


@app.command(name="all-to-all")
@shared
def all_to_all(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """A block of every rank to every rank. [bold]--bytes[/] is the length of one block, of which a rank has P.

    Short blocks of many ranks go by Bruck's algorithm, others in pairwise exchanges.

    [bold]Example:[/] telegrad simulate all-to-all --ranks 64 --bytes 4..64KiB --network 100gbit
    """
    run(Asked("all_to_all", ALGORITHMS["all_to_all"], sizes_of(bytes_)), settings)


@app.command()
@shared
def broadcast(bytes_: _Bytes = "1MiB", *, settings: SimulationSettings) -> None:
    """One rank's vector to all, down a binomial tree or, if it is long, along a chain.

    [bold]Example:[/] telegrad simulate broadcast --ranks 2..4096 --bytes 100MiB --critical-path
    """
    run(Asked("broadcast", ALGORITHMS["broadcast"], sizes_of(bytes_)), settings)


@app.command()
@shared
def reduce(bytes_: _Bytes = "1MiB", *, settings: SimulationSettings) -> None:
    """Sum a vector over all ranks to one of them: up a tree if it is short, by reduce-scatter and gather if it is long.

    [bold]Example:[/] telegrad simulate reduce --ranks 2..4096 --bytes 4KiB,16MiB --network 100gbit
    """
    run(Asked("reduce", ALGORITHMS["reduce"], sizes_of(bytes_)), settings)


@app.command(name="reduce-scatter")
@shared
def reduce_scatter(bytes_: _Bytes = "1MiB", *, settings: SimulationSettings) -> None:
    """Sum a vector over all ranks, of which each gets one block: by halving, or round a ring if blocks are long.

    [bold]Example:[/] telegrad simulate reduce-scatter --ranks 64 --bytes 4..256MiB --network 25gbit
    """
    run(Asked("reduce_scatter", ALGORITHMS["reduce_scatter"], sizes_of(bytes_)), settings)


@app.command()
@shared
def barrier(*, settings: SimulationSettings) -> None:
    """Wait until all ranks have come, by dissemination.

    [bold]Example:[/] telegrad simulate barrier --ranks 2..4096 --jitter 3 --seed 1
    """
    run(Asked("barrier", ALGORITHMS["barrier"], [0]), settings)


app.command(name="training-step")(training_step)


def _algorithms(text: str, operation: str, settings: SimulationSettings) -> tuple[str, ...]:
    known = (*ALGORITHMS[operation], *(["two_level"] if settings.ranks_per_node > 1 else []), "auto")
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in (*known, "all"):
            raise typer.BadParameter(
                f"{name!r} does not exist: use {', '.join(known)}, all (two_level: with --ranks-per-node)",
                param_hint="--algorithm",
            )
    return known if "all" in chosen else chosen
