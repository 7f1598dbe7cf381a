"""``telegrad profile``: whose times it takes, what it prints, writes and draws, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.advice import RECIPES
from telegrad.tools.bench import model_profile
from telegrad.tools.cli import profile as command
from telegrad.tools.cli.profile import tables_of

_app = typer.Typer()
_app.command()(command.profile)

MODELS = """
import torch
from torch import nn

made = []

def make_model(batch=4):
    made.append(batch)
    x = torch.randn(batch, 6)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), lambda model: model(x).square().mean()

def many(**options):
    return make_model(**options)

def plain():
    return make_model()

def wrong():
    return nn.Linear(2, 2)

def no_scalar():
    return nn.Linear(2, 2), lambda model: model(torch.ones(3, 2))

def no_gradient():
    return nn.Linear(2, 2), lambda model: torch.ones(())

def no_tensor():
    return nn.Linear(2, 2), lambda model: 3.0

def needs(width):
    return make_model()

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), lambda model: model(torch.ones(3, 2)).sum()

def not_called():
    return nn.Linear(2, 2), lambda model: model.weight.sum() + model.bias.sum()

def not_finite():
    return nn.Linear(2, 2), lambda model: model(torch.ones(3, 2)).sum() * float("nan")

constant = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "profiled_models.py").write_text(MODELS)
    (tmp_path / "profiled_broken.py").write_text("import profiled_nowhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("target", ["profiled_models:make_model", "profiled_models.py:many"], ids=["module", "file"])
def test_a_model_of_ones_own(folder: Path, target: str) -> None:
    to_json, to_plot = folder / "trace.json", folder / "trace.png"
    status, said = _run(target, "--batch", "7", "--steps", "2", "--json", str(to_json), "--plot-file", str(to_plot))
    assert status == 0
    assert "4 gradients, 188 B" in said
    trace = Trace.from_json(to_json.read_text())
    assert sorted(trace.names) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert dict(zip(trace.names, trace.sizes, strict=True))["0.weight"] == 120
    assert trace.compute_s > 0
    assert to_plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", model_profile.OPTIMIZERS)
def test_the_step_of_the_optimizer_is_timed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.optim.Optimizer] = []
    make = model_profile.OPTIMIZERS[name]
    monkeypatch.setitem(model_profile.OPTIMIZERS, name, lambda given: made.append(make(given)) or made[-1])
    file = folder / "trace.json"
    status, said = _run("profiled_models:make_model", "--steps", "2", "--optimizer", name, "--json", str(file))
    assert status == 0
    assert len(made) == 1
    assert Trace.from_json(file.read_text()).rest_s > 0
    assert "a step of the optimizer" in said
    assert {**RECIPES}.keys() == {**model_profile.OPTIMIZERS}.keys()


def test_the_batch_is_passed_on_only_where_it_is_given(folder: Path) -> None:
    factory = model_profile.open_factory("profiled_models:make_model")
    made = factory.__globals__["made"]
    made.clear()
    model_profile.make(factory, None)
    model_profile.make(factory, 9)
    assert made == [4, 9]


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        ("make_model", [], "names no function"),
        ("profiled_nowhere:x", [], "there is no module 'profiled_nowhere' here"),
        ("nowhere.py:x", [], "there is no file nowhere.py"),
        ("profiled_models:x", [], "has no function 'x'"),
        ("profiled_models:constant", [], "has no function 'constant'"),
        ("profiled_models:wrong", [], "returns a Linear: it must return (model, loss)"),
        ("profiled_models:plain", ["--batch", "3"], "takes no argument batch"),
        ("profiled_models:no_scalar", [], "the loss is a tensor of shape (3, 2)"),
        ("profiled_models:no_gradient", [], "of shape () without a gradient"),
        ("profiled_models:no_tensor", [], "the loss is a float"),
        ("profiled_models:needs", [], "cannot be called so (missing a required argument: 'width')"),
        ("profiled_models:frozen", [], "no parameter that requires a gradient"),
        ("profiled_models:not_called", [], "the loss does not call the model itself"),
        ("profiled_models:not_finite", [], "the loss is nan"),
        ("profiled_models:make_model", ["--json", "/nowhere/x.json"], "does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_misuse_is_refused(folder: Path, target: str, arguments: list[str], said: str) -> None:
    status, text = _run(target, *arguments)
    assert status == 2
    assert said in text


def test_what_a_module_lacks_itself_is_its_own_error(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="profiled_nowhere"):
        _run("profiled_broken:make_model")


def test_the_largest_and_the_slowest_first() -> None:
    trace = Trace(("a", "b", "c"), (10, 30, 20), (0.2, 0.1, 0.7), 0.5, "by hand")
    largest, slowest = tables_of(trace, 2)
    assert [*largest.columns[0].cells] == ["b", "c"]
    assert [*slowest.columns[0].cells] == ["c", "a"]
    assert [*slowest.columns[5].cells] == ["70.0%", "20.0%"]
    assert [*largest.columns[6].cells] == ["300.00 ms", "1.00 s"]
    empty, _ = tables_of(Trace((), (), (), 0.0), 2)
    assert empty.row_count == 0
    (still, _) = tables_of(Trace(("a",), (0,), (0.0,), 0.0), 2)
    assert [*still.columns[3].cells] == ["–"]
