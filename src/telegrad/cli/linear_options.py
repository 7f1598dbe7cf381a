"""Options of ``telegrad linear train`` that say how a model is improved, and what Python says in their names."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Annotated

import typer

from telegrad.cli.options import bad_setting
from telegrad.linear import TrainingSettings
from telegrad.linear.data import LibsvmFormat
from telegrad.linear.index_base import ZeroBased
from telegrad.linear.settings import OPTIMIZERS

Optimizer = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(OPTIMIZERS)}. [bold]adagrad[/] gives rare features longer steps, and often needs "
        "fewer epochs; [bold]coordinate_descent[/] (smooth losses only) moves a few weights in each step as far as is "
        "safe, and needs no learning rate, but twice the memory for the rows."
    ),
]
L2 = Annotated[float, typer.Option("--l2", help="λ of mean loss + λ/2·|w|²: pulls all weights towards 0.")]
L1 = Annotated[
    float, typer.Option("--l1", help="λ of λ·Σ|w_i|, also in the objective: makes weights of no use exactly 0.")
]
Batch = Annotated[
    int,
    typer.Option(
        help="Rows of all ranks together in a step; larger ones need fewer sums, but more epochs. Not for coordinate "
        "descent."
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Of the first step. Default: of sgd what the rows' lengths make safe, often slow; of adagrad 0.1.",
        show_default=False,
    ),
]
Coordinates = Annotated[
    int | None,
    typer.Option(
        help="Weights that each rank moves in a step of coordinate descent; an epoch moves all once. Default: up to "
        "100, and fewer the more features rows have in common.",
        show_default=False,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap",
        help="Compute the next gradient while ranks' sum travels: faster where the network is slow; each gradient then "
        "lacks the step before.",
    ),
]
Threads = Annotated[
    int, typer.Option(help="Of each rank. Ranks times threads should not exceed the cores; no result depends on them.")
]


class ZeroBasedOption(enum.StrEnum):
    """What ``zero_based`` is called here."""

    auto = "auto"
    true = "true"
    false = "false"

    @property
    def value_in_python(self) -> ZeroBased:
        return "auto" if self is self.auto else self is self.true


def zero_based_option(index_base: int) -> str:
    """How this command is told that a file's first feature is ``index_base``."""
    return f"--zero-based {'false' if index_base else 'true'}"


_FIELDS = {field.name for one in (TrainingSettings, LibsvmFormat) for field in dataclasses.fields(one)}
_OF_PYTHON = {
    "overlap=True": "--overlap",
    "strict=False": "--skip-damaged",
    "zero_based=True": "--zero-based true",
    "zero_based=False": "--zero-based false",
    ", or None": ", or left out",
}


def bad_option(error: ValueError) -> typer.BadParameter:
    """What is wrong with a setting, said of the option."""
    return bad_setting(error, _FIELDS, in_options)


def in_options(said: str) -> str:
    """What an error says of Python's arguments, as it is to be said of this command's options."""
    for python, option in _OF_PYTHON.items():
        said = said.replace(python, option)
    said = said.replace("n_features=", "features=").replace("timeout_s=", "--timeout ")
    said = re.sub(
        rf"\b({'|'.join(_FIELDS)})=('[^']*'|[^\s,:;]+)",
        lambda found: f"{_option(found[1])} {found[2].strip(chr(39))}",
        said,
    )
    words = "|".join(name for name in _FIELDS if "_" in name)
    # not as a part of a file's name
    return re.sub(rf"(?<![\w/.-])({words})(?![\w/]|\.\w)", lambda found: _option(found[1]), said)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
