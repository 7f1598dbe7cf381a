"""What DiLoCo records of its rounds, and what ``telegrad report`` makes of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import flat, network, train
from threaded_ranks import on_ranks
from typer.testing import CliRunner

from telegrad import Communicator, DiLoCo, Streaming, TopK
from telegrad.ddp import JsonLines, TensorBoard
from telegrad.tools.cli import make_app
from telegrad.tools.report import telemetry

torch = pytest.importorskip("torch")
SPARSE: dict[str, Any] = {"compress": TopK(0.1, "topk", small_elements=0, combine="allgather"), "decay": 0.9}


def recorded(folder: Path, every: int = 1, **options: Any) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Of each rank, before each exchange, its parameters and the common ones; the records are files in ``folder``."""

    def run(comm: Communicator) -> tuple[list[np.ndarray], list[np.ndarray]]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        own, common = [], []
        with JsonLines(folder / f"{comm.rank}.jsonl", every=every) as lines:
            diloco = DiLoCo(model, comm, optimizer, every=None, telemetry=lines, **options)
            for number in range(4):
                train(model, optimizer, comm.rank, range(3 * number, 3 * number + 3))
                own.append(flat(model))
                common.append(torch.cat([one.detach().reshape(-1) for one in diloco._common.values()]).numpy().copy())
                diloco.exchange()
        return own, common

    return on_ranks(2, run)


def records_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines[:2]] == ["run", "step"]
    return [line for line in lines if line["kind"] == "step"]


def test_norms_of_rounds_are_those_of_numpy(tmp_path: Path) -> None:
    held = recorded(tmp_path)
    for rank in range(2):
        found = records_of(tmp_path, rank)
        assert [one["step"] for one in found] == [0, 1, 2, 3]
        for number, one in enumerate(found):
            moves = [common[number] - own[number] for own, common in held]
            mean = np.mean(moves, axis=0)
            expected = {"move": moves[rank], "average": mean, "drift": moves[rank] - mean}
            for name, vector in expected.items():
                assert one["round"][name] == pytest.approx(float(np.linalg.norm(vector)), rel=1e-4)
            assert one["round"]["fragment"] == 0
            assert one["round"]["seconds"] >= one["round"]["waited"] >= 0
            assert (one["elements"], one["dense_elements"], one["tensors"]) == (179, 179, [])
        sent = [one["bytes_sent"] for one in found]
        assert all(after - before >= 4 * 179 for before, after in itertools.pairwise(sent))


def test_residuals_of_compressed_rounds(tmp_path: Path) -> None:
    held = recorded(tmp_path, **SPARSE)
    found = records_of(tmp_path, 1)
    own, common = held[1]
    name, elements, _, selected, move, residual, _ = found[0]["tensors"][0]
    assert (name, elements, selected) == ("0.weight", 96, 10)
    moved = (common[0] - own[0])[:96]
    assert move == pytest.approx(float(np.linalg.norm(moved)), rel=1e-4)
    left = np.sort(np.abs(moved))[:-10]
    assert residual == pytest.approx(float(np.linalg.norm(left)), rel=1e-4)
    assert {len(one["tensors"]) for one in found} == {5}


def test_only_every_so_many_rounds(tmp_path: Path) -> None:
    recorded(tmp_path, every=3)
    assert [one["step"] for one in records_of(tmp_path, 0)] == [0, 3]


def test_fragments_are_told_apart(tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with JsonLines(tmp_path / f"{comm.rank}.jsonl") as lines:
            DiLoCo(model, comm, optimizer, every=6, streaming=Streaming(3, delay=2, mix=0.5), telemetry=lines)
            train(model, optimizer, comm.rank, range(14))

    on_ranks(2, run)
    found = records_of(tmp_path, 0)
    assert [one["step"] for one in found] == [*range(len(found))]
    assert [one["round"]["fragment"] for one in found] == [0, 1, 2, 0, 1, 2]
    assert [one["elements"] for one in found] == [96, 32, 51] * 2


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["dense", "sparse"])
def test_the_report_draws_rounds(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    recorded(tmp_path, **options)
    file, picture = tmp_path / "0.jsonl", tmp_path / "rounds.svg"
    done = CliRunner().invoke(make_app(), ["report", str(file), "--plot", str(picture)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "training waits" in " ".join(done.output.split())
    drawn = picture.read_text()
    for text in ("drift", "average", "move", "seconds of an exchange", "round"):
        assert text in drawn
    assert ("residual norm / gradient norm" in drawn) == bool(options)
    said = CliRunner().invoke(make_app(), ["report", str(file), "--json"])
    rounds = json.loads(said.stdout)["rounds"]
    assert [one["round"] for one in rounds] == [0, 1, 2, 3]
    assert all(one["drift"] > 0 for one in rounds)
    assert telemetry.read(file).of_round("drift") == [(one["round"], one["drift"]) for one in rounds]


def test_scalars_for_tensorboard() -> None:
    class Writer:
        def __init__(self) -> None:
            self.said: dict[str, float] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.said[name] = value

    writer, model = Writer(), network()
    with Communicator.local(1)[0] as comm:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        DiLoCo(model, comm, optimizer, every=2, telemetry=TensorBoard(writer, every=1))
        train(model, optimizer, 0, range(2))
    assert writer.said["telegrad/round/drift"] == 0
    assert writer.said["telegrad/round/move"] == writer.said["telegrad/round/average"] > 0


def test_what_takes_no_records() -> None:
    model = network()
    with Communicator.local(1)[0] as comm, pytest.raises(TypeError, match="telemetry is a int"):
        DiLoCo(model, comm, torch.optim.SGD(model.parameters(), 0.1), telemetry=3)  # type: ignore[arg-type]
