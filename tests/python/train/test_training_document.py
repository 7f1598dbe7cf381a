"""docs/training.md names the options that there are, with their defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import telegrad.ddp
from telegrad import DDPState, Momentum, TopK, Warmup
from telegrad.compress import SELECTIONS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "training.md").read_text()


def _shown(default: object) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return f"{default:g}" if type(default) in (int, float) else str(default)


def _options(of: Callable[..., Any]) -> dict[str, object]:
    options = inspect.signature(of).parameters.values()
    return {one.name: one.default for one in options if one.name not in ("comm", "model")}


@pytest.mark.parametrize(("table", "of"), [(0, DDPState), (1, TopK)])
def test_options_and_defaults(table: int, of: Callable[..., Any]) -> None:
    options, named = _options(of), set()
    text = TEXT.split("## ")[0].split("What `TopK` takes:")[table]
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", text, flags=re.MULTILINE):
        names = re.findall(r"`(\w+)`", cells[0])
        named |= set(names)
        shown = cells[1].strip("`").replace(",", "")
        default = options[names[0]]
        assert shown == ("TopK()" if default == TopK() else _shown(default)), names
    assert named == set(options)


def test_names_exist() -> None:
    found = re.findall(r"telegrad\.(ddp|synchronizer)\.(\w+)", TEXT)
    assert found
    for module, name in found:
        assert hasattr(getattr(telegrad, module), name), name
    for name in (
        re.findall(r'For ((?:`"\w+"`,?\s*)+)\.', TEXT)[0].replace("`", "").replace('"', "").replace(",", " ").split()
    ):
        assert "same_sign" in inspect.signature(SELECTIONS[name]).parameters
    of_trainers = {"precision", "strategy", "mixed_precision", "max_grad_norm"}
    of_ddp = {"find_unused_parameters", "divide_by_initial_world_size"}
    ours = {name for of in (DDPState, TopK, Momentum, Warmup) for name in _options(of)}
    known = {*ours, *of_trainers, *of_ddp, "weight_decay", "keep", "output"}
    for option in re.findall(r"`(\w+)=", TEXT):
        assert option in known, option
