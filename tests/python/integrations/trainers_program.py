"""The entry point of the ranks of test_trainers.py: the scenarios of those trainers that are installed."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable

import ddp_program

from telegrad import Communicator
from telegrad.ddp import choices

PROGRAMS = {
    "pytorch_lightning": "lightning_program",
    "accelerate": "accelerate_program",
    "transformers": "transformers_program",
}


RIGHT = ("trains_and_resumes", "example_learns_as_plain_ddp")
"""Of these no choice is to be warned of."""


def without_warnings(scenario: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
    @functools.wraps(scenario)
    def watched(comm: Communicator) -> None:
        choices._told.clear()
        scenario(comm)
        assert choices._told == set()

    return watched if scenario.__name__.endswith(RIGHT) else scenario


def run(init_method: str, *installed: str) -> None:
    warnings.simplefilter("ignore")  # of trainers: workers of loaders, folders that exist
    scenarios = [one for name in installed for one in importlib.import_module(PROGRAMS[name]).SCENARIOS]
    ddp_program.run_all(init_method, [*map(without_warnings, scenarios)])
