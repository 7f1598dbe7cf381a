"""Nodes of several ranks under the Synchronizer, over ranks in threads: what arrives and what stays, checkpoints for
other nodes, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from given_gradients import NAMED, SHAPES, Rank, given, gradients_of, sgd
from torch import Tensor

from telegrad import Cheapest, Communicator, LowRank, MismatchedCall, TransportError
from telegrad.ddp import reshard
from telegrad.errors import NonFiniteGradient

STEPS = 6
ALL = [
    {"compress": None},
    {"density": 0.05},
    {"density": 0.05, "select": "topk", "values": "qsgd4"},
    {"density": 0.05, "combine": "oktopk"},
    {"density": 0.05, "same_sign": True, "select": "topk"},
    {"warmup_steps": 2},
    {"compress": "quantised", "formats": "int8"},
    {"compress": LowRank(rank=2, small_elements=16)},
    {"momentum": 0.5, "optimizer": sgd},
    {"feedback": "steps", "optimizer": sgd},
    {"clip_norm": 500.0},
    {"compress": None, "clip_norm": 500.0},
]


def id_of(options: object) -> str:
    """Without addresses: all workers of pytest must collect the same."""
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(options))


def on_nodes(sizes: tuple[int, ...], run: Any) -> list[Any]:
    """``run`` of each rank's communicator, in threads."""
    from concurrent.futures import ThreadPoolExecutor

    numbers = [node for node, size in enumerate(sizes) for _ in range(size)]
    comms = Communicator.local(len(numbers), nodes=numbers, timeout_s=60)
    with ThreadPoolExecutor(len(comms)) as pool:
        futures = [pool.submit(run, comm) for comm in comms]
        try:
            return [one.result(120) for one in futures]
        finally:
            for comm in comms:
                comm.close()


def trained(comm: Communicator, steps: int = STEPS, **options: Any) -> tuple[Rank, dict[str, Tensor]]:
    """With the sum of its averages."""
    rank = Rank(comm, **{"plan": NAMED, "node": "auto", **options})
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(steps):
        for name, one in rank.step(gradients_of(comm.rank, step)).items():
            applied[name] += one
    return rank, applied


def mass(states: list[Mapping[str, Any]], name: str) -> np.ndarray:
    """What all residuals of a parameter are worth, as a sum over ranks."""
    entries = [state["compressor"]["parameters"].get(name) for state in reshard(states, 1)]
    return sum((one["residual"].double().numpy() * one["unit"] for one in entries if one), np.zeros(1))


@pytest.mark.parametrize("wait_in", ["backward", "step"])
@pytest.mark.parametrize("options", ALL, ids=id_of)
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(options: dict[str, Any], wait_in: str) -> None:
    def run(comm: Communicator) -> tuple[dict[str, Tensor], Any, list[Tensor]]:
        own = Rank(comm, plan=NAMED, node="auto", waits=wait_in == "step", **options)
        assert own.sync.ranks_of_node == 2
        weights = []
        applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            own.model.zero_grad()
            own.model(gradients_of(comm.rank, step)).backward()
            own.sync.wait()
            for name, one in own.averages().items():
                applied[name] += one
            own.trains.step()
            weights = [one.detach().clone() for one in own.model.parameters()]
        state = None if options.get("compress", "") is None else own.sync.state_dict()
        return applied, state, weights

    if wait_in == "step" and "optimizer" in options:
        pytest.skip("the optimizer that waits is the one that steps")
    found = on_nodes((2, 2), run)
    for applied, _, weights in found[1:]:
        assert all(torch.equal(applied[name], found[0][0][name]) for name in SHAPES)
        assert all(map(torch.equal, weights, found[0][2]))
    if options.keys() & {"momentum", "clip_norm"}:
        return
    states = [state for _, state, _ in found if state is not None]
    unit = 2.0 if "feedback" in options else 1.0  # 1 / lr: residuals hold steps
    for name, total in given(4, STEPS).items():
        left = mass(states, name).reshape(-1) * unit if states else 0.0
        np.testing.assert_allclose(found[0][0][name].reshape(-1) * 4 + left, total.reshape(-1), rtol=1e-5, atol=1e-1)


@pytest.mark.parametrize("options", [{"compress": None}, {"density": 1.0}, {"warmup_steps": STEPS}], ids=id_of)
@pytest.mark.parametrize("plan", [NAMED, "auto", "single", "wfbp"], ids=id_of)
def test_dense_averages_are_exact(options: dict[str, Any], plan: Any) -> None:
    for _, applied in on_nodes((2, 2), lambda comm: trained(comm, plan=plan, **options)):
        for name, total in given(4, STEPS).items():
            torch.testing.assert_close(applied[name] * 4, total, rtol=0, atol=0)
