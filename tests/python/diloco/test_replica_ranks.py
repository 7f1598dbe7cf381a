"""Replicas of several ranks: bit for bit as replicas of one rank, with DDP or fully_shard inside."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replicas import flat, network, train
from threaded_ranks import on_ranks, outcomes

from telegrad import Communicator, DiLoCo, NonFiniteGradient, Quantised, Streaming, TopK, TransportError
from telegrad.compress import BucketTopK
from telegrad.diloco import ReplicaGroup
from telegrad.launch import Ranks

torch = pytest.importorskip("torch")
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"compress": TopK(4 / 32, BucketTopK(32, 4), small_elements=0, combine="allgather"), "decay": 0.9},
    "codebook": {"compress": TopK(0.1, small_elements=0, values="packed-codebook2", combine="allgather")},
    "rounded": {"compress": Quantised("int8", small_elements=0)},
    "streaming": {"streaming": Streaming(3, delay=2, mix=0.5)},
}


def trained(comm: Communicator, replica: int, data: int, steps: range, **options: Any) -> tuple[Any, DiLoCo]:
    """Ranks of one replica have the same data, so that their gradients have the average that DDP would give them."""
    model = network(comm.rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    diloco = DiLoCo(model, comm, optimizer, every=4, replica=replica, **options)
    train(model, optimizer, data, steps)
    return model, diloco


def state_of(model: Any) -> bytes:
    return b"".join(one.detach().contiguous().numpy().tobytes() for one in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("replicas", "ranks"), [(2, 2), (3, 2), (2, 3)])
def test_rounds_are_those_of_replicas_of_one_rank(kind: str, replicas: int, ranks: int) -> None:
    def run(comm: Communicator, inside: int) -> tuple[bytes, int]:
        model, diloco = trained(comm, inside, comm.rank // inside, range(14), **OPTIONS[kind])
        diloco.exchange()
        found = state_of(model), diloco.rounds
        diloco.close()
        return found

    alone = on_ranks(replicas, lambda comm: run(comm, 1))
    several = on_ranks(replicas * ranks, lambda comm: run(comm, ranks))
    # Codebooks and draws are of a rank's message, and so are sums of three of where a message is cut.
    if kind == "sparse" or (replicas == 2 and kind in ("dense", "streaming")):
        assert {*several} == {*alone}
    assert len({*several}) == 1


def test_ranks_divide_what_is_sent() -> None:
    def run(comm: Communicator, inside: int) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        diloco = DiLoCo(model, comm, optimizer, every=None, replica=inside, verify=0)
        before = diloco.comm.stats()["bytes_sent"]
        diloco.exchange()
        return int(diloco.comm.stats()["bytes_sent"] - before)

    (whole, _), parts = on_ranks(2, lambda comm: run(comm, 1)), on_ranks(4, lambda comm: run(comm, 2))
    assert whole == 4 * 4 * 64**2
    assert {*parts} == {whole // 2}


@pytest.mark.parametrize("kind", ["sparse", "streaming"])
def test_training_goes_on_bitwise_from_a_state(kind: str) -> None:
    def run(comm: Communicator) -> None:
        data = comm.rank // 2
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        diloco = DiLoCo(model, comm, optimizer, every=4, replica=2, **OPTIONS[kind])
        train(model, optimizer, data, range(7))
        state, inner = diloco.state_dict(), copy.deepcopy(optimizer.state_dict())
        other = network(7)
        other_optimizer = torch.optim.AdamW(other.parameters(), 0.01)
        resumed = DiLoCo(other, comm, other_optimizer, every=4, replica=2, **OPTIONS[kind])
        resumed.load_state_dict(state)
        other_optimizer.load_state_dict(inner)
        train(model, optimizer, data, range(7, 14))
        train(other, other_optimizer, data, range(7, 14))
        assert state_of(model) == state_of(other)
        assert diloco.rounds == resumed.rounds > 1
        with pytest.raises(ValueError, match="state\\['common'\\] is not of this model"):
            diloco.load_state_dict({**state, "common": {}})

    on_ranks(4, run)


@pytest.mark.parametrize("kind", ["sparse", "streaming"])
def test_a_rank_that_diverges_is_told_to_all_and_nothing_changes(kind: str) -> None:
    """The others of its replica, and those at its position, exchange or have exchanged their parts already."""

    def run(comm: Communicator) -> list[BaseException]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        diloco = DiLoCo(model, comm, optimizer, every=4, replica=2, **OPTIONS[kind])
        train(model, optimizer, comm.rank // 2, range(7))
        before = diloco.checksum(), str(diloco.state_dict()["compressor"])
        all_trained.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank >= 2:
            with torch.no_grad():
                model[3].bias.fill_(math.nan)
        with pytest.raises((NonFiniteGradient, TransportError)) as raised:
            train(model, optimizer, comm.rank // 2, range(7, 20))
        state = diloco.state_dict()
        if kind == "sparse":
            assert (diloco.checksum(), str(state["compressor"])) == before
        assert all(one["left"] is None for one in state["fragments"])
        assert all(comm_round == diloco.rounds for comm_round in told(comm, diloco.rounds))
        return [raised.value]

    found: dict[int, int] = {}
    all_trained, at_end = threading.Barrier(4), threading.Barrier(4)

    def told(comm: Communicator, rounds: int) -> list[int]:
        found[comm.rank] = rounds
        at_end.wait(60)
        return [*found.values()]

    errors = [error for (error,) in on_ranks(4, run)]
    assert [type(one) is NonFiniteGradient for one in errors[:2]] == [False, False]
    assert any(type(one) is NonFiniteGradient for one in errors[2:])
    for error in errors:
        assert re.search("rank [23], round . after . steps: .* have become NaN or infinite", str(error))


def test_ranks_of_one_replica_that_train_apart_are_told() -> None:
    """As without DistributedDataParallel: a part of each one's work would make one model."""

    def run(comm: Communicator) -> None:
        trained(comm, 2, comm.rank, range(4))

    for result in outcomes(4, run):
        assert isinstance(result, TransportError)
        assert "rank 1 and rank 0 train one replica, and have different parameters before round 1: train it" in str(
            result
        )


