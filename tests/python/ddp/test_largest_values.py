"""Gradients near the largest float32, in wires that hold less: the rest waits, and nothing is infinite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import given_gradients
import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, Trainer, gradients_of

from telegrad import Communicator

OnRanks = Callable[..., list[Any]]
LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("wire", ["auto", "f16", "bf16", "packed-bf16", "int8", "qsgd8", "qsgd4", "e3m0", "codebook2"])
@pytest.mark.parametrize(("ranks", "sign"), [(1, 1), (3, 1), (3, -1)])
def test_a_compressed_bucket(on_ranks: OnRanks, wire: str, ranks: int, sign: int) -> None:
    """Of which one rank alone has such a value. Two ranks halve values before they round them."""

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = Trainer(comm, values=wire, select="topk", nonfinite="raise")
        gradients = {name: np.zeros_like(one) for name, one in gradients_of(comm.rank, 0).items()}
        if comm.rank == ranks - 1:
            gradients["hidden"][[3, 700]] = sign * LARGEST, -1.0
        averages = trainer.step(gradients, ONE)
        return averages, {name: trainer.waiting(name) for name in LARGE}

    outcomes = on_ranks(ranks, run)
    averages = outcomes[0][0]
    assert all(np.isfinite(one).all() for _, waits in outcomes for one in [*averages.values(), *waits.values()])
    total = ranks * averages["hidden"].astype(np.float64) + sum(waits["hidden"] for _, waits in outcomes)
    assert total[3] == pytest.approx(sign * LARGEST, rel=1e-6)


@pytest.mark.parametrize("wire", ["bf16", "int8", "qsgd8", "qsgd4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_quantised_group(on_ranks: OnRanks, wire: str, sign: int) -> None:
    def run(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        rank = given_gradients.Rank(comm, plan="single", compress="quantised", formats=wire)
        gradients = {name: torch.zeros_like(one) for name, one in given_gradients.gradients_of(comm.rank, 0).items()}
        if comm.rank == 1:
            gradients["hidden"].view(-1)[[3, 700]] = torch.tensor([sign * LARGEST, -1.0])
        return rank.step(gradients)["hidden"].flatten(), rank.waiting()["hidden"].flatten()

    (average, waits), (_, waits_of_1) = on_ranks(2, run)
    assert all(one.isfinite().all() for one in (average, waits, waits_of_1))
    assert (2 * average.double() + waits + waits_of_1)[3].item() == pytest.approx(sign * LARGEST, rel=1e-6)
