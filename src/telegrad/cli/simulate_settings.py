"""The options that all of ``telegrad simulate``'s collectives share, and what they mean."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from telegrad.bench.plan import size_of
from telegrad.cli.outputs import check_all_writable, check_writable
from telegrad.doctor.installation import is_installed
from telegrad.sim.networks import NAMED, Network, network_of, with_costs

# The simulator keeps about 28 bytes per pair of ranks: 2 GB at 8,192.
MOST_RANKS = 8192
MOST_BYTES = 1 << 40
_MOST_SEED = (1 << 64) - 1
# Inside a node, where --node-alpha and --node-beta are not given: GPUs of one machine on a switch of their own.
_NODE_ALPHA_S, _NODE_BETA_S_PER_BYTE = 0.5e-6, 4e-11
_NETWORK, _NODES, _NOISE, _OUTPUT = "The network", "Two levels", "Noise and seed", "What to write"


@dataclass(frozen=True)
class SimulationSettings:
    """As typed."""

    ranks: Annotated[
        str, typer.Option(help="How many: one number, a list [bold]4,64,2048[/], or a range that doubles: 2..4096.")
    ] = "64"
    network: Annotated[
        str,
        typer.Option(
            help=f"A rate: {', '.join(NAMED)} or any other such as 2.5gbit. It stands for costs α, β and γ; the table "
            "says which.",
            rich_help_panel=_NETWORK,
        ),
    ] = "100gbit"
    alpha: Annotated[
        float | None, typer.Option(help="α: seconds of latency of a message, such as 2e-6.", rich_help_panel=_NETWORK)
    ] = None
    beta: Annotated[
        float | None,
        typer.Option(help="β: seconds of a byte in a port: 8e-11 is 100 Gbit/s.", rich_help_panel=_NETWORK),
    ] = None
    beta_exchange: Annotated[
        float | None,
        typer.Option(help="β while two ranks send to each other at once; 0: the same.", rich_help_panel=_NETWORK),
    ] = None
    gamma: Annotated[
        float | None,
        typer.Option(help="γ: seconds of a byte in the processor: 1e-10 adds 10 GB/s.", rich_help_panel=_NETWORK),
    ] = None
    ranks_per_node: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_RANKS, help="Ranks that share a node and its uplink; 0: one level.", rich_help_panel=_NODES
        ),
    ] = 0
    oversubscription: Annotated[
        float,
        typer.Option(help="1: an uplink carries what all ports of its node can; 4: a quarter.", rich_help_panel=_NODES),
    ] = 1.0
    node_alpha: Annotated[
        float | None,
        typer.Option(help=f"α inside a node. Default: {_NODE_ALPHA_S:g}.", show_default=False, rich_help_panel=_NODES),
    ] = None
    node_beta: Annotated[
        float | None,
        typer.Option(
            help=f"β inside a node. Default: {_NODE_BETA_S_PER_BYTE:g}, 25 GB/s.",
            show_default=False,
            rich_help_panel=_NODES,
        ),
    ] = None
    jitter: Annotated[
        float, typer.Option(help="A message's latency is up to α·(1 + this).", rich_help_panel=_NOISE)
    ] = 0.0
    compute_noise: Annotated[
        float, typer.Option(help="A slice of work takes up to 1 + this as long.", rich_help_panel=_NOISE)
    ] = 0.0
    start_noise: Annotated[
        float, typer.Option(help="Each rank begins up to so many seconds late.", rich_help_panel=_NOISE)
    ] = 0.0
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MOST_SEED,
            help="Of noise and of sparse indices: the same gives the same.",
            rich_help_panel=_NOISE,
        ),
    ] = 0
    payloads: Annotated[
        bool,
        typer.Option("--payloads", help="Send real values and check the result; without, only their sizes travel."),
    ] = False
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.", show_default=False)] = (
        None
    )
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw time against ranks and against size.", rich_help_panel=_OUTPUT)
    ] = False
    plot_file: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw it into this file. Default: simulate-….png", rich_help_panel=_OUTPUT),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write all rows and the network here.", rich_help_panel=_OUTPUT),
    ] = None
    critical_path: Annotated[
        bool,
        typer.Option("--critical-path", help="Say what the time went into, link by link.", rich_help_panel=_OUTPUT),
    ] = False
    timeline: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Write what ports and processors did, for ui.perfetto.dev.", rich_help_panel=_OUTPUT
        ),
    ] = None
    links: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write counts per rank and per link as JSON.", rich_help_panel=_OUTPUT),
    ] = None

    def drawn_into(self, operation: str) -> Path | None:
        """Where the plot goes; None for no plot. Raises ``BadParameter`` if it cannot be drawn."""
        path = self.plot_file or (Path(f"simulate-{operation.replace('_', '-')}.png") if self.plot else None)
        if path is not None and not is_installed("matplotlib"):
            raise typer.BadParameter("a plot needs matplotlib: pip install 'telegrad[cli]'", param_hint="--plot")
        check_writable(path, "--plot-file")
        return path

    def check_outputs(self) -> None:
        """Raises ``BadParameter`` for files that cannot be written, and for one that is named twice."""
        check_all_writable(
            {
                "--json": self.json_file,
                "--timeline": self.timeline,
                "--links": self.links,
                "--plot-file": self.plot_file,
            }
        )

    def all_ranks(self) -> list[int]:
        """Raises ``BadParameter`` for what is no number of ranks, and beyond ``MOST_RANKS``."""
        return ranks_of(self.ranks, "--ranks")

    def made_network(self) -> Network:
        """Raises ``BadParameter`` for names and costs that make no sense."""
        try:
            network = network_of(self.network)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--network") from error
        given = {
            "--alpha": ("alpha_s", self.alpha),
            "--beta": ("beta_s_per_byte", self.beta),
            "--beta-exchange": ("beta_exchange_s_per_byte", self.beta_exchange),
            "--gamma": ("gamma_s_per_byte", self.gamma),
        }
        for option, (name, value) in given.items():
            with _blaming(option):
                network = with_costs(network, **{name: value})
        others: dict[str, tuple[str, Any]] = {
            "--jitter": ("jitter", self.jitter),
            "--compute-noise": ("compute_noise", self.compute_noise),
            "--start-noise": ("start_noise_s", self.start_noise),
        }
        others |= self._nodes()
        for option, (name, value) in others.items():
            with _blaming(option):
                network = replace(network, **{name: value})
        return network

    def _nodes(self) -> dict[str, tuple[str, Any]]:
        if self.ranks_per_node <= 1:
            for option, value in (
                ("--oversubscription", None if self.oversubscription == 1 else self.oversubscription),
                ("--node-alpha", self.node_alpha),
                ("--node-beta", self.node_beta),
            ):
                if value is not None:
                    raise typer.BadParameter(f"{value:g} needs nodes: give --ranks-per-node too", param_hint=option)
            return {}
        return {
            "--ranks-per-node": ("ranks_per_node", self.ranks_per_node),
            "--oversubscription": ("oversubscription", self.oversubscription),
            "--node-alpha": ("node_alpha_s", _NODE_ALPHA_S if self.node_alpha is None else self.node_alpha),
            "--node-beta": (
                "node_beta_s_per_byte",
                _NODE_BETA_S_PER_BYTE if self.node_beta is None else self.node_beta,
            ),
        }


def ranks_of(text: str, option: str) -> list[int]:
    """Of ``option``. Raises ``BadParameter`` for what is no number of ranks, and beyond ``MOST_RANKS``."""
    return _numbers(text, _rank_count_of, 2, option)


def sizes_of(text: str) -> list[int]:
    """Of --bytes. Raises ``BadParameter`` for what is no size, and beyond ``MOST_BYTES``."""
    return _numbers(text, _bytes_of, 4, "--bytes")


_Command = Callable[..., None]


def shared_but(*left_out: str, **defaults: Any) -> Callable[[_Command], _Command]:
    """``command(…, settings)`` with the fields of ``SimulationSettings`` as options of its own, except those that are
    left out; ``defaults`` are other ones than theirs."""
    hints = get_type_hints(SimulationSettings, include_extras=True)
    common = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(SimulationSettings)
        if field.name not in left_out
    ]

    def with_options(command: _Command) -> _Command:
        own_hints = get_type_hints(command, include_extras=True)
        kept = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "settings"
        ]

        @functools.wraps(command)
        def call(**options: Any) -> None:
            settings = SimulationSettings(**{parameter.name: options.pop(parameter.name) for parameter in common})
            command(**options, settings=settings)

        parameters = [common[0], *kept, *common[1:]]
        vars(call)["__signature__"] = inspect.Signature(parameters)
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return with_options


shared = shared_but()


class _blaming:  # noqa: N801 - reads as a statement
    """Within it, a ``ValueError`` is a bad value of ``option``."""

    def __init__(self, option: str) -> None:
        self._option = option

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, ValueError):
            raise typer.BadParameter(str(error), param_hint=self._option) from error


def _numbers(text: str, number_of: Callable[[str], int], factor: int, option: str) -> list[int]:
    """Of ``4``, ``4,64`` or ``4..64``, ascending; a range grows by ``factor`` and ends with its end."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, dots, last = part.partition("..")
            numbers = [number_of(first)]
            if dots:
                end = number_of(last)
                if end < numbers[0]:
                    raise ValueError(f"range {part.strip()!r} ends before it begins: write the smaller number first")
                while (following := numbers[-1] * factor or factor) < end:
                    numbers.append(following)
                numbers.append(end)
            found.update(numbers)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    return sorted(found)


def _rank_count_of(text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise ValueError(f"{text!r} is no number of ranks: write it like 2048, 4,64,2048 or 2..4096")
    ranks = int(text)
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"{ranks} ranks cannot be simulated: use 1 to {MOST_RANKS:,}; memory grows with the pairs of ranks"
        )
    return ranks


def _bytes_of(text: str) -> int:
    if re.fullmatch(r"\s*0+\s*([kmg]i)?b?\s*", text.lower()):
        return 0  # a vector may be empty
    size = size_of(text)
    if size > MOST_BYTES:
        raise ValueError(f"{text.strip()} cannot be simulated: use {MOST_BYTES >> 40} TiB (1024GiB) at most")
    return size
