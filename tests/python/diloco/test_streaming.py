"""Streaming DiLoCo: fragments in turn and in flight, against references in numpy; states, and what goes wrong."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import Net, batch, flat, local_models, network, train, write
from threaded_ranks import on_ranks, outcomes

from telegrad import Communicator, DiLoCo, NonFiniteGradient, Quantised, Streaming, TopK, TransportError
from telegrad.compress import BucketTopK
from telegrad.ddp import reshard

torch = pytest.importorskip("torch")
SGD = torch.optim.SGD
STREAMS = [(1, 0, 0.0), (3, 0, 0.5), (2, 3, 0.25), (3, 5, 0.0), (3, 2, 1.0)]
"""fragments, delay, mix; with fewer steps in a round than three exchanges take, several are in flight."""
CHUNK, K = 32, 4


def parts_of(fragments: int) -> list[np.ndarray]:
    """Which entries of ``flat`` are in which fragment: the network's layers are a Linear, a BatchNorm and a Linear."""
    layers = np.repeat([0, 1, 2], [96, 32, 51])
    return [np.flatnonzero(layers % fragments == number) for number in range(fragments)]


def streaming_reference(
    ranks: int, steps: int, every: int, fragments: int, delay: int, mix: float, select: Callable[..., np.ndarray]
) -> list[list[np.ndarray]]:
    """arXiv 2501.18512, Algorithm 2, with the pseudo-gradient from the common parameters; of each rank, each step."""
    replicas, parts = local_models(ranks), parts_of(fragments)
    common, velocity = flat(replicas[0][0]).astype(np.float64), np.zeros(179)
    errors, flights, found = np.zeros((ranks, 179)), [], []
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(replicas):
            train(model, optimizer, rank, range(step - 1, step))
        own = [flat(model).astype(np.float64) for model, _ in replicas]
        for number, part in enumerate(parts):
            if (step - 1) % every + 1 == every * (number + 1) // fragments:
                moves = np.array([common[part] - one[part] for one in own])
                flights.append((step + delay, part, select(moves, errors, part).mean(axis=0)))
        for when, part, move in flights:
            if when == step:
                velocity[part] = 0.9 * velocity[part] + move
                common[part] -= 0.7 * (move + 0.9 * velocity[part])
                for one in own:
                    one[part] = (1 - mix) * common[part] + mix * one[part]
        for (model, _), values in zip(replicas, own, strict=True):
            write(model, values)
        found.append(own)
    return found


def all_of(moves: np.ndarray, errors: np.ndarray, part: np.ndarray) -> np.ndarray:
    return moves


