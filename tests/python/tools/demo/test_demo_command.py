"""``telegrad demo`` from end to end, with a tiny model over loopback, and how it ends when something goes wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from telegrad.launch import RankFailed
from telegrad.tools.cli import make_app
from telegrad.tools.demo.job import FIRST_LOSS, Corpus, ModelSize, Settings, open_place, train
from telegrad.tools.demo.training import sent_bytes

pytestmark = pytest.mark.ranks("torch")

_COMMAND = [sys.executable, "-c", "from telegrad.tools.cli import main; main()", "demo"]
_TINY = ["--ranks", "2", "--width", "64", "--layers", "1", "--context", "16", "--network", "loopback"]
_OWN_INTERFACES = ["--network", "10gbit"] if os.geteuid() == 0 else []
"""Where bytes are compared: the loopback interface also counts those of tests that run meanwhile."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    root.mkdir()
    for i in range(60):
        (root / f"module{i}.py").write_text(f"def function{i}(argument):\n    return argument + {i}\n" * 20)
    return root


@dataclass(frozen=True)
class _Done:
    returncode: int
    stdout: str
    stderr: str


def _demo(*options: str, cwd: Path) -> _Done:
    """In this process, whose ranks are forked with torch; ``test_an_interrupt_ends_all_ranks`` executes the command."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(make_app(), ["demo", *_TINY, *options], env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return _Done(done.exit_code, done.stdout, done.stderr)


def test_three_runs(library: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "new" / "figures.json"
    done = _demo(
        "--steps", "6", "--validations", "2", "--text", str(library), "--json", str(figures_file), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "bytes are the loopback interface's" in " ".join(done.stdout.split())
    picture = tmp_path / "demo-results" / "demo.png"
    assert f"plot: {picture}" in done.stdout
    assert picture.is_file()
    figures = json.loads(figures_file.read_text())
    assert set(figures) == {"runs", "missing", "network", "ranks", "steps", "device", "machine"}
    assert (figures["missing"], figures["device"]) == ({}, "cpu")
    assert (figures["network"], figures["ranks"], figures["steps"]) == ("loopback", 2, 6)
    ddp, dense, sparse = figures["runs"]
    assert [ddp["name"], dense["name"], sparse["name"]] == ["ddp-gloo", "telegrad-dense", "telegrad-sparse"]
    assert dense["validation_loss"] == pytest.approx(ddp["validation_loss"], rel=1e-4)
    assert sparse["validation_loss"] < FIRST_LOSS
    for run in figures["runs"]:
        assert run["ranks_agree"] is True
        assert 0 < run["exposed_comm_s_median"] < run["step_s_median"]
        assert [one["step"] for one in run["curve"]] == [3, 6]
    gradient_bytes = 4 * ddp["parameters"]  # a ring of two ranks sends each gradient once
    assert dense["bytes_per_rank_step"] > 0.95 * gradient_bytes
    assert ddp["bytes_per_rank_step"] > 0.95 * gradient_bytes


def test_another_scheme(library: Path, tmp_path: Path) -> None:
    options = ["--runs", "telegrad-sparse", "--scheme", "gaussiank", "--steps", "3", "--validations", "1"]
    files = ["--text", str(library), "--json", str(tmp_path / "figures.json")]
    done = _demo(*_OWN_INTERFACES, *options, *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    (sparse,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert sparse["ranks_agree"] is True
    assert sparse["bytes_per_rank_step"] < 4 * sparse["parameters"] / 4


def test_a_rank_that_fails_ends_the_run(library: Path, tmp_path: Path) -> None:
    Corpus.prepare(tmp_path, library)
    size = ModelSize(width=64, layers=1, heads=1, context=16)
    with open_place("loopback", 2) as place:
        settings = Settings(run="ddp-gloo", corpus=str(tmp_path), steps=2, interface="none0", model=size)
        with pytest.raises(RankFailed, match="interface='none0' does not exist here"):
            train(settings, place, timeout_s=60)


def test_a_run_that_fails_shows_its_ranks_last_words_and_takes_no_other_along(library: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    options = ["--steps", "3", "--validations", "1", "--runs", "telegrad-dense,ddp-gloo", "--learning-rate", "1e30"]
    done = _demo(*options, "--text", str(library), "--json", str(figures_file), cwd=tmp_path)
    figures = json.loads(figures_file.read_text())
    assert done.returncode == 1, done.stdout
    assert [run["name"] for run in figures["runs"]] == ["ddp-gloo"]
    assert list(figures["missing"]) == ["telegrad-dense"]
    assert "all ranks are stopped. Its last words:" in done.stdout
    assert "lower the learning rate" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr


def test_shared_memory_counts_telegrads_own_bytes(library: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    options = ["--network", "shm", "--steps", "4", "--validations", "1", "--runs", "ddp-gloo,telegrad-dense"]
    done = _demo(*options, "--text", str(library), "--json", str(figures_file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    ddp, dense = json.loads(figures_file.read_text())["runs"]
    gradient_bytes = 4 * ddp["parameters"]
    assert dense["bytes_per_rank_step"] == pytest.approx(gradient_bytes, rel=0.05)
    assert ddp["bytes_per_rank_step"] > 0.95 * gradient_bytes


def test_without_a_gpu_nothing_is_trained_on_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(make_app(), ["demo", "--device", "cuda", "--json", "figures/demo.json"])
    assert (done.exit_code, done.output) == (1, "no GPU: torch sees none here, and nothing was measured\n")
    assert not [*tmp_path.iterdir()]


def test_what_a_device_refuses_is_told_with_its_reason(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.setattr("telegrad.tools.demo.job.TARGET", "refusing_rank:main")
    Corpus.prepare(tmp_path, library)
    size = ModelSize(width=64, layers=1, heads=1, context=16)
    with open_place("shm", 2) as place:
        settings = Settings(run="telegrad-sparse", corpus=str(tmp_path), steps=2, interface="lo", model=size)
        result = train(settings, place, timeout_s=60)
    assert result.refused == "density=0.01: gradients on a device are not compressed"
    assert result.steps == []


def test_an_interrupt_ends_all_ranks(library: Path, tmp_path: Path) -> None:
    command = [*_COMMAND, *_TINY, "--steps", "1000000", "--validations", "100000", "--text", str(library)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "step 10:" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], f"it ended by itself, after: {''.join(lines[-40:])}"
        assert len(_ranks_with(tmp_path)) == 2
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "interrupted; all ranks are stopped" in rest
    assert not _ranks_with(tmp_path)
    assert not list(tmp_path.glob("telegrad-demo-*"))


def _ranks_with(folder: Path) -> list[int]:
    """Processes that were given a corpus in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if f"{folder}/telegrad-demo-".encode() in command:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "ddp-nccl"], "'ddp-nccl' does not exist"),
        (["--runs", "ddp-gloo,ddp-gloo"], "names a run twice"),
        (["--network", "fast"], "write a number and kbit, mbit or gbit"),
        (["--scheme", "ring"], "Invalid value for --scheme: ring does not exist: use one of allreduce, oktopk"),
        (["--density", "0"], "Invalid value for --density: 0.0 must be above 0"),
        (["--learning-rate", "nan"], "Invalid value for --learning-rate: nan must be a finite number above 0"),
        (["--bucket-mb", "0"], "Invalid value for --bucket-mb: 0.0 must be a finite number above 0"),
        (["--json", "/dev/null/x.json"], "cannot write to /dev/null"),
        (["--width", "65"], "65 is not a multiple of 64"),
        (["--device", "tpu"], "'tpu' does not exist: use cpu, cuda"),
        (["--context", "100000000"], "Invalid value for --context: 100000000 needs a longer text"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(make_app(), ["demo", *_TINY, *options], env={"COLUMNS": "120"})
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_without_root_it_uses_loopback_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from telegrad.tools.cli.demo import _place

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    console = Console(record=True, quiet=False, width=200)
    with _place(console, None, 2) as place:
        assert place.name == "loopback"
        assert place.interface == "lo"
    assert "Over loopback, not 1gbit: network namespaces need root" in console.export_text()


def test_a_rate_without_root_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer
    from rich.console import Console

    from telegrad.tools.cli.demo import _place

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(typer.BadParameter, match="need root.*or use --network loopback"), _place(Console(), "1gbit", 2):
        pass


def test_the_counter_of_the_loopback_interface() -> None:
    before = sent_bytes("lo")
    assert before >= 0
    with pytest.raises(ValueError, match="interface='none0' does not exist here"):
        sent_bytes("none0")


def test_hooks_that_torch_has(library: Path, tmp_path: Path) -> None:
    options = ["--runs", "ddp-gloo,ddp-fp16,ddp-powersgd-2", "--steps", "8", "--validations", "1", "--layers", "2"]
    done = _demo(
        *_OWN_INTERFACES, *options, "--text", str(library), "--json", str(tmp_path / "figures.json"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr + done.stdout
    ddp, fp16, powersgd = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert [fp16["name"], powersgd["name"]] == ["ddp-fp16", "ddp-powersgd-2"]
    assert fp16["bytes_per_rank_step"] == pytest.approx(ddp["bytes_per_rank_step"] / 2, rel=0.1)
    assert powersgd["bytes_per_rank_step"] < 0.6 * ddp["bytes_per_rank_step"]  # two steps of eight are dense
    for run in (fp16, powersgd):
        assert run["ranks_agree"] is True
        assert run["validation_loss"] < FIRST_LOSS


@pytest.mark.parametrize("name", ["ddp-powersgd-", "ddp-powersgd-0", "ddp-powersgd-x", "ddp-fp8", "powersgd-2"])
def test_runs_that_do_not_exist(name: str) -> None:
    done = CliRunner().invoke(make_app(), ["demo", "--runs", name], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert f"'{name}' does not exist: use ddp-gloo, " in " ".join(done.output.split())
    known = "ddp-fp16, ddp-powersgd-R or telegrad-lowrank-R of any rank R, or telegrad-diloco-H, telegrad-sparseloco-H"
    assert known in " ".join(done.output.split())


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed")
def test_a_rival_that_is_not_installed() -> None:
    done = CliRunner().invoke(make_app(), ["demo", "--runs", "torchft-diloco-4"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "'torchft-diloco-4' needs torchft: pip install torchft" in " ".join(done.output.split())


def test_torchft_learns_what_our_diloco_learns(library: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    options = ["--runs", "telegrad-diloco-4,torchft-diloco-4", "--steps", "8", "--validations", "1"]
    done = _demo(*options, "--text", str(library), "--json", str(tmp_path / "figures.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    ours, theirs = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert ours["ranks_agree"] is theirs["ranks_agree"] is True
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-4)


def test_runs_that_exchange_every_few_steps(library: Path, tmp_path: Path) -> None:
    runs = "ddp-gloo,telegrad-diloco-4,telegrad-sparseloco-4,telegrad-streaming-4"
    options = ["--runs", runs, "--steps", "10", "--validations", "1"]
    done = _demo(
        *_OWN_INTERFACES, *options, "--text", str(library), "--json", str(tmp_path / "figures.json"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr + done.stdout
    ddp, dense, sparse, streaming = json.loads((tmp_path / "figures.json").read_text())["runs"]
    for run in (dense, sparse, streaming):
        assert run["ranks_agree"] is True  # after the last two steps, too
        assert run["validation_loss"] < FIRST_LOSS
    assert dense["bytes_per_rank_step"] < 0.4 * ddp["bytes_per_rank_step"]  # three rounds in ten steps
    assert 0 < streaming["bytes_per_rank_step"] < 1.5 * dense["bytes_per_rank_step"]
    assert sparse["bytes_per_rank_step"] < 0.2 * dense["bytes_per_rank_step"]  # small tensors go whole
