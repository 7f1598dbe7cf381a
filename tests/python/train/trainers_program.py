"""The entry point of the ranks of test_trainers.py: the scenarios of those trainers that are installed."""

from __future__ import annotations

import importlib
import warnings

import ddp_program

PROGRAMS = {
    "pytorch_lightning": "lightning_program",
    "accelerate": "accelerate_program",
    "transformers": "transformers_program",
}


def run(init_method: str, *installed: str) -> None:
    warnings.simplefilter("ignore")  # of trainers: workers of loaders, folders that exist
    scenarios = [one for name in installed for one in importlib.import_module(PROGRAMS[name]).SCENARIOS]
    ddp_program.run_all(init_method, scenarios)
