"""DiLoCo: rounds against references in numpy, states, and what goes wrong."""

from __future__ import annotations

import copy
import inspect
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replicas import Net, average_statistics, batch, flat, local_models, network, train, write
from threaded_ranks import on_ranks, outcomes

import telegrad
from telegrad import Communicator, DiLoCo, NonFiniteGradient, Quantised, Streaming, TopK, TransportError
from telegrad.compress import BucketTopK
from telegrad.ddp import reshard

torch = pytest.importorskip("torch")
SGD = torch.optim.SGD


def dense_reference(ranks: int, rounds: int, every: int, rate: float, momentum: float) -> list[np.ndarray]:
    """arXiv 2311.08105, Algorithm 1, with Nesterov momentum."""
    replicas = local_models(ranks)
    common, velocity, found = flat(replicas[0][0]).astype(np.float64), 0.0, []
    for number in range(rounds):
        for rank, (model, optimizer) in enumerate(replicas):
            train(model, optimizer, rank, range(number * every, (number + 1) * every))
        move = np.mean([common - flat(model) for model, _ in replicas], axis=0)
        velocity = momentum * velocity + move
        common = common - rate * (move + momentum * velocity)
        average_statistics([model for model, _ in replicas])
        for model, _ in replicas:
            write(model, common)
        found.append(common)
    return found


def sparse_reference(
    ranks: int, rounds: int, every: int, k: int, chunk: int, decay: float, least: int
) -> list[np.ndarray]:
    """arXiv 2508.15706, Algorithm 1, with exact values and the outer rate 1."""
    replicas = local_models(ranks)
    sizes = [one.numel() for one in replicas[0][0].parameters()]
    common, errors, found = flat(replicas[0][0]).astype(np.float64), np.zeros((ranks, sum(sizes))), []
    for number in range(rounds):
        for rank, (model, optimizer) in enumerate(replicas):
            train(model, optimizer, rank, range(number * every, (number + 1) * every))
        sent = np.zeros_like(errors)
        for rank, (model, _) in enumerate(replicas):
            errors[rank] = decay * errors[rank] + common - flat(model)
            start = 0
            for size in sizes:
                for first in range(start, start + size, chunk):
                    piece = np.arange(first, min(first + chunk, start + size))
                    share = max(least, math.floor(k * len(piece) / chunk + 0.5))  # of a short one at the end
                    most = piece[np.argsort(-np.abs(errors[rank, piece]), kind="stable")[:share]]
                    sent[rank, most] = errors[rank, most]
                start += size
        errors -= sent
        common = common - sent.mean(axis=0)
        average_statistics([model for model, _ in replicas])
        for model, _ in replicas:
            write(model, common)
        found.append(common)
    return found


def test_options_are_ten_at_most() -> None:
    for one in (DiLoCo, DiLoCo.sparse, DiLoCo.streaming, Streaming):
        found = inspect.signature(one).parameters.values()
        assert sum(option.default is not inspect.Parameter.empty for option in found) <= 10


