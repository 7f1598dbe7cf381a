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

from telegrad import Cheapest, Communicator, LowRank, TransportError
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
    comms = Communicator.local(len(numbers), nodes=numbers, timeout_s=20)
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


@pytest.mark.parametrize(
    ("options", "wait_in"),
    [
        *((options, "backward") for options in ALL),
        *((options, "step") for options in ALL if options.keys() <= {"compress", "density"}),
    ],
    ids=id_of,
)
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


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        *((plan, {"compress": None}) for plan in (NAMED, "auto", "single", "wfbp")),
        *(("auto", {"density": 1.0}), ("wfbp", {"warmup_steps": STEPS})),
    ],
    ids=id_of,
)
def test_dense_averages_are_exact(options: dict[str, Any], plan: Any) -> None:
    for _, applied in on_nodes((2, 2), lambda comm: trained(comm, plan=plan, **options)):
        for name, total in given(4, STEPS).items():
            torch.testing.assert_close(applied[name] * 4, total, rtol=0, atol=0)


def drawn(rank: int, step: int) -> dict[str, Tensor]:
    """Gradients without two entries of one size."""
    rng = np.random.default_rng([rank, step])
    return {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in SHAPES.items()}


def test_averages_are_those_of_a_reference() -> None:
    """Of every node's mean and residual the largest entries of each half of a large parameter, to the bit."""

    def run(comm: Communicator) -> list[dict[str, Tensor]]:
        rank = Rank(comm, plan=NAMED, node="auto", density=0.05, select="topk")
        return [rank.step(drawn(comm.rank, step)) for step in range(STEPS)]

    residuals: dict[tuple[int, str, int], np.ndarray] = {}
    found = on_nodes((2, 2), run)
    for step in range(STEPS):
        for name, shape in SHAPES.items():
            means = [
                sum(drawn(2 * node + one, step)[name].numpy().ravel() for one in range(2)) / 2 for node in range(2)
            ]
            expected = (means[0] + means[1]) / 2
            if len(shape) == 2 and expected.size > 16:
                rows = [shape[0] * one // 2 * shape[1] for one in range(3)]
                for half in range(2) if expected.size >= 512 else ():
                    where, sums = slice(*rows[half : half + 2]), 0
                    for node in range(2):
                        held = means[node][where] + residuals.get((node, name, half), np.float32(0))
                        count = int(np.ceil(0.05 * held.size))
                        chosen = np.argsort(-np.abs(held))[:count]
                        sent = np.zeros_like(held)
                        sent[chosen] = held[chosen]
                        residuals[node, name, half] = held - sent
                        sums = sums + sent
                    expected[where] = sums / np.float32(2)
            for averages in found:
                np.testing.assert_array_equal(averages[step][name].numpy().ravel(), expected, err_msg=f"{step} {name}")


OPTIONS = [
    {"density": 0.05},
    {"compress": LowRank(rank=2, small_elements=16)},
    {"momentum": 0.5, "optimizer": sgd},
    {"density": 0.05, "combine": "oktopk"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
def test_a_resumed_run_has_the_same_bits(options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> None:
        first, _ = trained(comm, **options)
        second, _ = trained(comm, steps=0, **options)
        second.sync.load_state_dict(first.sync.state_dict())
        for step in range(STEPS, STEPS + 3):
            averages = [one.step(gradients_of(comm.rank, step)) for one in (first, second)]
            assert all(torch.equal(averages[0][name], averages[1][name]) for name in SHAPES)

    on_nodes((2, 2), run)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=id_of)
def test_checkpoints_move_to_flat_ranks_and_other_nodes(options: dict[str, Any]) -> None:
    saved = on_nodes((2, 2), lambda comm: trained(comm, **options)[0].sync.state_dict())
    before = {name: mass(saved, name) for name in {name for one in saved for name in one["compressor"]["parameters"]}}
    assert any(np.abs(one).max() > 1 for one in before.values())
    for sizes, node in (((1,) * 4, None), ((2, 2), "auto"), ((4,), "auto"), ((1,) * 4, None)):
        shares = reshard(saved, 4)

        def resume(comm: Communicator, node: Any = node, shares: Any = shares, saved: Any = saved) -> dict[str, Any]:
            rank, _ = trained(comm, steps=0, **{**options, "node": node})
            with pytest.raises(ValueError, match="telegrad.ddp.reshard makes states for other nodes"):
                rank.sync.load_state_dict({**saved[comm.rank], "node": [3, 0, {}]})
            rank.sync.load_state_dict(shares[comm.rank])
            state = rank.sync.state_dict()
            rank.step(gradients_of(comm.rank, STEPS))
            return state

        saved = on_nodes(sizes, resume)
        for name, one in before.items():
            np.testing.assert_allclose(mass(saved, name), one, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2), (1, 1), (2,), (4, 4)], ids=id_of)
def test_nodes_of_other_sizes(sizes: tuple[int, ...]) -> None:
    ranks = sum(sizes)
    found = on_nodes(sizes, lambda comm: (trained(comm, select="topk"), comm.rank))
    states = [rank.sync.state_dict() for (rank, _), _ in found]
    for name, total in given(ranks, STEPS).items():
        left = mass(states, name)
        summed = found[-1][0][1][name].reshape(-1) * ranks + torch.from_numpy(left)
        np.testing.assert_allclose(summed.numpy(), total.numpy().reshape(-1), rtol=1e-5, atol=1e-1)


def test_passes_that_are_not_averaged_add_up() -> None:
    def run(comm: Communicator) -> dict[str, Tensor]:
        rank = Rank(comm, plan=NAMED, node="auto", density=1.0)
        with rank.sync.no_sync():
            rank.model(gradients_of(comm.rank, 0)).backward()
        rank.model(gradients_of(comm.rank, 1)).backward()
        return rank.averages()

    for averages in on_nodes((2, 2), run):
        for name, total in given(4, 2).items():
            torch.testing.assert_close(averages[name].double() * 4, total, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"compress": None}, {"density": 1.0}], ids=id_of)
