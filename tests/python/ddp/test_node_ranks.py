"""Nodes of several ranks under the hook, over ranks in threads with Gloo inside of a node: what arrives and what stays,
checkpoints for other nodes, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from handmade_buckets import ONE, REBUILT, SHAPES, Trainer, gradients_of, plain_sgd
from torch.distributed import HashStore, PrefixStore, ProcessGroup

from telegrad import Communicator, LowRank
from telegrad.ddp.node_ranks import cuts_of
from telegrad.ddp.rank_state import reshard
from telegrad.errors import NonFiniteGradient, TransportError

OnRanks = Callable[..., list[Any]]
STEPS = 6


def _group(store: Any, name: str, rank: int, size: int) -> ProcessGroup:
    group = ProcessGroup(PrefixStore(name, store), rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore(f"{name} gloo", store), rank, size)  # type: ignore[attr-defined]
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


class Nodes:
    """Of ``size`` ranks each; ``sizes``: of each node."""

    def __init__(self, *sizes: int) -> None:
        self._store, self._sizes = HashStore(), sizes

    def of(self, rank: int) -> ProcessGroup:
        """The group of a rank's node."""
        first = 0
        for node, size in enumerate(self._sizes):
            if rank < first + size:
                return _group(self._store, str(node), rank - first, size)
            first += size
        raise AssertionError(rank)


def _trained(comm: Communicator, nodes: Nodes | None, first: int = 0, steps: int = STEPS, **options: Any) -> Trainer:
    trainer = Trainer(comm, **options, **({} if nodes is None else {"node": nodes.of(comm.rank)}))
    trainer.applied = {name: np.zeros(np.prod(shape)) for name, shape in SHAPES.items()}  # type: ignore[attr-defined]
    _go_on(trainer, range(first, first + steps))
    return trainer


def _go_on(trainer: Trainer, steps: range) -> list[dict[str, np.ndarray]]:
    averages = []
    for step in steps:
        averages.append(trainer.step(gradients_of(trainer.comm.rank, step), ONE if step == 0 else REBUILT))
        for name, one in averages[-1].items():
            trainer.applied[name] += one  # type: ignore[attr-defined]
    return averages


def _mass(states: list[Mapping[str, Any]], name: str) -> np.ndarray:
    """What all residuals of a parameter are worth, as a sum over ranks."""
    entries = [state["compressor"]["parameters"][name] for state in reshard(states, 1)]
    return sum(one["residual"].double().numpy() * one["unit"] for one in entries)


ALL = [
    {"compress": None},
    {"density": 0.05},
    {"density": 0.05, "select": "topk", "values": "qsgd4"},
    {"density": 0.05, "combine": "oktopk"},
    {"density": 0.05, "same_sign": True, "select": "topk"},
    {"warmup_steps": 2},
    {"warmup_steps": 5, "warmup": "falling"},
    {"compress": LowRank(rank=2, small_elements=16)},
    {"compress": LowRank(rank=2, small_elements=16), "nonfinite": "skip"},
    {"momentum": 0.5, "optimizer": plain_sgd},
    {"feedback": "steps", "optimizer": plain_sgd},
    {"clip_norm": 50.0},
    {"nonfinite": "skip"},
]


def id_of(options: dict[str, Any]) -> str:
    """Without addresses: all workers of pytest must collect the same."""
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(options))


