"""``telegrad linear``: what is said when a training ends too early, and of data that have no rows or are no files."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from telegrad import Communicator
from telegrad.launch.joining import RANK
from telegrad.linear import LinearModel, TrainingSettings
from telegrad.linear.checkpoint import Checkpoint
from telegrad.linear.data import LibsvmFormat
from telegrad.linear.job import Job, writes_files
from telegrad.linear.job import run as run_rank
from telegrad.tools.cli import linear, make_app

ENDLESS = ("--epochs", "1000000", "--batch", "20", "--ranks", "2")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), ["linear", *arguments], env={"COLUMNS": "200"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "data.svm"
    found.write_text("".join(f"{row % 2} {1 + row % 2}:1 {3 + row % 5}:0.5\n" for row in range(60)))
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = tmp_path / "model.npz"
    LinearModel(np.array([-1, 1], np.float32), 0.0, "logistic", 1).save(found)
    return found


def test_a_training_goes_on_from_its_checkpoint(path: Path, tmp_path: Path) -> None:
    file, figures = tmp_path / "state.npz", tmp_path / "figures.json"
    command = ["train", str(path), "--model", str(tmp_path / "m.npz"), "--checkpoint", str(file), "--ranks", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "telegrad", "linear", *command, "--epochs", "1000000", "--batch", "20"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "epoch 1: loss" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert f"the same command goes on from {file}" in process.stdout.read()
    kept = len(Checkpoint.load(file).reports)
    more = ("--batch", "20", "--epochs", str(kept + 2), "--json", str(figures))
    status, said = run(*command, *more)
    assert status == 0, said
    assert f"the checkpoint has {kept:,} epoch" in said
    assert f"epoch {kept}: loss" not in said  # again
    assert f"epoch {kept + 1}: loss" in said
    assert f"checkpoint: {file}" in said
    epochs = json.loads(figures.read_text())["epochs"]
    assert [one["epoch"] for one in epochs] == [*range(1, kept + 3)]
    assert not any(math.isnan(one["loss"]) for one in epochs)

    status, said = run(*command, "--batch", "30")
    assert status == 1
    assert "is of a training with --batch 20, and here it is 30: give the same, or another file, or remove" in said
    assert "goes on from" not in said
    status, said = run(*command[:4], "--checkpoint-every", "2")
    assert status == 2
    assert "without --checkpoint there is none: leave this out" in said


def test_a_checkpoint_that_could_not_be_read_again_is_refused(path: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = ["train", str(path), "--model", str(tmp_path / "m.npz"), "--checkpoint"]
    for name, why in {
        "m.partial.npz": "is where Ctrl-C leaves",
        "m.npz": "--model writes",
        "pipe": "no regular",
    }.items():
        status, said = run(*command, str(tmp_path / name))
        assert status == 2
        assert why in said


def test_a_checkpoint_that_cannot_be_written_is_said_where_the_model_cannot_be_either(
    path: Path, tmp_path: Path
) -> None:
    there = tmp_path / "no folder"
    files = {"model": str(there / "m.npz"), "checkpoint": str(there / "state.npz")}
    job = Job(data=str(path), format=LibsvmFormat(), settings=TrainingSettings(epochs=2), cache=False, **files)
    with Communicator.local(1)[0] as comm, pytest.raises(OSError, match="cannot write the checkpoint"):
        run_rank(job, comm, lambda message: None)


def test_only_rank_0_of_another_launcher_must_be_able_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK, raising=False)
    assert writes_files()
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not writes_files()
    monkeypatch.setenv("RANK", "0")
    assert writes_files()


def test_what_a_lost_rank_leaves_is_said(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "telegrad", "linear", "train", str(path), "--model", str(tmp_path / "m.npz")]
    with subprocess.Popen([*command, *ENDLESS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "epoch 1: loss" in process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        said = process.stdout.read()
    assert process.returncode == 1
    assert "ended with SIGKILL" in said
    assert said.rstrip().endswith(f"the model so far: {tmp_path / 'm.partial.npz'}")
    assert LinearModel.load(tmp_path / "m.partial.npz").weights.size == 7


def test_a_training_that_takes_longer_than_it_may(path: Path, tmp_path: Path) -> None:
    status, said = run("train", str(path), "--model", str(tmp_path / "m.npz"), *ENDLESS, "--timeout", "4")
    assert status == 1
    assert " of 1000000 after 4 s: give more time (--timeout), or fewer --epochs" in said
    assert "was here" not in said
    assert said.endswith(f"the model so far: {tmp_path / 'm.partial.npz'}")


@pytest.mark.parametrize("text", ["\n# nothing\n", "1 x\n-1 y\n"], ids=["comments", "damaged"])
def test_data_without_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.svm"
    path.write_text(text)
    status, said = run("train", str(path), "--model", str(tmp_path / "m.npz"), "--ranks", "2", "--skip-damaged")
    assert status == 1
    if "x" in text:
        assert f"{path} has no rows: all of its 2 lines are damaged; {path}, line 1: 'x' is no index:value pair" in said
    else:
        assert said.endswith(f"{path} has no rows: give data that have some")


def test_ranks_do_not_share_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, said = run("train", str(pipe), "--model", str(tmp_path / "m.npz"))
    assert status == 2
    assert f"{pipe} is no regular file, of which ranks could read parts: write it to one" in said


def test_a_pipe_is_predicted_for(path: Path, model: Path, tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pipe.write_bytes, path.read_bytes())
        status, said = run("predict", str(pipe), "--model", str(model), "--out", str(out))
    assert (status, said) == (0, f"predictions: {out} 60 rows; mean loss 0.31326, accuracy 100.00 %, AUC 1.0000")
    assert out.read_text() == "-1\n1\n" * 30


def test_damaged_lines_are_shown_by_predict(path: Path, model: Path) -> None:
    path.write_text("x\n" + path.read_text())
    status, said = run("predict", str(path), "--model", str(model), "--skip-damaged")
    assert status == 0
    assert f"60 rows, 1 damaged line left out; mean loss 0.31326, accuracy 100.00 %, AUC 1.0000 {path}, line 1:" in said


def test_data_that_may_not_be_read(path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(linear, "read_libsvm", refuse)
    status, said = run("predict", str(path), "--model", str(model))
    assert (status, said) == (1, f"[Errno 13] Permission denied: '{path}'")


def test_a_loss_that_still_falls_is_said(path: Path, tmp_path: Path) -> None:
    begin = ("train", str(path), "--model", str(tmp_path / "m.npz"), "--ranks", "1")
    status, said = run(*begin, "--epochs", "2")
    assert status == 0
    assert "60 rows of 2.0 entries, 7 features, 1 rank, Newton's method" in said
    assert re.search(r"2 steps ended the training when the objective was up to about [\d.]+ % above the optimum", said)
    status, said = run(*begin)
    assert status == 0
    assert "above the optimum" not in said
    status, said = run(*begin, "--epochs", "2", "--optimizer", "sgd")
    assert status == 0
    assert "60 rows of 2.0 entries, 7 features, 1 rank, batches" in said
    falls = "% an epoch when the training ended: give more --epochs"
    assert f"{falls}, a smaller --batch, a larger --learning-rate (it was 1.78) or --optimizer adagrad" in said
    _, said = run(*begin, "--epochs", "2", "--optimizer", "adagrad")
    assert f"{falls}, a smaller --batch or a larger --learning-rate (it was 0.1)" in said


def test_a_seed_that_cannot_be(path: Path) -> None:
    status, said = run("train", str(path), "--seed", "-1")
    assert status == 2
    assert "Invalid value for --seed: -1 must be an int, 0 or more" in said


@pytest.mark.parametrize("options", [(), ("--loss", "hinge"), ("--optimizer", "sgd")], ids=["newton", "dual", "sgd"])
def test_what_is_reached_is_shown_and_drawn(path: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    plot, figures = tmp_path / "objective.png", tmp_path / "figures.json"
    asked = ("train", str(path), "--model", str(tmp_path / "m.npz"), "--ranks", "2", "--held-out", "0.2", *options)
    status, said = run(*asked, "--plot", str(plot), "--json", str(figures))
    assert status == 0, said
    assert plot.read_bytes().startswith(b"\x89PNG")
    reached = r"loss [\d.]+" if "sgd" in options else r"objective [\d.e-]+, gap [\d.e-]+ %"
    assert re.search(rf"epoch 1: {reached}, held-out [\d.]+, accuracy [\d.]+ %, [\d.]+ s", said)
    written = json.loads(figures.read_text())
    assert written["optimizer"] == (options[-1].replace("hinge", "dual") if options else "newton")
    assert written["converged"] == ("sgd" not in options)
    if "sgd" not in options:
        assert written["gap"] <= 1e-4
        assert written["epochs"][-1]["gap"] == written["gap"]
    else:
        assert written["gap"] is None


@pytest.mark.parametrize("objective", [1.23456e-05, math.nan], ids=["newton", "sgd"])
def test_the_table_of_epochs_fits_into_80_columns(objective: float) -> None:
    epoch = {"epoch": 1000, "loss": 1.23456e-05, "objective": objective, "gap": 1.23456e-7, "held_out_loss": 12.34567}
    epoch |= {"accuracy": 1.0, "auc": 0.98765, "compute_s": 1234.56, "comm_s": 0.99999, "entries": 999_999, "steps": 1}
    epoch |= {} if objective == objective else {"gap": math.nan}
    console = Console(width=80, file=io.StringIO())
    console.print(linear.table_of([epoch, {**epoch, "compute_s": 0.0123, "entries": 3_231_963}], "title"))
    said = console.file.getvalue()
    assert "…" not in said
    cells = ["1.23456e-05", "1.2e-05 %", "12.34567", "100.00 %", "0.9877", "1234.56 s", "999.99 ms"]
    cells += ["1,000", "3,232"]
    for cell in cells if objective == objective else cells[2:]:
        assert cell in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_a_resumed_training_that_ends_leaves_no_model_of_its_break(path: Path, tmp_path: Path) -> None:
    partial, state = tmp_path / "m.partial.npz", tmp_path / "state.npz"
    asked = ["train", str(path), "--model", str(tmp_path / "m.npz"), "--checkpoint", str(state), "--ranks", "1"]
    partial.write_bytes(b"of something else")
    assert run(*asked, "--epochs", "1")[0] == 0
    assert partial.exists()
    assert run(*asked, "--epochs", "2")[0] == 0
    assert not partial.exists()


@pytest.mark.parametrize("text", ["1:19.5 2:18\n", "1:19.5 2:18\n3:1 4:2\n"], ids=["one label", "two labels"])
def test_lines_without_a_label_are_said_to_be_read_with_weights(tmp_path: Path, text: str) -> None:
    data = tmp_path / "data.svm"
    data.write_text(text * 20)
    said = run("train", str(data), "--model", str(tmp_path / "m.npz"), "--ranks", "1")[1]
    if "3:1" in text:
        assert "a line 3:0.5 4:1 without a label is read as label 3 with the weight 0.5" in said
    else:
        assert "have weights, as lines begin with label:weight; a line without a label would be read so, too" in said
        assert "all labels are 1" in said