def test_dense_rounds_are_the_papers() -> None:
    def run(comm: Communicator) -> list[np.ndarray]:
        model = network(comm.rank)  # rank 0's counts
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        diloco, found = DiLoCo(model, comm, optimizer, every=5), []
        for number in range(4):
            train(model, optimizer, comm.rank, range(5 * number, 5 * number + 5))
            found.append(flat(model))
        assert diloco.rounds == 4
        return found

    results = on_ranks(3, run)
    for number, expected in enumerate(dense_reference(3, 4, 5, 0.7, 0.9)):
        assert all(one[number].tobytes() == results[0][number].tobytes() for one in results)
        np.testing.assert_allclose(results[0][number], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("streaming", [None, Streaming(2, delay=1)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_optimizers_step_as_one(order: tuple[int, int], streaming: Streaming | None) -> None:
    """Whichever is the last exchanges, and the bits are those of one optimizer of all parameters."""

    def run(comm: Communicator, divided: bool) -> tuple[np.ndarray, int]:
        model = network()
        found = [*model.parameters()]
        parts = [SGD(one, 0.05) for one in ((found[:3], found[3:]) if divided else (found,))]
        diloco = DiLoCo(model, comm, parts, every=3, streaming=streaming)
        for step in range(10):
            inputs, targets = batch(comm.rank, step)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            for place in order if divided else (0,):
                parts[place].step()
            model.zero_grad()
        diloco.exchange()
        diloco.close()
        parts[0].step()
        parts[0].step()  # which the hooks would refuse
        return flat(model), diloco.rounds

    whole, divided = (on_ranks(2, lambda comm, one=one: run(comm, one)) for one in (False, True))
    assert [rounds for _, rounds in divided] == [rounds for _, rounds in whole]
    for (one, _), (other, _) in zip(divided, whole, strict=True):
        assert one.tobytes() == other.tobytes()


def test_several_optimizers_take_turns() -> None:
    model = network()
    found = [*model.parameters()]
    first, second = SGD(found[:3], 0.1), SGD(found[3:], 0.1)
    with Communicator.local(1)[0] as comm:
        DiLoCo(model, comm, [first, second], every=2).close()
        DiLoCo(model, comm, [first, second], every=2)
        with pytest.raises(ValueError, match="belongs to another DiLoCo"):
            DiLoCo(model, comm, [second])
        with pytest.raises(TypeError, match="inner_optimizer is a list"):
            DiLoCo(model, comm, [[first], second])  # type: ignore[list-item]
        first.step()
        with pytest.raises(ValueError, match="SGD of inner_optimizer steps twice while another one has not"):
            first.step()
        second.step()
        first.step()


@pytest.mark.parametrize("least", [1, 4])
def test_sparse_rounds_are_the_papers(least: int) -> None:
    def run(comm: Communicator) -> list[np.ndarray]:
        model, found = network(), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        compress = TopK(4 / 32, BucketTopK(32, 4, least), small_elements=0)
        DiLoCo(model, comm, optimizer, every=5, compress=compress, decay=0.9)
        for number in range(4):
            train(model, optimizer, comm.rank, range(5 * number, 5 * number + 5))
            found.append(flat(model))
        return found

    results = on_ranks(3, run)
    for number, expected in enumerate(sparse_reference(3, 4, 5, 4, 32, 0.9, least)):
        assert all(one[number].tobytes() == results[0][number].tobytes() for one in results)
        np.testing.assert_allclose(results[0][number], expected, rtol=1e-3, atol=1e-4)


def test_a_round_of_one_step_is_synchronous_sgd() -> None:
    def run(comm: Communicator) -> np.ndarray:
        model = torch.nn.Linear(6, 3)
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.zeros_(model.bias)
        optimizer = SGD(model.parameters(), 0.1)
        DiLoCo(model, comm, optimizer, every=1, outer=lambda parameters: SGD(parameters, lr=1.0))
        train(model, optimizer, comm.rank, range(5))
        return flat(model)

    found = on_ranks(2, run)
    together = torch.nn.Linear(6, 3)
    torch.nn.init.constant_(together.weight, 0.1)
    torch.nn.init.zeros_(together.bias)
    optimizer = SGD(together.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = batch(rank, step)
            (torch.nn.functional.mse_loss(together(x), y) / 2).backward()
        optimizer.step()
    np.testing.assert_allclose(found[0], flat(together), rtol=1e-4, atol=1e-6)


def test_a_sparse_round_sends_two_hundredths_of_the_bytes() -> None:
    def run(comm: Communicator) -> tuple[int, int]:
        model = torch.nn.Linear(512, 512)
        optimizer = SGD(model.parameters(), 0.1)
        DiLoCo.sparse(model, comm, optimizer, every=1)
        return round_of_noise(model, optimizer, comm), 4 * sum(one.numel() for one in model.parameters())

    for sent, dense in on_ranks(2, run):
        assert sent * 200 < dense


def round_of_noise(model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator) -> int:
    """The bytes that a round of one step sends, checksums too."""
    generator = torch.Generator().manual_seed(comm.rank)
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=generator)
    before = comm.stats()["bytes_sent"]
    optimizer.step()
    return int(comm.stats()["bytes_sent"] - before)


def test_with_oktopk_bytes_do_not_grow_and_residuals_keep_the_rest() -> None:
    """Against a dense ring allreduce, which sends 2 (P - 1) / P of the values. Nothing of the moves is lost."""

    def run(comm: Communicator) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        model = torch.nn.Linear(512, 512)
        optimizer = SGD(model.parameters(), 0.1)
        diloco = DiLoCo.sparse(model, comm, optimizer, every=1, decay=1.0, combine="oktopk")
        begun, sent = flat(model), 0
        for _ in range(4):
            sent += round_of_noise(model, optimizer, comm)
        moves = 4 * 0.1 * np.concatenate([one.grad.numpy().ravel() for one in model.parameters()])
        dense = 4 * 2 * (comm.world_size - 1) / comm.world_size * 4 * begun.size
        held = diloco.state_dict()["compressor"]["parameters"]
        kept = np.concatenate([held[name]["residual"].numpy().ravel() for name, _ in model.named_parameters()])
        return dense / sent, begun - flat(model), moves, kept

    found = on_ranks(8, run)
    assert all(less > 160 for less, *_ in found)
    assert all(one.tobytes() == found[0][1].tobytes() for _, one, *_ in found)
    left = sum(moves - kept for *_, moves, kept in found)
    np.testing.assert_allclose(8 * found[0][1], left, atol=1e-5)


@pytest.mark.parametrize("values", ["int8", "qsgd4"])
def test_rounded_moves_are_sent_or_kept(values: str) -> None:
    """The sum of all moves is that of the averages, and of what residuals keep."""

    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        compress = Quantised(values, small_elements=0)
        diloco = DiLoCo(model, comm, optimizer, every=None, compress=compress, outer=lambda found: SGD(found, 1.0))
        begun = common = flat(model)
        moves = np.zeros_like(begun)
        for number in range(6):
            train(model, optimizer, comm.rank, range(number * 3, (number + 1) * 3))
            moves += common - flat(model)
            diloco.exchange()
            common = flat(model)
        held = diloco.state_dict()["compressor"]["parameters"]
        kept = [held[name]["residual"].numpy() for name, _ in model.named_parameters()]
        return moves, begun - common, np.concatenate(kept)

    found = on_ranks(3, run)
    kept = sum(one for _, _, one in found)
    assert all(np.array_equal(came, found[0][1]) for _, came, _ in found)
    assert np.abs(kept).max() > 0
    np.testing.assert_allclose(3 * found[0][1] + kept, sum(moves for moves, _, _ in found), atol=2e-6)


def test_a_rounded_round_sends_its_bits() -> None:
    def run(comm: Communicator, compress: Quantised | None) -> int:
        model = torch.nn.Linear(256, 256, bias=False)
        diloco = DiLoCo(model, comm, SGD(model.parameters(), 0.1), every=None, compress=compress, verify=0)
        before = comm.stats()["bytes_sent"]
        diloco.exchange()
        return int(comm.stats()["bytes_sent"] - before)

    (dense, _), (rounded, _) = (
        on_ranks(2, lambda comm, compress=compress: run(comm, compress)) for compress in (None, Quantised("qsgd4"))
    )
    assert dense == 4 * 256**2
    assert rounded == pytest.approx(dense / 8, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"values": "packed-qsgd2", "combine": "allgather"}], ids=["", "rounded"])
def test_training_goes_on_bitwise_from_a_state(options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> None:
        def made(model: Net) -> tuple[Any, DiLoCo]:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            compress = TopK(0.1, "topk", small_elements=0, **options)
            return optimizer, DiLoCo(model, comm, optimizer, every=4, compress=compress, decay=0.9)

        model = network()
        optimizer, diloco = made(model)
        train(model, optimizer, comm.rank, range(10))  # in the middle of a round
        state = diloco.state_dict()
        assert (state["step"], state["inner_steps"]) == (2, 2)
        weights, inner = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, comm.rank, range(10, 18))
        for model_first in (True, False):
            other = network(7)
            if model_first:
                other.load_state_dict(weights)
            other_optimizer, resumed = made(other)
            if not model_first:
                other.load_state_dict(weights)
            other_optimizer.load_state_dict(copy.deepcopy(inner))
            resumed.load_state_dict(state)
            train(other, other_optimizer, comm.rank, range(10, 18))
            assert flat(model).tobytes() == flat(other).tobytes()
            assert diloco.checksum() == resumed.checksum()

    on_ranks(2, run)


def test_a_state_is_for_another_number_of_replicas() -> None:
    options: dict[str, Any] = {"every": 3, "compress": TopK(0.1, "topk", small_elements=0)}

    def before(comm: Communicator) -> dict[str, Any]:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, **options)
        train(model, optimizer, comm.rank, range(6))
        return diloco.state_dict()

    states = on_ranks(3, before)
    fewer = reshard(states, 2)

    def after(comm: Communicator) -> dict[str, Any]:
        model = network(5)
        diloco = DiLoCo(model, comm, SGD(model.parameters(), 0.05), **options)
        diloco.load_state_dict(fewer[comm.rank])
        assert diloco.rounds == 2
        return diloco.state_dict()

    found = on_ranks(2, after)
    for name in states[0]["common"]:
        assert torch.equal(found[0]["common"][name], states[0]["common"][name])
        waits = [
            sum(one["compressor"]["parameters"][name]["residual"].double() for one in those)
            for those in (states, found)
        ]
        torch.testing.assert_close(waits[0], waits[1], rtol=1e-5, atol=1e-7)