@pytest.mark.parametrize("options", ALL, ids=id_of)
def test_nothing_is_lost_and_all_ranks_have_the_same_bits(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    nodes = Nodes(2, 2)

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        trainer = _trained(comm, nodes, **options)
        assert trainer.state.step == STEPS
        return trainer.applied, trainer.state.state_dict()  # type: ignore[attr-defined]

    found = on_ranks(4, run)
    for name in SHAPES:
        for applied, _ in found[1:]:
            np.testing.assert_array_equal(applied[name], found[0][0][name])
    if options.keys() & {"momentum", "clip_norm"}:
        return
    states = [state for _, state in found]
    compressed = {name for state in states for name in state["compressor"]["parameters"]}
    unit = 2.0 if "feedback" in options else 1.0  # 1 / lr: residuals hold steps
    for name in SHAPES:
        total = sum(gradients_of(rank, step)[name].astype(np.float64) for rank in range(4) for step in range(STEPS))
        left = _mass(states, name) * unit if name in compressed else 0.0
        np.testing.assert_allclose(found[0][0][name] * 4 + left, total, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("options", [{"compress": None}, {"density": 1.0}, {"warmup_steps": STEPS}], ids=id_of)
def test_dense_averages_are_those_of_flat_ranks(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    nodes = Nodes(2, 2)
    for found in on_ranks(4, lambda comm: _go_on(_trained(comm, nodes, steps=0, **options), range(2))):
        for step, averages in enumerate(found):
            for name in SHAPES:
                expected = sum(gradients_of(rank, step)[name] for rank in range(4)) / 4
                np.testing.assert_array_equal(averages[name], expected)


def test_clipping_is_that_of_flat_ranks(on_ranks: OnRanks) -> None:
    nodes = Nodes(2, 2)
    given = {"compress": None, "clip_norm": 50.0}
    flat = on_ranks(4, lambda comm: _trained(comm, None, **given).applied)  # type: ignore[attr-defined]
    found = on_ranks(4, lambda comm: _trained(comm, nodes, **given))
    assert [one.state.stats.clipped_steps for one in found] == [STEPS] * 4
    for name in SHAPES:
        np.testing.assert_allclose(found[0].applied[name], flat[0][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_types(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    nodes = Nodes(2, 2)

    def run(comm: Communicator) -> torch.Tensor:
        trainer = Trainer(comm, dtype, node=nodes.of(comm.rank), compress=None)
        gradients = gradients_of(comm.rank, 0)
        if dtype.is_complex:
            gradients = {name: (1 - 2j) * one for name, one in gradients.items()}
        average = trainer.start(gradients, ONE[0], 0, last=True)[1].wait()
        return torch.view_as_complex(average.view(-1, 2)) / (1 - 2j) if dtype.is_complex else average

    mean = sum(np.concatenate([gradients_of(rank, 0)[name] for name in ONE[0]]) for rank in range(4)) / 4
    for found in on_ranks(4, run):
        np.testing.assert_allclose(found.to(torch.complex64).real, mean, rtol=1e-2)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2), (1, 1), (2,), (4, 4)], ids=id_of)
def test_nodes_of_other_sizes(on_ranks: OnRanks, sizes: tuple[int, ...]) -> None:
    nodes, ranks = Nodes(*sizes), sum(sizes)
    found = on_ranks(ranks, lambda comm: _trained(comm, nodes, select="topk"))
    states = [one.state.state_dict() for one in found]
    for name in SHAPES:
        total = sum(gradients_of(rank, step)[name].astype(np.float64) for rank in range(ranks) for step in range(STEPS))
        compressed = any(name in state["compressor"]["parameters"] for state in states)
        left = _mass(states, name) if compressed else 0.0
        np.testing.assert_allclose(found[-1].applied[name] * ranks + left, total, rtol=1e-5, atol=1e-2)


def test_pieces_cover_every_parameter_once() -> None:
    shapes = {"table": (1000, 8), "square": (40, 40), "few_rows": (2, 4000), "bias": (40,), "scalar": (), "none": (0,)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    image = torch.nn.Parameter(torch.zeros(64, 8, 3, 3).to(memory_format=torch.channels_last))
    parameters["image"] = image
    for size in (1, 2, 3, 8):
        cuts = cuts_of(parameters, size, {"square": 4})
        for name, one in parameters.items():
            assert (cuts[name][0], cuts[name][-1], len(cuts[name])) == (0, one.numel(), size + 1)
            assert cuts[name] == sorted(cuts[name])
        assert sum(0 < end < 8000 for end in cuts["table"]) == size - 1, "it is cut by rows"
        assert all(end % 8 == 0 for end in cuts["table"])
        for name in ("square", "few_rows", "bias", "image"):
            is_whole = set(cuts[name]) <= {0, parameters[name].numel()}
            assert is_whole or (size, name) == (2, "few_rows"), (
                "small ones, matrices, and other orders of memory are not"
            )


def test_matrices_are_cut_only_where_pieces_are_worth_it() -> None:
    parameters = {"table": torch.nn.Parameter(torch.zeros(4000, 64)), "small": torch.nn.Parameter(torch.zeros(64, 64))}
    assert cuts_of(parameters, 2, {"table": 4, "small": 4}) == {"table": [0, 128000, 256000], "small": [0, 4096, 4096]}
    assert cuts_of(parameters, 2, {"table": 40, "small": 4})["table"] == [0, 256000, 256000]


OPTIONS = [
    {"density": 0.05},
    {"compress": LowRank(rank=2, small_elements=16)},
    {"momentum": 0.5, "optimizer": plain_sgd},
    {"density": 0.05, "combine": "oktopk"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
def test_a_resumed_run_has_the_same_bits(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    nodes, again, whole = Nodes(2, 2), Nodes(2, 2), Nodes(2, 2)
    saved = on_ranks(4, lambda comm: _trained(comm, nodes, **options).state.state_dict())

    def resume(comm: Communicator) -> list[dict[str, np.ndarray]]:
        trainer = _trained(comm, again, steps=0, **options)
        trainer.state.load_state_dict(saved[comm.rank])
        return _go_on(trainer, range(STEPS, STEPS + 4))

    found = on_ranks(4, resume)
    expected = on_ranks(4, lambda comm: _go_on(_trained(comm, whole, **options), range(STEPS, STEPS + 4)))
    for one, other in zip(found, expected, strict=True):
        for averages, wanted in zip(one, other, strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(averages[name], wanted[name])


@pytest.mark.parametrize("options", OPTIONS[:3], ids=id_of)
def test_checkpoints_move_to_flat_ranks_and_back(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    four = Nodes(2, 2)
    saved = on_ranks(4, lambda comm, nodes=four: _trained(comm, nodes, **options).state.state_dict())
    before = {name: _mass(saved, name) for name in {name for one in saved for name in one["compressor"]["parameters"]}}
    assert any(np.abs(one).max() > 1 for one in before.values())
    for nodes in (None, Nodes(2, 2), Nodes(4), None):
        shares = reshard(saved, 4)

        def resume(comm: Communicator, nodes: Nodes | None = nodes, shares: Any = shares) -> dict[str, Any]:
            trainer = _trained(comm, nodes, steps=0, **options)
            trainer.state.load_state_dict(shares[comm.rank])
            state = trainer.state.state_dict()
            _go_on(trainer, range(STEPS, STEPS + 2))
            return state

        saved = on_ranks(4, resume)
        for name, mass in before.items():
            np.testing.assert_allclose(_mass(saved, name), mass, rtol=1e-5, atol=1e-4)


def test_states_of_other_nodes_are_refused(on_ranks: OnRanks) -> None:
    two = Nodes(2)
    of_nodes = on_ranks(2, lambda comm, nodes=two: _trained(comm, nodes).state.state_dict())
    flat = on_ranks(2, lambda comm: _trained(comm, None).state.state_dict())

    def load(comm: Communicator, nodes: Nodes | None, states: Any) -> None:
        trainer = _trained(comm, nodes, steps=0)
        with pytest.raises(ValueError, match="telegrad.ddp.reshard makes states for other nodes"):
            trainer.state.load_state_dict(states[comm.rank])

    on_ranks(2, lambda comm: load(comm, None, of_nodes))
    two = Nodes(2)
    on_ranks(2, lambda comm, nodes=two: load(comm, nodes, flat))
    with pytest.raises(ValueError, match="^states are of nodes of different numbers of ranks"):
        reshard([of_nodes[0], flat[1]], 2)


def test_uneven_nodes_are_refused(on_ranks: OnRanks) -> None:
    def run(comm: Communicator, nodes: Nodes) -> None:
        with pytest.raises(ValueError, match=r"node= has \d ranks, and comm \[1, 3\] of 2 nodes: give each rank the"):
            _trained(comm, nodes)

    uneven = Nodes(3, 1)
    on_ranks(4, lambda comm, nodes=uneven: run(comm, nodes))


def test_what_is_no_node() -> None:
    (comm,) = Communicator.local(1)
    with pytest.raises(TypeError, match="node=3 must be 'auto', the torch.distributed.ProcessGroup of"):
        Trainer(comm, node=3)
    with pytest.raises(ValueError, match="node= is a process group without this rank"):
        Trainer(comm, node=dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.parametrize("policy", ["raise", "skip", "send"])
def test_a_nan_of_one_rank(on_ranks: OnRanks, policy: str) -> None:
    nodes, all_trained = Nodes(2, 2), Barrier(4)

    def run(comm: Communicator) -> Any:
        trainer = _trained(comm, nodes, steps=2, nonfinite=policy)
        all_trained.wait(60)  # else a rank may hear of the error while it ends the pass before
        before = trainer.memory()
        bad = gradients_of(comm.rank, 2)
        if comm.rank == 3:
            bad["embedding"][5] = np.nan
        try:
            averages = trainer.step(bad, REBUILT)
        except (NonFiniteGradient, TransportError) as error:
            comm.abort(str(error))
            return error
        after = trainer.memory()
        same = all(
            np.array_equal(before["parameters"][name]["residual"], after["parameters"][name]["residual"])
            for name in before["parameters"]
        )
        return averages, trainer.state.skipped, same

    found = on_ranks(4, run)
    if policy == "raise":
        assert isinstance(found[2], NonFiniteGradient), "it has the piece, of the sum of ranks 2 and 3"
        assert "rank 2, for its node, step 2: 1 of 600 entries in the gradient of 'embedding'" in str(found[2])
        assert [isinstance(found[rank], TransportError) for rank in (0, 1, 3)] == [True] * 3
    elif policy == "skip":
        for averages, skipped, same in found:
            assert (skipped, same) == (True, True)
            assert not any(one.any() for one in averages.values())
    else:
        assert all(math.isnan(averages["embedding"][5]) for averages, _, _ in found)
        assert all(np.isfinite(averages["hidden"]).all() for averages, _, _ in found)


def test_a_rank_that_stays_away_is_an_error_on_all_others(on_ranks: OnRanks) -> None:
    """Those of its own node wait in torch for it, which would last for half an hour."""
    nodes, all_trained = Nodes(2, 2), Barrier(4)

    def run(comm: Communicator) -> Any:
        trainer = _trained(comm, nodes, steps=2)
        all_trained.wait(60)  # an abort ends also what other ranks have not finished
        if comm.rank == 1:
            comm.abort("rank 1 has had enough")
            return None
        with pytest.raises(TransportError, match="rank 1 has had enough"):
            trainer.step(gradients_of(comm.rank, 2), REBUILT)
        return True

    assert on_ranks(4, run) == [True, None, True, True]
