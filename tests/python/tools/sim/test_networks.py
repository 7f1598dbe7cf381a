"""Networks by name and what their costs are."""

from __future__ import annotations

import pytest

from telegrad.cost import Costs
from telegrad.tools.sim.measure import NAMED, Network, network_of, with_costs


@pytest.mark.parametrize("name", [*NAMED, "2.5gbit", "100MBIT", " 40gbit "])
def test_a_rate_gives_costs_and_says_its_assumptions(name: str) -> None:
    network = network_of(name)
    bits = float(name.strip().lower().removesuffix("gbit").removesuffix("mbit"))
    line_s_per_byte = 8 / (bits * (1e6 if "m" in name.lower() else 1e9))
    assert line_s_per_byte < network.costs.beta_s_per_byte < 1.1 * line_s_per_byte
    assert "assumes" in network.about
    assert f"α {network.costs.alpha_s * 1e6:g} µs" in network.about
    assert network.is_plain


def test_faster_networks_have_less_latency() -> None:
    assert network_of("100gbit").costs.alpha_s < network_of("25gbit").costs.alpha_s
    assert "RDMA" in network_of("100gbit").about
    assert "TCP" in network_of("99gbit").about


@pytest.mark.parametrize("name", ["", "fast", "0gbit", "-1gbit", "1 gbit x", "gbit"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not known: use 1gbit, .*, 400gbit or any other rate"):
        network_of(name)


def test_given_costs_replace_those_of_the_name() -> None:
    network = with_costs(network_of("10gbit"), alpha_s=5e-6, beta_s_per_byte=None, gamma_s_per_byte=0.0)
    assert network.costs == Costs(5e-6, network_of("10gbit").costs.beta_s_per_byte, 0.0, 0.0)
    assert network.about.endswith("given: alpha_s=5e-06, gamma_s_per_byte=0")
    assert with_costs(network, alpha_s=None) is network


def test_the_core_gets_every_field_by_its_name() -> None:
    fields = Network(Costs(1, 2, 3, 4), "", 5, 6, 7, 8, 9, 10, 11).fields_of_core()
    names = ("alpha_s", "beta_s_per_byte", "beta_exchange_s_per_byte", "gamma_s_per_byte")
    others = ("jitter", "compute_noise", "start_noise_s", "ranks_per_node", "node_alpha_s", "node_beta_s_per_byte")
    assert fields == dict(zip((*names, *others, "oversubscription"), range(1, 12), strict=True))


@pytest.mark.parametrize("name", ["jitter", "compute_noise", "start_noise_s", "node_alpha_s", "node_beta_s_per_byte"])
def test_negative_figures_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1 must be a finite number, 0 or more"):
        Network(Costs(), **{name: -1})  # type: ignore[arg-type]


def test_bad_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks_per_node=-1 must be 0"):
        Network(Costs(), ranks_per_node=-1)
    with pytest.raises(ValueError, match="oversubscription=0.5 must be 1"):
        Network(Costs(), ranks_per_node=2, oversubscription=0.5)