def test_all_ranks_begin_with_what_rank_0_has() -> None:
    """Frozen parameters and buffers too; or with weights that all have loaded after DiLoCo was made."""

    def run(comm: Communicator) -> None:
        model = network(comm.rank)
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        model[1].running_mean.fill_(comm.rank)  # type: ignore[index]
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = SGD(trained, 0.0)
        DiLoCo(model, comm, optimizer, every=2)
        first = network()
        assert torch.equal(model[0].weight, first[0].weight)  # type: ignore[index]
        assert not model[1].running_mean.any()  # type: ignore[index]
        with torch.no_grad():
            for one in trained:
                one.fill_(1.0)
        train(model, optimizer, comm.rank, range(2))
        for one in trained:
            assert torch.equal(one, torch.ones_like(one))

    on_ranks(2, run)


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.7])
def test_the_average_of_equal_buffers_is_that_value(mix: float) -> None:
    """Bit for bit, also where a sum of so many rounds: counters, masks and constants do not move."""
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    values[:6] = torch.tensor([0.1, -0.0, 1e300, 5e-324, math.inf, 123456789.0], dtype=torch.float64)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    kept: dict[str, Any] = {f"kept{one.itemsize}{number}": values.to(one) for number, one in enumerate(dtypes)}
    kept["whole"] = (1000 * values[6:]).long()

    def run(comm: Communicator) -> Any:
        model = network()
        for name, one in kept.items():
            model.register_buffer(name, one.clone())
        optimizer = SGD(model.parameters(), 0.05)
        DiLoCo(model, comm, optimizer, every=2, streaming=Streaming(1, delay=0, mix=mix))
        train(model, optimizer, comm.rank, range(6))
        return dict(model.named_buffers())

    for ranks in (3, 5):
        for found in on_ranks(ranks, run):
            for name, one in kept.items():
                assert torch.equal(found[name].contiguous().view(torch.uint8), one.view(torch.uint8)), name
            assert found["1.num_batches_tracked"] == 6


