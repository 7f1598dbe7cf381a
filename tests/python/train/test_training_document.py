"""docs/training.md names the options that there are, with their defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import telegrad.ddp
from telegrad import DDPState
from telegrad.compress import SELECTIONS

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "training.md").read_text()


def _shown(default: object) -> str:
    if isinstance(default, str):
        return f'"{default}"'
    return f"{default:g}" if type(default) in (int, float) else str(default)


def test_options_and_defaults() -> None:
    parameters = dict(list(inspect.signature(DDPState).parameters.items())[2:])
    named: set[str] = set()
    for cells in re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", TEXT.split("## ")[0], flags=re.MULTILINE):
        names = re.findall(r"`(\w+)`", cells[0])
        named |= set(names)
        defaults = [one.strip("`").replace(",", "") for one in re.split(r", ", cells[1])]
        for name, default in zip(names, defaults, strict=False):
            assert default == _shown(parameters[name].default), name
    assert named == set(parameters)


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
    for option in re.findall(r"`(\w+)=", TEXT):
        known = {*inspect.signature(DDPState).parameters, *of_trainers, *of_ddp, "weight_decay", "keep", "output"}
        assert option in known, option