def test_replicas_that_differ_are_told() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=1, replica=2)
        train(model, optimizer, comm.rank // 2, range(1))
        if comm.rank == 3:
            with torch.no_grad():
                next(iter(diloco._common.values())).add_(1.0)
        train(model, optimizer, comm.rank // 2, range(1, 2))

    for result in outcomes(4, run):
        assert isinstance(result, TransportError)
        assert "the common parameters of rank 3 and rank 1 differ after round 2" in str(result)


@pytest.mark.parametrize(
    ("replica", "error", "match"),
    [
        (3, ValueError, "replica=3 must divide the 4 ranks of comm"),
        (0, ValueError, "replica=0 must divide"),
        ("two", TypeError, "replica='two'"),
        (True, TypeError, "replica=True"),
        (4, ValueError, "replica=4 has more ranks than the model has tensors"),
    ],
)
def test_ranks_that_make_no_replica(replica: Any, error: type[Exception], match: str) -> None:
    def run(comm: Communicator) -> None:
        model = torch.nn.Linear(3, 3, bias=False)
        with pytest.raises((error, ValueError), match=match):
            DiLoCo(model, comm, torch.optim.SGD(model.parameters(), 0.1), replica=replica)

    on_ranks(4, run)


def test_a_group_needs_the_process_group_of_a_replica() -> None:
    model = network()
    group = ReplicaGroup(torch.distributed.HashStore(), 1)
    with pytest.raises(ValueError, match="replica=2 with a ReplicaGroup: give the process group of this replica's"):
        DiLoCo(model, group, torch.optim.SGD(model.parameters(), 0.1), replica=2)


SCENARIOS = ["ddp_inside", "fully_shard_inside", "sparse_shards", "distributed_checkpoint"]
SCENARIOS += ["distributed_checkpoint_of_other_replicas", "groups_that_do_not_fit"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[dict[str, str]]]:
    """What each of four ranks said of each scenario; all of one job, since importing torch is slow."""

    @functools.cache
    def report() -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp("job")
        lines: list[list[str]] = [[] for _ in range(4)]
        here = Path(__file__).parent
        ranks = Ranks(
            "replica_ranks_program:run",
            4,
            arguments=[f"file://{folder / 'store'}"],
            environment={
                "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path]),
                "OMP_NUM_THREADS": "1",
            },
            environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": "4"},
            on_line=lambda rank, line: lines[rank].append(line.rstrip()),
            timeout_s=280,
        )
        with ranks:
            try:
                ranks.wait()
            except Exception as error:
                for said in lines:
                    said.append(f"- {error}")
        return [dict(line.split(" ", 1) for line in said) for said in lines]

    return report


@pytest.mark.ranks("torch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_replicas_of_two_ranks(reports: Callable[[], list[dict[str, str]]], scenario: str) -> None:
    assert [report.get(scenario, f"was not reached: {report.get('-')}") for report in reports()] == ["ok"] * 4


def test_the_batch_of_a_rank_changes_a_model() -> None:
    """Else equal bits prove nothing."""
    model = network()
    before = flat(model).tobytes()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 0, range(1))
    assert flat(model).tobytes() != before