def test_a_parameter_that_is_unfrozen_later_is_told() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        optimizer = SGD(model.parameters(), 0.05)
        DiLoCo(model, comm, optimizer, every=2)
        model[0].weight.requires_grad_(True)  # type: ignore[index]
        train(model, optimizer, comm.rank, range(2))

    for result in outcomes(1, run):
        assert isinstance(result, ValueError)
        assert "'0.weight' was frozen or unfrozen after DiLoCo was made: close() this one" in str(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"streaming": Streaming(1, delay=0)}, {"compress": TopK(1.0, small_elements=0)}]
)
def test_replicas_that_do_not_move_move_nothing(dtype: Any, options: dict[str, Any]) -> None:
    """Though the common parameters have bits that theirs lack."""

    def run(comm: Communicator) -> None:
        model = network().to(dtype)
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=2, outer=lambda found: SGD(found, 0.7), **options)
        for common in diloco._common.values():
            common.data.add_(torch.randn(common.shape, generator=torch.Generator().manual_seed(1)))
        diloco._has_begun = True
        for fragment in diloco._fragments:
            fragment.take_over(0.0)
        before = diloco.checksum()
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        for _ in range(6):
            optimizer.step()
        assert diloco.rounds == 3
        assert diloco.checksum() == before

    on_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_below_the_precision_of_replicas_add_up(dtype: Any) -> None:
    """One of four replicas moves by one bit a round, so that a fourth of it is the average."""

    def run(comm: Communicator) -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False).to(dtype)
        torch.nn.init.ones_(model.weight)
        optimizer = SGD(model.parameters(), 1.0)
        DiLoCo(model, comm, optimizer, every=1, outer=lambda found: SGD(found, 1.0))
        found = []
        for _ in range(8):
            moves = torch.finfo(dtype).eps if comm.rank == 0 else 0.0
            model.weight.grad = torch.full_like(model.weight, -moves)
            optimizer.step()
            found.append((model.weight.item() - 1.0) / torch.finfo(dtype).eps)
        return found

    for found in on_ranks(4, run):
        assert (found[3], found[7]) == (1.0, 2.0)


