"""``--tuning``: costs that ``telegrad calibrate`` has measured, for the commands that predict from costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from telegrad.plan import Costs, Place, Tuning
from telegrad.plan.cluster import NODE, Cluster

TuningOption = Annotated[
    Path | None,
    typer.Option(
        "--tuning",
        exists=True,
        dir_okay=False,
        help="Measured costs instead of a named network's: what telegrad calibrate wrote with --json, or a file that "
        "it keeps.",
        rich_help_panel="The network",
        show_default=False,
    ),
]


def read_tuning(path: Path) -> Tuning:
    """Raises ``BadParameter`` for a file that holds none."""
    try:
        text = path.read_text()
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no tuning but damaged JSON ({error}): calibrate again") from error
        inner = found.get("tuning") if isinstance(found, dict) else None
        return Tuning.from_json(text) if inner is None else Tuning.from_data(inner)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--tuning") from error


def cluster_of(tuning: Tuning, nodes: int, per_node: int) -> Cluster:
    """So many ranks on the network that was measured, where those of a node share its link."""
    ranks, within = nodes * per_node, tuning.within or NODE
    if nodes == 1 and tuning.within is None and len(tuning.place.hosts) == 1:
        within = tuning.costs
    sharing = _ranks_to_a_link(tuning.place)
    port, oversubscription = tuning.costs.with_bytes_times(1 / sharing), float(per_node)
    if tuning.alone is not None and port.beta_s_per_byte > 0:  # one rank may send less than the link carries
        slower = min(max(1.0, tuning.alone.beta_s_per_byte / port.beta_s_per_byte), sharing)
        port, oversubscription = port.with_bytes_times(slower), max(1.0, per_node / slower)
    return Cluster(ranks, port, per_node, within, oversubscription=oversubscription)


def about_tuning(tuning: Tuning) -> str:
    """Its costs in words, and while how many ranks sent at once they were measured."""
    sharing = _ranks_to_a_link(tuning.place)
    return (
        f"measured among {tuning.place}, {sharing:.3g} rank{'' if sharing == 1 else 's'} to a link: "
        f"{about_costs(tuning.costs)}{_alone(tuning)}"
    )


def _alone(tuning: Tuning) -> str:
    return "" if tuning.alone is None else f", {_rate(tuning.alone)} while one rank of a node sends alone"


def _ranks_to_a_link(place: Place) -> float:
    """How many ranks shared one while messages were measured, as all ranks send at once then. A tuning of one host
    without levels does not say whether its ranks had a link each, as in the network laboratory; it is taken so."""
    if place.nodes:
        return place.ranks / len(set(place.nodes))
    return place.ranks / len(place.hosts) if len(place.hosts) > 1 else 1.0


def about_costs(costs: Costs) -> str:
    """In words."""
    return f"α {costs.alpha_s * 1e6:.3g} µs, {_rate(costs)}, γ {costs.gamma_s_per_byte * 1e9:.3g} ns per byte"


def _rate(costs: Costs) -> str:
    return f"{1e-9 / costs.beta_s_per_byte:.3g} GB/s" if costs.beta_s_per_byte else "any rate"