def largest_of(moves: np.ndarray, errors: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Of every chunk of a tensor, with a residual that decays by 0.9."""
    total, sent = 0.9 * errors[:, part] + moves, np.zeros_like(moves)
    tensors = np.repeat([0, 1, 2, 3, 4], [96, 16, 16, 48, 3])[part]
    for rank in range(len(moves)):
        for tensor in np.unique(tensors):
            places = np.flatnonzero(tensors == tensor)
            for first in range(0, len(places), CHUNK):
                piece = places[first : first + CHUNK]
                share = max(1, math.floor(K * len(piece) / CHUNK + 0.5))
                most = piece[np.argsort(-np.abs(total[rank, piece]), kind="stable")[:share]]
                sent[rank, most] = total[rank, most]
    errors[:, part] = total - sent
    return sent


def nesterov(parameters: Any) -> Any:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


SPARSE: dict[str, Any] = {
    "compress": TopK(K / CHUNK, BucketTopK(CHUNK, K), small_elements=0),
    "decay": 0.9,
    "outer": nesterov,
}


@pytest.mark.parametrize(("fragments", "delay", "mix"), STREAMS)
@pytest.mark.parametrize(("options", "select"), [({}, all_of), (SPARSE, largest_of)], ids=["dense", "sparse"])
def test_rounds_are_the_papers(
    fragments: int, delay: int, mix: float, options: dict[str, Any], select: Callable[..., np.ndarray]
) -> None:
    def run(comm: Communicator) -> list[tuple[np.ndarray, int, int]]:
        model, found = network(comm.rank), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        diloco = DiLoCo(
            model, comm, optimizer, every=6, streaming=Streaming(fragments, delay=delay, mix=mix), **options
        )
        for step in range(24):
            train(model, optimizer, comm.rank, range(step, step + 1))
            found.append((flat(model), diloco.checksum(), diloco.rounds))
        return found

    results = on_ranks(3, run)
    expected = streaming_reference(3, 24, 6, fragments, delay, mix, select)
    for step, own in enumerate(expected):
        assert len({found[step][1:] for found in results}) == 1  # the common parameters' bits
        for found, values in zip(results, own, strict=True):
            np.testing.assert_allclose(found[step][0], values, rtol=1e-3, atol=1e-4)
    assert results[0][-1][2] == sum(24 - delay >= 6 * number + at for number in range(4) for at in offsets(fragments))


def offsets(fragments: int) -> list[int]:
    return [6 * (number + 1) // fragments for number in range(fragments)]


def test_one_fragment_without_delay_is_diloco_bit_for_bit() -> None:
    def run(comm: Communicator) -> bytes:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        DiLoCo(model, comm, optimizer, every=5, streaming=Streaming(1, delay=0, mix=0.0))
        train(model, optimizer, comm.rank, range(20))
        return flat(model).tobytes()

    def by_hand(comm: Communicator) -> bytes:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        common = torch.nn.Parameter(torch.from_numpy(flat(model)))
        outer = nesterov([common])
        for number in range(4):
            train(model, optimizer, comm.rank, range(5 * number, 5 * number + 5))
            common.grad = common.detach() - torch.from_numpy(flat(model))
            comm.all_reduce(common.grad, "avg")
            outer.step()
            write(model, common.detach().numpy())
        return flat(model).tobytes()

    assert on_ranks(2, run) == on_ranks(2, by_hand)


def test_fragments_divide_the_bytes_of_a_step() -> None:
    def run(comm: Communicator) -> tuple[int, int]:
        def sent(fragments: int) -> list[int]:
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
            optimizer = SGD(model.parameters(), 0.1)
            DiLoCo(model, comm, optimizer, every=8, verify=0, streaming=Streaming(fragments, delay=0, mix=0))
            found = []
            for step in range(16):
                before = comm.stats()["bytes_sent"]
                for one in model.parameters():
                    one.grad = torch.full_like(one, float(step))
                optimizer.step()
                found.append(comm.stats()["bytes_sent"] - before)
            return found

        whole, parts = sent(1), sent(4)
        assert sum(whole) == sum(parts)
        return max(whole), max(parts)

    for whole, part in on_ranks(2, run):
        assert whole == 4 * part > 0


def test_training_goes_on_while_fragments_are_in_flight() -> None:
    """Rank 1 begins when rank 0 has taken all steps up to the first one that needs an average."""
    ahead = threading.Event()

    def run(comm: Communicator) -> int:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(3, delay=5, mix=0.5))
        if comm.rank == 1:
            assert ahead.wait(60)
        train(model, optimizer, comm.rank, range(6))  # the first exchange begins after step 2
        if comm.rank == 0:
            assert len(diloco._in_flight()) == 3
            assert diloco.rounds == 0
            ahead.set()
        train(model, optimizer, comm.rank, range(6, 12))
        diloco.exchange()
        return diloco.checksum()

    first, second = on_ranks(2, run)
    assert first == second


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_the_last_exchange_leaves_nothing(mix: float) -> None:
    """Nothing in flight, no steps that were not exchanged, and one set of parameters and statistics."""

    def run(comm: Communicator) -> tuple[bytes, bytes, int]:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(3, delay=3, mix=mix))
        train(model, optimizer, comm.rank, range(8))
        diloco.exchange()
        rounds, now = diloco.rounds, flat(model).tobytes()
        assert not diloco._in_flight()
        diloco.exchange()
        assert (diloco.rounds, flat(model).tobytes()) == (rounds, now)
        statistics = model[1].running_mean.numpy().tobytes()  # type: ignore[index]
        return now, statistics, rounds

    first, second = on_ranks(2, run)
    assert first == second
    # After step 8 the exchanges of steps 2 and 4 are applied, and those of steps 6 and 8 are in flight: these fragments
    # have moved no further then, unless they mix. The third began in step 4.
    assert first[2] == (5 if mix == 0 else 7)


def averaged_statistics(comm: Communicator, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    model = network()
    norm = model[1]  # type: ignore[index]
    optimizer = SGD(model.parameters(), 0.0)
    DiLoCo(model, comm, optimizer, every=6, **options)
    train(model, optimizer, comm.rank, range(3))
    own = norm.running_mean.numpy().copy()
    norm.momentum = 0.0  # it stays as it is
    train(model, optimizer, comm.rank, range(3, 6))
    return own, norm.running_mean.numpy().copy()


def test_statistics_go_with_the_fragment_of_their_layer() -> None:
    options = {"streaming": Streaming(3, delay=1, mix=0.25)}  # the second fragment leaves after step 4
    (first, mixed), (second, other) = on_ranks(2, lambda comm: averaged_statistics(comm, **options))
    mean = (first + second) / 2
    np.testing.assert_allclose(mixed, 0.75 * mean + 0.25 * first, rtol=1e-5)
    np.testing.assert_allclose(other, 0.75 * mean + 0.25 * second, rtol=1e-5)


RESUMED: list[dict[str, Any]] = [
    {},
    {"compress": TopK(0.1, "topk", small_elements=0, values="packed-qsgd2", combine="allgather"), "decay": 0.9},
    {"compress": TopK(0.1, small_elements=0, combine="oktopk")},
    {"compress": Quantised("int8", small_elements=0), "decay": 0.9},
]


@pytest.mark.parametrize("steps", [10, 11])
@pytest.mark.parametrize("options", RESUMED, ids=["dense", "gathered", "oktopk", "rounded"])
def test_training_goes_on_bitwise_with_fragments_in_flight(options: dict[str, Any], steps: int) -> None:
    def run(comm: Communicator) -> None:
        def made(model: Net) -> tuple[Any, DiLoCo]:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            return optimizer, DiLoCo(
                model, comm, optimizer, every=6, streaming=Streaming(3, delay=3, mix=0.5), **options
            )

        model = network()
        optimizer, diloco = made(model)
        train(model, optimizer, comm.rank, range(steps))
        assert diloco._in_flight()
        state, inner = diloco.state_dict(), copy.deepcopy(optimizer.state_dict())
        again = diloco.state_dict()
        assert str(state) == str(again)
        train(model, optimizer, comm.rank, range(steps, 26))
        diloco.exchange()
        other = network(7)
        other_optimizer, resumed = made(other)
        train(other, other_optimizer, comm.rank, range(3))  # what is in flight is replaced
        other_optimizer.load_state_dict(inner)
        resumed.load_state_dict(state)
        train(other, other_optimizer, comm.rank, range(steps, 26))
        resumed.exchange()
        assert flat(model).tobytes() == flat(other).tobytes()
        assert (diloco.checksum(), diloco.rounds) == (resumed.checksum(), resumed.rounds)

    on_ranks(2, run)


def test_another_number_of_replicas_applies_what_was_in_flight() -> None:
    options: dict[str, Any] = {"every": 6, "streaming": Streaming(3, delay=5, mix=0)}

    def before(comm: Communicator) -> tuple[dict[str, Any], np.ndarray]:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, **options)
        train(model, optimizer, comm.rank, range(6))
        state = diloco.state_dict()
        diloco._finish(diloco._in_flight()[0], 0.0)
        return state, diloco._common["0.weight"].detach().numpy().copy()

    states = on_ranks(3, before)
    fewer = reshard([state for state, _ in states], 2)

    def after(comm: Communicator) -> np.ndarray:
        model = network(5)
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, **options)
        diloco.load_state_dict(fewer[comm.rank])
        assert len(diloco._in_flight()) == 3
        train(model, optimizer, comm.rank, range(6, 7))  # after which the first is due
        return diloco._common["0.weight"].detach().numpy().copy()

    for found in on_ranks(2, after):
        assert found.tobytes() == states[0][1].tobytes()


def test_what_is_in_flight_is_waited_for_before_a_replica_that_diverged_is_named() -> None:
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> list[BaseException]:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        compress = TopK(0.1, "topk", small_elements=0)
        diloco = DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(3, delay=5, mix=0), compress=compress)
        train(model, optimizer, comm.rank, range(2))
        before = diloco.checksum()
        train(model, optimizer, comm.rank, range(2, 3))
        both_trained.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 1:
            with torch.no_grad():
                model[1].weight[0] = math.nan  # type: ignore[index]
        error: BaseException | None = None
        try:
            train(model, optimizer, comm.rank, range(3, 7))
            diloco.exchange()
        except (NonFiniteGradient, TransportError) as found:
            error = found
        state = diloco.state_dict()  # nothing is under way
        if comm.rank == 1:
            assert diloco.checksum() == before
            assert [one["left"] for one in state["fragments"]] == [3, None, None]
            assert not np.any(state["compressor"]["parameters"]["1.weight"]["residual"].numpy())
            assert np.any(state["compressor"]["parameters"]["0.weight"]["residual"].numpy())
        assert error is not None
        return [error]

    (other,), (diverged,) = on_ranks(2, run)
    assert isinstance(diverged, NonFiniteGradient)
    assert "rank 1, round 0 after 4 steps: 16 of 16 entries of '1.weight'" in str(diverged)
    assert isinstance(other, TransportError)
    assert other.peer == 1
    assert "entries of '1.weight' have become NaN or infinite" in str(other)


def test_exchanges_that_fail_leave_residuals_as_before() -> None:
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        compress = TopK(0.1, "topk", small_elements=0)
        diloco = DiLoCo(
            model, comm, optimizer, every=6, streaming=Streaming(3, delay=5, mix=0), compress=compress, decay=0.5
        )
        train(model, optimizer, comm.rank, range(13))
        before = str(diloco.state_dict()["compressor"])
        both_trained.wait(60)  # an abort ends also what the other rank has not finished
        if comm.rank == 1:
            comm.abort("the test says so")
            return
        with pytest.raises(TransportError, match="the test says so"):
            train(model, optimizer, comm.rank, range(13, 25))
        assert str(diloco.state_dict()["compressor"]) == before

    on_ranks(2, run)


def test_replicas_that_differ_are_told_one_round_later() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(3, delay=1, mix=0))
        train(model, optimizer, comm.rank, range(2))
        if comm.rank == 1:
            with torch.no_grad():
                diloco._common["0.weight"].add_(1.0)
        train(model, optimizer, comm.rank, range(2, 3))
        assert diloco.rounds == 1
        train(model, optimizer, comm.rank, range(3, 6))

    for result in outcomes(2, run):
        assert isinstance(result, TransportError)
        assert "the common parameters of rank 1 and rank 0 differ after round 1" in str(result)


def test_the_papers_settings() -> None:
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(9, 4), "blocks": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))}
    )
    with Communicator.local(1)[0] as comm:
        diloco = DiLoCo.streaming(model, comm, SGD(model.parameters(), 0.1))
        offsets = [(one.offset, [*one.common]) for one in diloco._fragments]
        assert [offset for offset, _ in offsets] == [33, 66, 100]
        assert offsets[0][1] == [
            "embedding.weight",
            *(f"blocks.{n}.{kind}" for n in (2, 5) for kind in ("weight", "bias")),
        ]
        assert (diloco._delay, diloco._mix) == (1, 0.5)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"fragments": 0}, ValueError, "fragments=0 must be at least 1"),
        ({"fragments": 4}, ValueError, "fragments=4 of 3 layers \\(0, 1, 3\\): give at most one"),
        ({"fragments": 2.0}, TypeError, "fragments=2.0"),
        ({"fragments": 3, "every": 2}, ValueError, "fragments=3, delay=1 do not fit every=2"),
        ({"delay": 30}, ValueError, "fragments=1, delay=30 do not fit every=30"),
        ({"delay": -1}, ValueError, "delay=-1"),
        ({"mix": 1.5}, ValueError, "mix=1.5 must be from 0 to 1"),
        ({"mix": math.nan}, ValueError, "mix=nan must be from 0 to 1"),
        ({"mix": "x"}, TypeError, "mix='x' must be a number"),
        ({"mix": 0.5, "every": None}, ValueError, "streaming= needs every="),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model = network()
    given = {"every": 30, **options}
    every = given.pop("every")
    with Communicator.local(1)[0] as comm, pytest.raises(error, match=match):
        DiLoCo(model, comm, SGD(model.parameters(), 0.1), every=every, streaming=Streaming(**given))


def test_streaming_of_another_type() -> None:
    model = network()
    with Communicator.local(1)[0] as comm, pytest.raises(TypeError, match="streaming=3 must be a telegrad.Streaming"):
        DiLoCo(model, comm, SGD(model.parameters(), 0.1), streaming=3)  # type: ignore[arg-type]


def test_a_state_of_other_fragments_changes_nothing() -> None:
    model = network()
    with Communicator.local(1)[0] as comm:
        optimizer = SGD(model.parameters(), 0.1)
        diloco = DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(3, delay=4, mix=0))
        train(model, optimizer, 0, range(6))
        state = diloco.state_dict()
        diloco.close()
        for fragments, delay in ((2, 4), (3, 0)):
            other = DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(fragments, delay=delay, mix=0))
            now = str(other.state_dict())
            with pytest.raises(ValueError, match=f"others than with fragments={fragments}, delay={delay}: use those"):
                other.load_state_dict(state)
            assert str(other.state_dict()) == now
            other.close()


def test_the_batch_of_a_rank_is_its_own() -> None:
    """Else replicas would not differ, and averages prove nothing."""
    assert not torch.equal(batch(0, 0)[0], batch(1, 0)[0])


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_infinities_of_a_mask_stay(mix: float) -> None:
    def run(comm: Communicator) -> Any:
        model = network()
        model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        optimizer = SGD(model.parameters(), 0.01)
        diloco = DiLoCo(model, comm, optimizer, every=2, streaming=Streaming(1, delay=0, mix=mix))
        train(model, optimizer, comm.rank, range(4))
        assert diloco.rounds == 2
        return model.mask

    for mask in on_ranks(2, run):
        assert torch.equal(mask, torch.full((3, 3), -math.inf).triu(1))


def test_nan_in_a_buffer_stays_on_its_replica() -> None:
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> tuple[BaseException, bool]:
        model = network()
        optimizer = SGD(model.parameters(), 0.01)
        diloco = DiLoCo(model, comm, optimizer, every=None)
        train(model, optimizer, comm.rank, range(1))
        both_trained.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 1:
            model[1].running_mean[0] = math.nan
        with pytest.raises((NonFiniteGradient, TransportError)) as raised:
            diloco.exchange()
        return raised.value, bool(model[1].running_mean.isnan().any())

    (other, spread), (own, _) = on_ranks(2, run)
    assert isinstance(own, NonFiniteGradient)
    assert "1 of 16 values of the buffer '1.running_mean' have become NaN" in str(own)
    assert isinstance(other, TransportError)
    assert not spread


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every": None}, ValueError, "streaming= needs every="),
        ({"every": "5"}, TypeError, "every='5'"),
        ({"fragments": 4}, ValueError, "fragments=4 of 3 layers"),
    ],
)
def test_streaming_says_what_does_not_fit(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model = network()
    with Communicator.local(1)[0] as comm, pytest.raises(error, match=match):
        DiLoCo.streaming(model, comm, SGD(model.parameters(), 0.1), **options)
