"""``telegrad linear``: training among real ranks, what is said of damage, and predictions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from telegrad.linear import LinearModel, TrainingSettings, objective, read_libsvm, train
from telegrad.tools.cli import make_app
from telegrad.tools.cli.linear import _divergence, in_options, loss_text

SETTINGS = ("--batch", "50", "--epochs", "4", "--l2", "0.001", "--held-out", "0.2")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), ["linear", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random = np.random.default_rng(4)
    weights = random.normal(size=80)
    lines = []
    for _ in range(300):
        chosen = np.sort(random.choice(80, 8, replace=False))
        label = 1 if weights[chosen].sum() + 0.2 * random.normal() > 0 else 0
        lines.append(f"{label} " + " ".join(f"{index + 1}:1" for index in chosen))
    found = tmp_path / "data.svm"
    found.write_text("\n".join(lines))
    return found


def trained(path: Path, model: Path, *more: str) -> tuple[int, str]:
    return run("train", str(path), "--model", str(model), *SETTINGS, *more)


def test_ranks_train_the_model_of_one_and_predict_with_it(path: Path, tmp_path: Path) -> None:
    model, figures = tmp_path / "model.npz", tmp_path / "figures.json"
    status, said = trained(path, model, "--ranks", "3", "--json", str(figures))
    assert status == 0, said
    assert "logistic, 300 rows of 8.0 entries, 80 features, 3 ranks, batches of 50" in said
    rows = read_libsvm(path)
    alone = train(rows, TrainingSettings(batch=50, epochs=4, l2=0.001, held_out=0.2))
    found = LinearModel.load(model)
    assert np.allclose(found.weights, alone.model.weights, atol=1e-6)
    written: dict[str, Any] = json.loads(figures.read_text())
    assert [one["held_out_loss"] for one in written["epochs"]] == pytest.approx(
        [one.held_out_loss for one in alone.epochs], rel=1e-5
    )
    assert all(one["comm_s"] > 0 and one["compute_s"] > 0 for one in written["epochs"])
    assert sorted(one.name for one in tmp_path.glob("*.rows")) == [f"data.svm.{rank}of3.rows" for rank in range(3)]

    out = tmp_path / "predictions.txt"
    status, said = run("predict", str(path), "--model", str(model), "--out", str(out))
    assert status == 0, said
    assert np.array_equal(np.loadtxt(out), found.predict(rows))
    right = np.mean((np.loadtxt(out) > 0) == (rows.labels > 0))
    assert "300 rows; mean loss" in said
    assert f"accuracy {100 * right:.2f} %, AUC 0." in said
    assert "a model of zeros does better" not in said
    run("predict", str(path), "--model", str(model), "--out", str(out), "--scores")
    assert np.allclose(np.loadtxt(out), found.scores(rows))


def test_a_model_that_does_not_fit_the_rows_is_told(path: Path, tmp_path: Path) -> None:
    model = LinearModel(np.full(80, 100, np.float32), 0.0, "logistic")
    model.save(tmp_path / "model.npz")
    status, said = run("predict", str(path), "--model", str(tmp_path / "model.npz"))
    assert status == 0, said
    assert "a model of zeros does better: is the first feature 0 or 1 as in training? See --zero-based" in said


def test_a_hinge_whose_ranks_exchange_nothing(tmp_path: Path) -> None:
    """So many columns that coordinates of the dual descend: any number of ranks writes the same model."""
    random, data = np.random.default_rng(4), tmp_path / "wide.svm"
    rows = [np.sort(random.choice(400, 8, replace=False)) + 1 for _ in range(200)]
    data.write_text("".join(f"{sum(row) % 2} " + " ".join(f"{one}:1" for one in row) + "\n" for row in rows))
    weights = []
    for ranks in ("1", "2"):
        model = tmp_path / f"{ranks}.npz"
        code, said = run("train", str(data), "--loss", "hinge", "--ranks", ranks, "--model", str(model))
        assert code == 0, said
        weights.append(LinearModel.load(model).weights.tobytes())
    assert weights[0] == weights[1]


def test_numbers_have_neither_accuracy_nor_auc(path: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    status, said = trained(
        path, tmp_path / "m.npz", "--ranks", "1", "--loss", "squared_error", "--json", str(figures), "--no-cache"
    )
    assert status == 0, said
    assert "AUC" not in said
    assert json.loads(figures.read_text())["epochs"][0]["auc"] is None
    assert not list(tmp_path.glob("*.rows"))
    status, said = run("predict", str(path), "--model", str(tmp_path / "m.npz"))
    assert status == 0
    assert "accuracy" not in said


def test_a_damaged_line_ends_the_job_or_is_left_out(path: Path, tmp_path: Path) -> None:
    path.write_text(path.read_text() + "\n1 7:x\n")
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "2")
    assert status == 1
    assert "data.svm, line 301: '7:x' has no value" in said
    assert "--skip-damaged leaves out damaged lines" in said
    assert not (tmp_path / "m.npz").exists()
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "2", "--skip-damaged")
    assert status == 0
    assert "1 damaged line left out" in said
    assert "data.svm, line 301: '7:x' has no value" in said  # of the last rank
    path.write_text("1 6:y\n" + path.read_text())
    _, said = trained(path, tmp_path / "m.npz", "--ranks", "3", "--skip-damaged")
    assert said.index("line 1: '6:y' has no value") < said.index("line 302: '7:x' has no value")
    path.write_text(path.read_text().removeprefix("1 6:y\n"))
    status, said = run("predict", str(path), "--model", str(tmp_path / "m.npz"))
    assert status == 1
    assert "line 301" in said
    status, said = run("predict", str(path), "--model", str(tmp_path / "m.npz"), "--skip-damaged")
    assert "300 rows, 1 damaged line left out" in said


def test_of_damaged_lines_the_first_is_named_whoever_finds_it(path: Path, tmp_path: Path) -> None:
    lines = path.read_text().splitlines()
    for at in (20, 120, 290):
        lines[at] = f"1 {at}:x"
    path.write_text("\n".join(lines))
    for ranks in ("2", "3", "3"):
        status, said = trained(path, tmp_path / "m.npz", "--ranks", ranks)
        assert status == 1
        assert "line 21: '20:x' has no value" in said
        assert "line 121" not in said


def test_each_epoch_is_a_line_where_there_is_no_terminal(path: Path, tmp_path: Path) -> None:
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "2")
    assert status == 0
    assert [said.count(f"epoch {epoch}: loss 0.") for epoch in range(1, 6)] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("name", ["data.svm", "data.svm.xz"])
def test_a_file_without_a_byte_is_said_to_be_empty(tmp_path: Path, name: str) -> None:
    empty, model = tmp_path / name, tmp_path / "m.npz"
    empty.touch()
    LinearModel(np.ones(3, np.float32), 0.0, "hinge", 1).save(model)
    for status, said in (trained(empty, model, "--ranks", "2"), run("predict", str(empty), "--model", str(model))):
        assert status == 1
        assert said.endswith(f"{empty}: the file is empty: name one that has rows")


@pytest.mark.parametrize(
    ("number", "ranks", "optimizer"),
    [
        (signal.SIGINT, "1", "sgd"),
        (signal.SIGINT, "2", "adagrad"),
        (signal.SIGTERM, "1", "adagrad"),
        (signal.SIGTERM, "2", "sgd"),
    ],
)
def test_what_an_interrupted_training_leaves(
    path: Path, tmp_path: Path, number: signal.Signals, ranks: str, optimizer: str
) -> None:
    model = tmp_path / "model.npz"
    settings: tuple[str, ...] = SETTINGS if optimizer == "sgd" else SETTINGS[2:]  # without --batch
    settings += ("--epochs", "1000000", "--ranks", ranks, "--optimizer", optimizer, "--model", str(model))
    with subprocess.Popen(
        [sys.executable, "-m", "telegrad", "linear", "train", str(path), *settings], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "epoch 1: loss" in process.stdout.readline()
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert not model.exists()
    partial = tmp_path / "model.partial.npz"
    assert f"interrupted; the model so far: {partial}" in rest
    assert np.count_nonzero(LinearModel.load(partial).weights) > 0
    assert sorted(one.suffix for one in tmp_path.iterdir() if one.suffix != ".rows") == [".npz", ".svm"]


def test_a_model_that_cannot_be_written_is_said(path: Path) -> None:
    status, said = trained(path, Path("/dev/full"), "--ranks", "1")
    assert status == 1
    assert "cannot write the model to /dev/full: No space left on device" in said


def test_outputs_that_would_be_one_file_or_none(path: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.npz"
    status, said = trained(path, model, "--json", str(model))
    assert status == 2
    assert "is what --model writes: name another file" in " ".join(said.replace("│", "").split())
    trained(path, model, "--ranks", "1")
    status, said = run("predict", str(path), "--model", str(model), "--scores")
    assert status == 2
    assert "Invalid value for --scores: it says what --out has" in said


def test_labels_that_are_no_classes(path: Path, tmp_path: Path) -> None:
    path.write_text("3 1:1\n1 1:1\n")
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "2")
    assert status == 1
    assert "labels are not two classes for --loss logistic: row 0 (from 0) has 3, and of 2 rows 0 have -1" in said
    assert "Make them -1 and 1 or 0 and 1, or use --loss squared_error for numbers" in said
    path.write_text("1 1:1\n")
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "1", "--held-out", "0.9")
    assert status == 1
    assert "give more, or a smaller --held-out" in said
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "1", "--features", "4294967295")
    assert status == 1
    assert "4294967295 features are more than the 4294967293 that a model can be trained on" in said
    assert "--features" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--loss", "squared"), "Invalid value for --loss: squared does not exist"),
        (
            ("--optimizer", "newton", "--batch", "5"),
            "Invalid value for --batch: 5 is not for --optimizer newton, whose steps follow from the data: leave",
        ),
        (
            ("--optimizer", "sgd", "--tol", "0.1"),
            "Invalid value for --tol: --optimizer sgd has none: leave this out",
        ),
        (("--tol", "0"), "Invalid value for --tol: 0.0 must be a finite number above 0: a part of the objective"),
        (("--batch", "0"), "Invalid value for --batch: 0 must be at least 1"),
        (
            ("--features", "0"),
            "Invalid value for --features: 0 must be from 1 to 4294967295, or left out for as many as occur",
        ),
        (("--l2", "-1"), "Invalid value for --l2: -1.0 must be a finite number, 0 or more"),
        (
            ("--learning-rate", "0"),
            "Invalid value for --learning-rate: 0.0 must be a finite number above 0, or left out",
        ),
        (("--held-out", "1"), "Invalid value for --held-out: 1.0 must be from 0 to below 1"),
        (("--batch", str(2**63)), f"Invalid value for --batch: {2**63} must be at most {2**40}"),
        (("--epochs", str(10**23)), f"Invalid value for --epochs: {10**23} must be at most {2**40}"),
        (("--threads", "1025"), "Invalid value for --threads: 1025 must be at most 1024"),
        (
            ("--optimizer", "newton", "--loss", "hinge"),
            "Invalid value for --optimizer: newton is not for --loss hinge: use 'dual', or leave it out",
        ),
        (
            ("--optimizer", "adam"),
            "Invalid value for --optimizer: adam does not exist: use one of auto, newton, dual, sgd, adagrad",
        ),
        (("--network", "token-ring"), "network 'token-ring' is not known"),
        (("--json", "/nowhere/x.json"), "the folder /nowhere does not exist"),
    ],
    ids=[
        *(
            "loss",
            "newton-batch",
            "sgd-tol",
            "tol",
            "batch",
            "features",
            "l2",
            "learning-rate",
            "held-out",
            "batches",
            "epochs",
            "threads",
        ),
        *("newton-hinge", "optimizer"),
        *("network", "json"),
    ],
)
def test_wrong_options_are_said_before_the_work(
    path: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    status, output = run("train", str(path), "--model", str(tmp_path / "m.npz"), *options)
    assert status == 2
    assert said in output.replace("│ ", "").replace(" │", "")


def test_a_file_that_is_no_model(path: Path) -> None:
    status, said = run("predict", str(path), "--model", str(path))
    assert status == 1
    assert f"{path} is no model of telegrad linear train, but no npz file: name a file that its --model, or" in said
    assert "pickle" not in said


def test_predictions_are_made_with_the_base_of_the_training(path: Path, tmp_path: Path) -> None:
    """Indices from 1 are read with the base 0 as well, so that only the model knows."""
    model, out = tmp_path / "m.npz", tmp_path / "predictions.txt"
    trained(path, model, "--ranks", "2", "--zero-based", "true")
    found = LinearModel.load(model)
    assert found.index_base == 0
    for options in ((), ("--zero-based", "auto"), ("--zero-based", "true")):
        status, said = run("predict", str(path), "--model", str(model), "--out", str(out), "--scores", *options)
        assert status == 0, said
        assert np.allclose(np.loadtxt(out), found.scores(read_libsvm(path, zero_based=True)))
        assert "--zero-based" not in said
    status, said = run("predict", str(path), "--model", str(model), "--zero-based", "false")
    assert status == 2
    said = " ".join(said.replace("│", "").split())
    assert "Invalid value for --zero-based: false is not that of" in said
    assert "which was trained with --zero-based true: leave the option out, and if features of the data begin" in said


def test_a_model_that_does_not_say_its_base_is_warned_of(path: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "m.npz", tmp_path / "predictions.txt"
    trained(path, model, "--ranks", "1")
    found = replace(LinearModel.load(model), index_base=None)
    found.save(model)
    for options, base in (((), 1), (("--zero-based", "false"), 1), (("--zero-based", "true"), 0)):
        status, said = run("predict", str(path), "--model", str(model), "--out", str(out), "--scores", *options)
        assert status == 0, said
        assert np.allclose(np.loadtxt(out), found.scores(read_libsvm(path, zero_based=base == 0)))
        warned = "m.npz does not say whether the indices that it was trained on begin with 0 or 1: --zero-based false"
        assert (warned in said) is (not options)


def test_the_comment_above_the_rows_tells_training_and_prediction_their_base(path: Path, tmp_path: Path) -> None:
    model, test = tmp_path / "m.npz", tmp_path / "test.svm"
    says_zero = tmp_path / "zero.svm"
    says_zero.write_text("# Column indices are zero-based\n" + path.read_text())
    trained(says_zero, model, "--ranks", "2")
    found = LinearModel.load(model)
    assert (found.index_base, found.base_is_guessed) == (0, False)
    for text in (path.read_text(), says_zero.read_text()):  # the first has no index 0
        test.write_text(text)
        status, said = run("predict", str(test), "--model", str(model))
        assert status == 0, said
    test.write_text("# Column indices are one-based\n" + path.read_text())
    status, said = run("predict", str(test), "--model", str(model))
    assert status == 1
    assert "a comment above the rows means --zero-based false, but" in said
    assert "was trained with --zero-based true: train again with --zero-based false if that is right for both" in said
    status, said = run("train", str(says_zero), "--model", str(model), "--zero-based", "false", "--ranks", "2")
    assert status == 1
    assert "column indices are zero-based, and --zero-based false that they are not: give --zero-based auto" in said


def started_by(launcher: str) -> list[str]:
    """The beginning of a command whose two ranks another launcher starts."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    return [str(Path(sys.executable).with_name("mpiexec")), "-n", "2"]


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_under_other_launchers_their_ranks_train(path: Path, tmp_path: Path, launcher: str) -> None:
    model = tmp_path / "model.npz"
    command = [str(Path(sys.executable).with_name("telegrad")), "linear", "train", str(path), "--model", str(model)]
    done = subprocess.run(
        [*started_by(launcher), *command, *SETTINGS],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("2 ranks, batches of 50") == 1
    alone = train(read_libsvm(path), TrainingSettings(batch=50, epochs=4, l2=0.001, held_out=0.2))
    assert np.allclose(LinearModel.load(model).weights, alone.model.weights, atol=1e-6)


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_what_an_interrupted_training_leaves_is_said_by_one_rank(path: Path, tmp_path: Path, launcher: str) -> None:
    command = [str(Path(sys.executable).with_name("telegrad")), "linear", "train", str(path), "--batch", "50"]
    command += ["--epochs", "1000000", "--model", str(tmp_path / "model.npz")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*started_by(launcher), *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert "epoch 1: loss" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    partial = tmp_path / "model.partial.npz"
    assert rest.count(f"the model so far: {partial}") == 1
    assert np.count_nonzero(LinearModel.load(partial).weights) > 0


def test_a_rank_of_mpiexec_says_what_it_needs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    status, said = trained(path, tmp_path / "m.npz")
    assert status == 1
    assert "ranks under mpiexec need mpi4py: pip install 'telegrad[bench]'" in said


@pytest.mark.parametrize("option", ["--model", "--json"])
def test_what_is_read_is_not_written(path: Path, tmp_path: Path, option: str) -> None:
    before = path.read_bytes()
    own = [] if option == "--model" else ["--model", str(tmp_path / "m.npz")]
    status, said = run("train", str(path), *own, option, str(path), "--ranks", "1")
    assert status == 2
    assert "is read by this command" in said
    trained(path, tmp_path / "m.npz", "--ranks", "1")
    for out in (path, tmp_path / "m.npz", tmp_path / "data.svm.0of1.rows"):
        status, said = run("predict", str(path), "--model", str(tmp_path / "m.npz"), "--out", str(out))
        assert status == 2
        assert "is read by this command" in said
    assert path.read_bytes() == before


def test_a_training_that_diverges_is_said(path: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    more = ("--ranks", "1", "--loss", "squared_error", "--learning-rate", "1e30", "--json", str(figures))
    status, said = trained(path, tmp_path / "m.npz", *more)
    assert status == 1
    assert "the training has diverged (objective nan, with no weights 0." in said
    assert "no model is written: try a lower --learning-rate than 1e+30, or leave it out" in said
    assert not (tmp_path / "m.npz").exists()
    written = json.loads(figures.read_text())
    assert (written["objective"], written["diverged"]) == (None, True)


def test_a_training_that_diverges_in_its_last_step_leaves_no_model(path: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.npz"
    more = ("--ranks", "1", "--epochs", "1", "--batch", "1000", "--learning-rate", "1e30")
    status, said = run("train", str(path), "--model", str(model), *more)
    assert status == 1
    assert "so no model is written: try a lower --learning-rate than 1e+30, or leave it out" in said
    assert not model.exists()


def test_a_training_that_diverges_to_finite_numbers_is_said(path: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    more = ("--loss", "squared_error", "--learning-rate", "3", "--json", str(figures))
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "2", *more)
    assert status == 1
    assert "so no model is written: try a lower --learning-rate than 3, or leave it out" in said
    assert not (tmp_path / "m.npz").exists()
    written = json.loads(figures.read_text())
    assert 10 * written["objective_at_zero"] < written["objective"] < 1e30
    said = _divergence(TrainingSettings(optimizer="adagrad"), {"objective": 7.0, "objective_at_zero": 0.5})
    assert said.endswith(
        "(objective 7, with no weights 0.5), so no model is written: try a lower --learning-rate than 0.1"
    )
    said = _divergence(TrainingSettings(), {"objective": 7.0, "objective_at_zero": 0.5})
    assert said.endswith("so no model is written: scale the features")


@pytest.mark.parametrize(("label", "only"), [("1", "1"), ("0", "-1 or 0")], ids=["ones", "zeros"])
def test_one_class_alone_is_warned_of(path: Path, tmp_path: Path, label: str, only: str) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith(label)]
    path.write_text("\n".join(lines))
    status, said = trained(path, tmp_path / "m.npz", "--ranks", "2")
    assert status == 0
    assert f"all labels are {only}: a model of one class tells nothing apart" in said
    _, said = trained(path, tmp_path / "m.npz", "--ranks", "2", "--loss", "squared_error")
    assert "all labels" not in said


def test_large_losses_are_short() -> None:
    assert [loss_text(loss) for loss in (0.69314718, 99999.0, 1.23456e12)] == ["0.69315", "99999.00000", "1.235e+12"]


def test_labels_that_a_model_cannot_be_judged_by(path: Path, tmp_path: Path) -> None:
    trained(path, tmp_path / "m.npz", "--ranks", "1")
    other = tmp_path / "other.svm"
    other.write_text("7 1:1\n1 2:1\n")
    status, said = run("predict", str(other), "--model", str(tmp_path / "m.npz"))
    assert status == 0
    assert "2 rows; labels are neither -1 and 1 nor 0 and 1" in said
    assert "accuracy" not in said


@pytest.mark.parametrize(
    ("options", "own", "title"),
    [
        (("--optimizer", "adagrad", "--threads", "2"), {"optimizer": "adagrad"}, "batches of 50, adagrad"),
        (("--overlap", "--l1", "0.002"), {"overlap": True, "l1": 0.002}, "batches of 50, overlapped"),
        (("--l1", "0.002"), {"optimizer": "newton", "batch": None, "l1": 0.002}, "Newton's method"),
    ],
    ids=["adagrad", "overlap", "l1"],
)
def test_optimisers(path: Path, tmp_path: Path, options: tuple[str, ...], own: dict[str, Any], title: str) -> None:
    model, figures = tmp_path / "m.npz", tmp_path / "figures.json"
    settings = SETTINGS if "batch" not in own else SETTINGS[2:]
    more = ("--model", str(model), "--ranks", "2", *options, "--json", str(figures))
    status, said = run("train", str(path), *settings, *more)
    assert status == 0, said
    assert f"2 ranks, {title}" in said
    rows = read_libsvm(path)
    alone = train(rows, TrainingSettings(**{"batch": 50, **own}, epochs=4, l2=0.001, held_out=0.2)).model
    assert np.allclose(LinearModel.load(model).weights, alone.weights, atol=1e-5)
    written: dict[str, Any] = json.loads(figures.read_text())
    assert written["objective"] == pytest.approx(objective(alone, rows, 0.001, l1=own.get("l1", 0.0)), rel=1e-5)
    assert written["optimizer"] == own.get("optimizer", "sgd")


def test_errors_name_options_and_leave_file_names_alone() -> None:
    said = in_options("/data/held_out.svm: held_out=0.5 is too much; give a smaller held_out")
    assert said == "/data/held_out.svm: --held-out 0.5 is too much; give a smaller --held-out"
