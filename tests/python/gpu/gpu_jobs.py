"""What tests on a GPU need there, and jobs of scenarios that ranks run one after the other, each saying how it went."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from telegrad.launch import Ranks

HERE = Path(__file__).parent
_NAMES = {"cuda.bindings": "cuda-bindings", "triton": "triton"}


def missing(*modules: str) -> str | None:
    """Why a test cannot run here; ``None``: it can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    return next((f"{_NAMES[module]} is not installed" for module in modules if not _has(module)), None)


def skip_without(*modules: str) -> pytest.MarkDecorator:
    reason = missing(*modules)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def reports(target: str, ranks: int, arguments: list[str], device: str, *, timeout_s: float) -> list[dict[str, str]]:
    """What each rank said of each scenario."""
    lines: list[list[str]] = [[] for _ in range(ranks)]
    with Ranks(
        target,
        ranks,
        arguments=arguments,
        environment={
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "train"), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "TELEGRAD_TEST_DEVICE": device,
        },
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
        on_line=lambda rank, line: lines[rank].append(line.rstrip()),
        timeout_s=timeout_s,
    ) as started:
        try:
            started.wait()
        except Exception as error:
            for said in lines:
                said.append(f"- {error}")
    return [dict(line.split(" ", 1) for line in said if " " in line) for said in lines]


def run_scenarios(scenarios: Iterable[Callable[[], object]]) -> None:
    """On a rank. The first one that fails is the last."""
    for scenario in scenarios:
        try:
            scenario()
        except Exception:
            print(f"{scenario.__name__} {traceback.format_exc()!r}", flush=True)
            sys.exit(1)
        print(f"{scenario.__name__} ok", flush=True)
