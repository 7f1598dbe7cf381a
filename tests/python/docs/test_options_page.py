"""docs/reference/options.md names the options that there are, with their defaults, and how-to pages no others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import telegrad.ddp
import telegrad.linear
import telegrad.synchronizer
from telegrad import (
    BoundedTopk,
    Cheapest,
    Communicator,
    DDPState,
    DiLoCo,
    LowRank,
    Momentum,
    OkTopk,
    Quantised,
    Synchronizer,
    TopK,
    Warmup,
)
from telegrad.compress import SELECTIONS, BySize
from telegrad.ddp import ParameterCompression

DOCS = Path(__file__).resolve().parents[3] / "docs"
OPTIONS = (DOCS / "reference" / "options.md").read_text()
LINEAR = (DOCS / "reference" / "linear.md").read_text()
PAGES = "\n".join(path.read_text() for path in sorted((DOCS / "how-to").glob("*.md")))


def _shown(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, str):
        return f'"{default}"'
    return f"{default:g}" if type(default) in (int, float) else str(default)


def _options(of: Callable[..., Any]) -> dict[str, object]:
    options = inspect.signature(of).parameters.values()
    return {one.name: one.default for one in options if one.name not in ("comm", "model")}


@pytest.mark.parametrize(
    "of",
    [
        DDPState,
        TopK,
        LowRank,
        OkTopk,
        BoundedTopk,
        Quantised,
        Cheapest,
        Momentum,
        Warmup,
        telegrad.linear.TrainingSettings,
    ],
)
def test_options_and_defaults(of: Callable[..., Any]) -> None:
    options, named = _options(of), set()
    text = re.split(r"^## ", (OPTIONS + LINEAR).partition(f"\n## {of.__name__}\n")[2], flags=re.MULTILINE)[0]
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", text, flags=re.MULTILINE):
        names = re.findall(r"`(\w+)`", cells[0])
        named |= set(names)
        shown = cells[1].strip("`").replace(",", "")
        default = options[names[0]]
        assert shown == ("TopK()" if default == TopK() else _shown(default)), names
    assert named == set(options)


def test_defaults_of_the_linear_command() -> None:
    typer = pytest.importorskip("typer")
    from telegrad.tools.cli.linear import app

    command = typer.main.get_command(app).commands["train"]
    given = {one.name: one.default for one in command.params}
    settings = _options(telegrad.linear.TrainingSettings)
    differ = {name: given[name] for name, default in settings.items() if given.get(name, default) != default}
    (told,) = re.findall(r"the same, except `--held-out ([\d.]+)`", LINEAR)
    assert differ == {"held_out": float(told)}
    options = {option for one in command.params for option in one.opts}
    assert {f"--{name.replace('_', '-')}" for name in settings} <= options


def test_names_exist() -> None:
    found = re.findall(r"telegrad\.(ddp|synchronizer)\.(\w+)", OPTIONS + PAGES)
    assert found
    for module, name in found:
        assert hasattr(getattr(telegrad, module), name), name


def test_selections_of_one_sign() -> None:
    (listed,) = re.findall(r"`same_sign` needs one of these selections: (.*)\.", OPTIONS)
    names = set(re.findall(r'"(\w+)"', listed))
    assert names == {
        name for name, selection in SELECTIONS.items() if "same_sign" in inspect.signature(selection).parameters
    }


def test_options_that_pages_name_exist() -> None:
    ours = {
        name
        for of in (DDPState, TopK, TopK.oktopk, Momentum, Warmup, Synchronizer, Communicator.from_torch, BySize)
        for name in _options(of)
    }
    ours |= (
        set(_options(ParameterCompression)) | set(_options(telegrad.calibrate)) | set(_options(telegrad.ddp.reshard))
    )
    ours |= {*_options(DiLoCo), *_options(DiLoCo.sparse), *_options(LowRank)}
    ours |= {"async_op", "driver", "purpose", "wire"}
    of_others = {"find_unused_parameters", "static_graph", "bucket_cap_mb", "cycle_momentum", "pg_options", "cpu"}
    of_others |= {"max_grad_norm", "mixed_precision", "precision", "set_to_none", "strategy", "use_reentrant"}
    of_others |= {"bf16_stochastic_round", "weights_only"}
    named = set(re.findall(r"`(\w+)=", PAGES))
    assert of_others <= named
    for option in named:
        assert option in ours | of_others or option.isupper(), option
