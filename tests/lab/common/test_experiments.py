"""``python -m lab``: its list, the help of every experiment, and programs that find the lab wherever they start."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.common import experiments, programs
from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.cli import COMMANDS

LAB = programs.ROOT / "lab"
NAMES = tuple(experiments.experiments())


def lab(*arguments: str, folder: Path = programs.ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_every_file_of_the_lab_is_an_experiment_or_shared() -> None:
    tops = {path.name.removesuffix(".py") for path in LAB.iterdir() if not path.name.startswith("__")}
    assert {name.replace("_", "-") for name in tops - {"common"}} == set(NAMES)
    assert {"overlap", "accuracy", "topk", "faults", "simulated-faults", "paper-steps"} <= set(NAMES)


@pytest.mark.parametrize("asked", [(), ("--help",)])
def test_all_are_listed_with_a_line_each(asked: tuple[str, ...]) -> None:
    done = lab(*asked)
    assert done.returncode == 0, done.stderr
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert listed == experiments.experiments()


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_every_experiment(name: str) -> None:
    done = CliRunner().invoke(experiments.app([name]), [name, "--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    assert f"{name} [OPTIONS]" in done.output
    assert "telegrad bench" not in done.output


def test_one_is_called_as_it_is_listed(tmp_path: Path) -> None:
    done = lab("paper-steps", "--figure", "mg-wfbp-10", folder=tmp_path)  # PYTHONPATH has the tree's root
    assert done.returncode == 0, done.stderr
    assert "training steps: mg-wfbp-10" in done.stdout


def test_what_is_no_experiment_is_said() -> None:
    done = lab("overlapping")
    assert done.returncode == 1
    assert done.stderr.startswith("'overlapping' is no experiment: use one of accuracy, adamw, algorithms, ")


def test_experiments_are_no_commands_of_the_package() -> None:
    from telegrad.tools.cli.bench import app as bench
    from telegrad.tools.cli.simulate import app as simulate

    commands = {command.name for command in COMMANDS if command.name != "linear"}  # users train linear models, too
    for group in (bench, simulate):
        commands |= {one.name or one.callback.__name__ for one in group.registered_commands if one.callback}
    assert commands & {*NAMES, "topk-allreduce", "allreduce-topk"} == {"training-step"}  # closed forms; the lab trains


def test_ranks_find_the_lab_wherever_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    programs.let_children_import_lab()
    programs.let_children_import_lab()
    assert os.environ["PYTHONPATH"] == str(programs.ROOT)
    monkeypatch.chdir(tmp_path)
    heard: list[str] = []
    with Ranks(
        "lab.small_pages:rank_main",
        1,
        arguments=["1", "1"],
        timeout_s=100,
        environment=SINGLE_THREADED,
        on_line=lambda _, line: heard.append(line),
    ) as ranks:
        ranks.wait()
    assert '"at_first"' in heard[-1]


def test_other_places_stay_before_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/one", "/two"]))
    programs.let_children_import_lab()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/one", "/two", str(programs.ROOT)]


def test_an_experiment_that_says_nothing_of_itself_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="begins with a sentence about it"):
        experiments._first_line("import lab")


@pytest.mark.parametrize("path", sorted(LAB.rglob("*.py")), ids=lambda path: str(path.relative_to(LAB)))
def test_what_is_shared_stands_on_no_experiment(path: Path) -> None:
    if path.parent.name != "common":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lab"):
            assert str(node.module).startswith("lab.common"), node.module


def test_experiments_use_each_other_in_one_direction() -> None:
    uses: dict[str, set[str]] = {}
    for path in LAB.rglob("*.py"):
        own = path.relative_to(LAB).parts[0].removesuffix(".py")
        modules = [
            str(node.module) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        ]
        others = {name.split(".")[1] for name in modules if name.startswith("lab.")}
        uses.setdefault(own, set()).update(others - {own, "common"})
    assert uses["errors"] == {"faults"}
    graphlib.TopologicalSorter(uses).prepare()  # raises CycleError