def test_rounds_that_the_program_ends() -> None:
    """As with a GradScaler, which skips steps on one rank alone."""

    def run(comm: Communicator) -> int:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=None)
        train(model, optimizer, comm.rank, range(3 * comm.rank))  # rank 0 has skipped all
        diloco.exchange()
        assert diloco.rounds == 1
        return diloco.checksum()

    first, second = on_ranks(2, run)
    assert first == second


class OwnSGD(torch.optim.SGD):
    """Whose hooks torch 2.13 runs twice for each step, once a plain SGD was made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_within_a_step_is_no_step() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        SGD(model.parameters(), 0.05)
        optimizer = OwnSGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=4)
        train(model, optimizer, comm.rank, range(6))
        assert (diloco.rounds, diloco.state_dict()["inner_steps"]) == (1, 2)

    on_ranks(2, run)


def test_the_last_steps_are_exchanged_when_asked_and_once() -> None:
    def run(comm: Communicator) -> int:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=100)
        train(model, optimizer, comm.rank, range(3))
        diloco.exchange()
        now = flat(model)
        diloco.exchange()
        assert diloco.rounds == 1
        assert flat(model).tobytes() == now.tobytes()
        diloco.close()
        train(model, optimizer, comm.rank, range(200))
        assert diloco.rounds == 1
        return diloco.checksum()

    first, second = on_ranks(2, run)
    assert first == second


def test_a_replica_that_diverges_is_named_and_nothing_changes() -> None:
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> list[Exception]:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=2, compress=TopK(0.1, "topk", small_elements=0))
        train(model, optimizer, comm.rank, range(2))
        before = diloco.checksum(), str(diloco.state_dict()["compressor"])
        train(model, optimizer, comm.rank, range(2, 3))
        both_trained.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 1:
            with torch.no_grad():
                next(iter(model.parameters()))[0, 0] = math.nan
        with pytest.raises((NonFiniteGradient, TransportError)) as raised:
            train(model, optimizer, comm.rank, range(3, 4))
        assert (diloco.checksum(), str(diloco.state_dict()["compressor"])) == before
        return [raised.value]

    (other,), (diverged,) = on_ranks(2, run)
    assert isinstance(diverged, NonFiniteGradient)
    assert "rank 1" in str(diverged)
    assert "entries of '0.weight' have become NaN or infinite" in str(diverged)
    assert isinstance(other, TransportError)
    assert other.peer == 1
    assert "entries of '0.weight' have become NaN or infinite" in str(other)


def test_replicas_that_differ_are_told() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=1)
        train(model, optimizer, comm.rank, range(1))
        if comm.rank == 1:
            with torch.no_grad():
                next(iter(diloco._common.values())).add_(1.0)
        train(model, optimizer, comm.rank, range(1, 2))

    for result in outcomes(2, run):
        assert isinstance(result, TransportError)
        assert "the common parameters of rank 1 and rank 0 differ after round 2" in str(result)
        assert result.peer == 1


def test_ranks_that_resume_at_different_rounds_are_told() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        optimizer = SGD(model.parameters(), 0.05)
        diloco = DiLoCo(model, comm, optimizer, every=1)
        state = diloco.state_dict()
        train(model, optimizer, comm.rank, range(2))
        if comm.rank == 1:
            diloco.load_state_dict(state)
        train(model, optimizer, comm.rank, range(2, 3))

    for result in outcomes(2, run):
        assert isinstance(result, TransportError)
        assert "rank 1 has ended round 1 and rank 0 round 3: load a state_dict() of one moment" in str(result)


def test_options_that_differ_are_told_to_all() -> None:
    def run(comm: Communicator) -> None:
        model = network()
        DiLoCo(model, comm, SGD(model.parameters(), 0.05), every=5 + comm.rank)

    for result in outcomes(2, run):
        assert isinstance(result, ValueError)
        assert "every of rank 1 and rank 0 differ" in str(result)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"every": 0}, ValueError, "every=0 must be at least 1"),
        ({"every": 2.5}, TypeError, "every=2.5"),
        ({"decay": 0.5}, ValueError, "decay=0.5 is not used without compress="),
        ({"decay": 0.0, "compress": TopK()}, ValueError, "decay=0.0 must be in"),
        ({"decay": "x", "compress": TopK()}, TypeError, "decay='x'"),
        ({"compress": "topk"}, TypeError, "compress='topk' must be a telegrad.TopK or Quantised"),
        ({"compress": Quantised(("int8", "bf16"))}, ValueError, "must be one format"),
        ({"compress": TopK(feedback="steps")}, ValueError, "feedback='steps' is for gradients of steps: use"),
        ({"outer": 0.7}, TypeError, "outer=0.7 must be a function of the parameters"),
        ({"outer": lambda parameters: 1}, TypeError, "outer made a int"),
        ({"verify": -1}, ValueError, "verify=-1"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model = network()
    with Communicator.local(1)[0] as comm, pytest.raises(error, match=match):
        DiLoCo(model, comm, SGD(model.parameters(), 0.1), **options)


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """Without a process group."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class ScheduleFree(SGD):
    """As schedulefree's: ``eval()`` puts other weights into the parameters."""

    def eval(self) -> None: ...


