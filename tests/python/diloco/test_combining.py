"""How the entries that replicas gather become one move: averages over senders, and clipping to the median norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from threaded_ranks import on_ranks, outcomes

from telegrad import Communicator, DiLoCo, TopK

torch = pytest.importorskip("torch")
SHAPES = {"weight": (4, 12), "bias": (12,)}
ROUNDS, RATE = 5, 0.5


class Tensors(torch.nn.Module):
    """Without a loss: tests give the gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.ones(shape)))


def move_of(rank: int, number: int, name: str) -> np.ndarray:
    """What a replica learns in a round; the last one much more than the others, and of the bias nothing at first."""
    values = np.random.default_rng([rank, number, len(name)]).standard_normal(SHAPES[name]).astype(np.float32)
    if name == "bias" and rank == 0 and number < 2:
        return np.zeros_like(values)
    return values * np.float32(100 if rank == 3 else 1 + rank)


def reference(ranks: int, k: dict[str, int], average: str, clip: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """SparseLoCo's rounds; residuals lose what was sent, not what clipping has left of it."""
    common = {name: np.ones(np.prod(shape)) for name, shape in SHAPES.items()}
    errors = {name: np.zeros((ranks, np.prod(shape))) for name, shape in SHAPES.items()}
    for number in range(ROUNDS):
        for name, held in errors.items():
            sent = np.zeros_like(held)
            for rank in range(ranks):
                move = move_of(rank, number, name).reshape(-1)
                if move.any():
                    held[rank] = 0.9 * held[rank] + move
                    most = np.argsort(-np.abs(held[rank]), kind="stable")[: k[name]]
                    sent[rank, most] = held[rank, most]
                else:
                    held[rank] *= 0.9
            held -= sent
            senders = (sent != 0).sum(axis=0)
            if clip == "median":
                norms = np.linalg.norm(sent, axis=1)
                most = np.median(norms[norms > 0])
                sent *= np.minimum(1, most / np.maximum(norms, 1e-30))[:, None]
            common[name] -= RATE * sent.sum(axis=0) / (np.maximum(senders, 1) if average == "senders" else ranks)
    return common, errors


@pytest.mark.parametrize("average", ["ranks", "senders"])
@pytest.mark.parametrize("clip", [None, "median"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_rounds_are_the_references(ranks: int, average: str, clip: str | None) -> None:
    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
        model = Tensors()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        compress = TopK(0.25, "topk", small_elements=0, combine="allgather")
        diloco = DiLoCo(
            *(model, comm, optimizer),
            every=1,
            outer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
            compress=compress,
            decay=0.9,
            average=average,
            clip=clip,
        )
        for number in range(ROUNDS):
            for name, one in model.named_parameters():
                one.grad = torch.from_numpy(move_of(comm.rank, number, name))
            optimizer.step()
        entries = diloco.state_dict()["compressor"]["parameters"]
        common = {name: one.detach().numpy().reshape(-1) for name, one in model.named_parameters()}
        return common, {name: one["residual"].numpy() for name, one in entries.items()}, diloco.checksum()

    found = on_ranks(ranks, run)
    common, errors = reference(ranks, {"weight": 12, "bias": 3}, average, clip)
    assert len({checksum for *_, checksum in found}) == 1
    for rank, (values, residuals, _) in enumerate(found):
        for name in SHAPES:
            np.testing.assert_allclose(values[name], common[name], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(residuals[name], errors[name][rank], rtol=1e-4, atol=1e-4)


def test_rounded_values_are_clipped_as_they_arrive() -> None:
    """In two bits: all ranks must find the same norms, of what was decoded."""

    def run(comm: Communicator) -> tuple[float, int]:
        model = torch.nn.Linear(128, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo.sparse(model, comm, optimizer, every=1, clip="median", average="senders")
        before = model.weight.detach().clone()
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            model.weight.grad = torch.randn(64, 128, generator=generator) * 1000.0 ** (comm.rank == 2)
            optimizer.step()
        return float((model.weight.detach() - before).abs().max()), diloco.checksum()

    found = on_ranks(3, run)
    assert len({checksum for _, checksum in found}) == 1
    assert 0 < found[0][0] < 50  # the third replica's moves are a thousand times larger


@pytest.mark.parametrize("same_sign", [False, True])
def test_a_round_in_which_nothing_moves(same_sign: bool) -> None:
    def run(comm: Communicator) -> bytes:
        model = Tensors()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        select = "trimmed" if same_sign else "topk"
        compress = TopK(
            0.25,
            select,
            small_elements=0,
            combine="allgather",
            same_sign=same_sign,
            output=("weight",) if same_sign else None,
        )
        DiLoCo(model, comm, optimizer, every=1, compress=compress, average="senders", clip="median")
        for one in model.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()
        return model.weight.detach().numpy().tobytes()

    assert on_ranks(2, run)[0] == np.ones(48, np.float32).tobytes()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"average": "mean"}, ValueError, "average='mean' does not exist: use one of ranks, senders"),
        ({"clip": "mean"}, ValueError, "clip='mean' does not exist: use one of median"),
        ({"clip": "median"}, ValueError, "average='ranks', clip='median' are for entries that every replica gathers"),
        ({"average": "senders", "compress": TopK()}, ValueError, 'give compress=TopK\\(combine="allgather"\\)'),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model = Tensors()
    with Communicator.local(1)[0] as comm, pytest.raises(error, match=match):
        DiLoCo(model, comm, torch.optim.SGD(model.parameters(), 0.1), **options)


def test_replicas_that_combine_otherwise_are_told() -> None:
    def run(comm: Communicator) -> None:
        model = Tensors()
        DiLoCo.sparse(model, comm, torch.optim.SGD(model.parameters(), 0.1), clip=("median", None)[comm.rank])

    for result in outcomes(2, run):
        assert isinstance(result, ValueError)
        assert "clip of rank 1 and rank 0 differ" in str(result)
