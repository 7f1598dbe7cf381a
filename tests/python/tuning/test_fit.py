"""The costs from measured times: exact on exact times, and what outliers do to them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

import pytest
from ideal_network import seconds_of

from telegrad.tuning.probes import ADDED_BYTES, CostFit, Probe, fit_costs, line_of, probes

_SIZES = [1 << power for power in range(12, 23)]
_COSTS = {
    "alpha_s": 2e-5,
    "beta_s_per_byte": 8.3e-9,
    "beta_exchange_s_per_byte": 9.5e-9,
    "gamma_s_per_byte": 1e-10,
}
_FIT = CostFit(2e-5, 8.3e-9, ((1 << 15, 9.5e-9),), 1e-10, message_s=0.0, round_s=2e-5)


def _medians(costs: Mapping[str, float], ranks: int) -> dict[Probe, float]:
    """What a network with exactly these costs would give."""
    return {one: seconds_of(one.kind, one.bytes, costs, ranks) for one in probes(_SIZES, _SIZES)}


def test_probes_are_of_every_kind() -> None:
    assert probes([8], [16, 32]) == [
        Probe("round", 0),
        Probe("one_way", 8),
        Probe("exchange", 16),
        Probe("exchange", 32),
        Probe("addition", ADDED_BYTES),
    ]


def test_a_line_is_found_exactly() -> None:
    line = line_of([(size, 3e-5 + size * 8.3e-9) for size in _SIZES])
    assert line.intercept_s == pytest.approx(3e-5)
    assert line.slope_s_per_byte == pytest.approx(8.3e-9)


@pytest.mark.parametrize("outliers", [(0,), (10,), (0, 5), (3, 9, 10)])
@pytest.mark.parametrize("factor", [0.01, 3.0, 100.0])
def test_outliers_do_not_bend_a_line(outliers: tuple[int, ...], factor: float) -> None:
    noise = random.Random(0)
    points = [(size, (3e-5 + size * 8.3e-9) * (1 + noise.uniform(-1e-3, 1e-3))) for size in _SIZES]
    for index in outliers:
        points[index] = (points[index][0], points[index][1] * factor)
    line = line_of(points)
    assert line.intercept_s == pytest.approx(3e-5, rel=0.1)
    assert line.slope_s_per_byte == pytest.approx(8.3e-9, rel=0.02)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "a line needs two lengths"),
        ([(1024, 1e-5), (1024, 2e-5)], "are of one length: a line needs two lengths"),
        ([(0, 1e-6), (1024, 1e-5)], "contain a message without bytes"),
    ],
)
def test_too_few_points_make_no_line(points: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        line_of(points)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_costs_of_a_plain_network_are_found_again(ranks: int) -> None:
    found = fit_costs(_medians(_COSTS, ranks), ranks)
    assert dataclasses.asdict(found.plain_costs()) == {name: pytest.approx(cost) for name, cost in _COSTS.items()}
    assert found.round_s == pytest.approx(2e-5)
    assert found.message_s == pytest.approx(0, abs=1e-12)
    slower = {one: seconds + 5e-6 * (one.kind == "one_way") for one, seconds in _medians(_COSTS, ranks).items()}
    assert fit_costs(slower, ranks).message_s == pytest.approx(5e-6)


def test_costs_that_cannot_be_are_not_found() -> None:
    faster = fit_costs(_medians({**_COSTS, "alpha_s": -1e-5, "beta_exchange_s_per_byte": 7e-9}, 4), 4)
    assert faster.alpha_s == 0
    assert {beta for _, beta in faster.exchange} == {faster.beta_s_per_byte}
    with pytest.raises(ValueError, match="medians lack round, exchange"):
        fit_costs({one: 1.0 for one in probes([8], [8]) if one.kind in ("one_way", "addition")}, 4)


def test_plain_costs_take_the_long_exchanges() -> None:
    exchange = ((1 << 10, 9e-8), (1 << 15, 1e-8), (1 << 17, 2e-8), (1 << 20, 4e-8))
    costs = dataclasses.replace(_FIT, exchange=exchange).plain_costs()
    assert costs.beta_exchange_s_per_byte == 2e-8
    assert (costs.alpha_s, costs.beta_s_per_byte, costs.gamma_s_per_byte) == (2e-5, 8.3e-9, 1e-10)
    assert dataclasses.replace(_FIT, exchange=exchange[:1]).plain_costs().beta_exchange_s_per_byte == 9e-8


def test_the_residual_says_how_far_off_the_messages_are() -> None:
    exact = _medians(_COSTS, 4)
    fit = fit_costs(exact, 4)
    assert fit.residual(exact) == pytest.approx(0, abs=1e-9)
    off = {probe: seconds / 1.25 if probe.kind != "addition" else seconds for probe, seconds in exact.items()}
    assert fit.residual(off) == pytest.approx(0.25)
    assert fit.seconds(Probe("exchange", 1 << 20)) == pytest.approx(2e-5 + (1 << 20) * 9.6e-9)
    assert math.isnan(fit.seconds(Probe("round", 0)))


def test_costs_survive_a_few_bad_medians() -> None:
    medians = _medians(_COSTS, 4)
    for size in (1 << 13, 1 << 18, 1 << 21):
        medians[Probe("one_way", size)] *= 20
        medians[Probe("exchange", size)] *= 20
    costs = fit_costs(medians, 4).plain_costs()
    assert costs.alpha_s == pytest.approx(_COSTS["alpha_s"], rel=0.05)
    assert costs.beta_s_per_byte == pytest.approx(_COSTS["beta_s_per_byte"], rel=0.05)
    assert costs.beta_exchange_s_per_byte == pytest.approx(_COSTS["beta_exchange_s_per_byte"], rel=0.05)