def test_weights_that_replicas_do_not_exchange_are_named() -> None:
    model = network()
    with Communicator.local(1)[0] as comm:
        with pytest.warns(RuntimeWarning, match=r"do not exchange the weights of ScheduleFree.eval\(\)"):
            DiLoCo(model, comm, ScheduleFree(model.parameters(), 0.1)).close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DiLoCo(model, comm, SGD(model.parameters(), 0.1)).close()


def test_objects_that_do_not_fit() -> None:
    model, other = network(), network()
    with Communicator.local(1)[0] as comm:
        with pytest.raises(TypeError, match="comm is a int"):
            DiLoCo(model, 3, SGD(model.parameters(), 0.1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="model is a list"):
            DiLoCo([], comm, SGD(model.parameters(), 0.1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="inner_optimizer is a float"):
            DiLoCo(model, comm, 0.1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="inner_optimizer steps no parameter of the model"):
            DiLoCo(model, comm, SGD(other.parameters(), 0.1))
        with pytest.raises(ValueError, match="inner_optimizer does not step '1.weight'"):
            DiLoCo(model, comm, SGD([model[0].weight], 0.1))  # type: ignore[index]
        diloco = DiLoCo(other, comm, optimizer := SGD(other.parameters(), 0.1))
        with pytest.raises(ValueError, match="belongs to another DiLoCo: close\\(\\) that one first"):
            DiLoCo(other, comm, optimizer)
        diloco.close()
        DiLoCo(other, comm, optimizer).close()
        with pytest.raises(TypeError, match="model is a DistributedDataParallel: give ddp.module"):
            DiLoCo(Wrapped(), comm, optimizer)
        double = torch.nn.Linear(2, 2).double()
        with pytest.raises(TypeError, match="parameter 'weight' is torch.float64"):
            telegrad.DiLoCo(double, comm, SGD(double.parameters(), 0.1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state["common"].pop("0.weight"), "state\\['common'\\] is not of this model"),
        (lambda state: state.update(inner_steps=5), "inner_steps'\\]=5 is no step of a round of every=5"),
        (lambda state: state.pop("outer"), "state has no 'outer' of an optimizer"),
        (lambda state: state["compressor"].update(feedback="steps"), "state has residuals of steps"),
        (lambda state: state.update(rank=1), "state is of rank 1 of 1"),
        (lambda state: state.update(version=7), "must come from DiLoCo.state_dict"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Callable[[dict[str, Any]], Any], match: str) -> None:
    model = network()
    with Communicator.local(1)[0] as comm:
        diloco = DiLoCo(model, comm, SGD(model.parameters(), 0.1), every=5)
        state = diloco.state_dict()
        now = str(state)
        change(state)
        with pytest.raises(ValueError, match=match):
            diloco.load_state_dict(state)
        assert str(diloco.state_dict()) == now