def test_parameters_that_some_ranks_do_not_use(options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(comm, plan=NAMED, node="auto", **options)
        names = ("norm", "hidden") if comm.rank == 1 else ("norm", "bias")
        some = rank.step(gradients_of(comm.rank, 0, names))
        rank.model(gradients_of(comm.rank, 1, ("norm",))).backward()  # without zero_grad(): others keep what they had
        return some, rank.averages()

    (some, kept), *others = on_nodes((2, 2), run)
    assert {*some} == {"norm", "hidden", "bias"}
    torch.testing.assert_close(some["hidden"] * 4, gradients_of(1, 0)["hidden"], rtol=0, atol=0)
    assert torch.equal(kept["hidden"], some["hidden"])
    assert all(torch.equal(kept[name], one[1][name]) for one in others for name in kept)


def test_an_earlier_average_that_meets_gradients_of_others_is_an_error() -> None:
    def run(comm: Communicator) -> str:
        rank = Rank(comm, plan=NAMED, node="auto")
        rank.step(gradients_of(comm.rank, 0))
        names = ("norm",) if comm.rank == 1 else ("norm", "hidden")
        try:
            for step in range(1, 3):
                rank.model(gradients_of(comm.rank, step, names)).backward()
        except (RuntimeError, TransportError) as error:
            return str(error)
        return ""

    texts = on_nodes((2, 2), run)
    assert "'hidden' has an average of an earlier pass here, and a gradient on another rank" in texts[1]
    assert all("call zero_grad() before each backward pass" in text for text in texts)


@pytest.mark.parametrize("policy", ["raise", "send"])
def test_a_nan_of_one_rank(policy: str) -> None:
    def run(comm: Communicator) -> Any:
        rank, _ = trained(comm, steps=2, nonfinite=policy)
        comm.barrier()  # else a rank may hear of the error while it ends the pass before
        bad = gradients_of(comm.rank, 2)
        if comm.rank == 3:
            bad["embedding"][0, 5] = torch.nan
        try:
            return rank.step(bad)
        except (NonFiniteGradient, TransportError) as error:
            return error

    found = on_nodes((2, 2), run)
    if policy == "send":
        assert all(averages["embedding"][0, 5].isnan() for averages in found)
        assert all(averages["hidden"].isfinite().all() for averages in found)
        return
    assert "rank 2, for its node, step 2: 1 of 600 entries in the gradient of 'embedding'" in str(found[2])
    assert isinstance(found[2], NonFiniteGradient)
    assert [isinstance(found[rank], TransportError) for rank in (0, 1, 3)] == [True] * 3


def test_a_nan_arrives_where_nothing_is_compressed() -> None:
    def run(comm: Communicator) -> dict[str, Tensor]:
        bad = gradients_of(comm.rank, 0)
        if comm.rank == 3:
            bad["embedding"][0, 5] = torch.nan
        return Rank(comm, plan=NAMED, node="auto", compress=None).step(bad)

    for averages in on_nodes((2, 2), run):
        assert averages["embedding"].isnan().sum() == 1


def test_a_rank_that_stays_away_is_an_error_on_all_others() -> None:
    def run(comm: Communicator) -> Any:
        rank, _ = trained(comm, steps=2)
        comm.barrier()
        if comm.rank == 1:
            rank.sync.comm.abort("rank 1 has had enough")
            return None
        with pytest.raises(TransportError, match="rank 1 has had enough"):
            rank.step(gradients_of(comm.rank, 2))
        return True

    assert on_nodes((2, 2), run) == [True, None, True, True]


REFUSED = [
    ({"plan": "optimal"}, "plan='optimal' needs times of sums, which nodes lack: use 'auto'"),
    ({"compress": Cheapest(), "plan": "auto"}, r"compress=Cheapest\(\) needs times of sums"),
    ({"delay": 1}, "node= shares averages in one order, and delay=1 waits for each in another"),
    ({"compress": None, "wait_in": "forward"}, "and wait_in='forward' waits for each in another"),
    ({"node": 3}, "node=3 must be 'auto', the torch.distributed.ProcessGroup"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=id_of)
def test_what_does_not_go_with_nodes(options: dict[str, Any], text: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises((ValueError, TypeError), match=text):
            Rank(comm, **{"plan": NAMED, "node": "auto", **options})

    on_nodes((2, 2), run)


def test_ranks_that_disagree_on_nodes() -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="ranks_of_node of rank 3 and rank 0 differ: give all ranks the same"):
            Rank(comm, plan=NAMED, node=None if comm.rank == 3 else "auto")

    on_nodes((2, 2), run)

    def uneven(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"node='auto' needs as many ranks on each node, and there are \[1, 3\]"):
            Rank(comm, plan=NAMED, node="auto")

    on_nodes((3, 1), uneven)
