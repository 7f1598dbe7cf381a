"""What tests on a GPU need there, and jobs of scenarios that ranks run one after the other, each saying how it went."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from telegrad.launch import Ranks

HERE = Path(__file__).parent
_PASSED_OVER = "TELEGRAD_TEST_PASSED_OVER"
_SCENARIO_S = 60.0
_END_S = 15.0
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


def reports(
    target: str,
    ranks: int,
    scenarios: Sequence[str],
    arguments: Sequence[str],
    store: Path,
    device: str,
    *,
    timeout_s: float,
) -> list[dict[str, str]]:
    """What each rank said of each scenario. ``target``'s last argument is where torch's processes meet: a file beside
    ``store``. Scenarios behind one that fails, or does not come to its end, are another job's."""
    end = time.monotonic() + timeout_s
    found: list[dict[str, str]] = [{} for _ in range(ranks)]
    begin = 0
    while begin < len(scenarios) and (left_s := end - time.monotonic()) > 0:
        meeting = [*arguments, f"file://{store}-{begin}"]
        said = _job(target, ranks, meeting, device, scenarios[:begin], left_s)
        for known, new in zip(found, said, strict=True):
            why = new.pop(_ENDED, None)
            known.update(new)
            if why is not None:
                known[_ENDED] = why
        begin = 1 + next(
            (at for at in range(begin, len(scenarios)) if any(one.get(scenarios[at]) != "ok" for one in found)),
            len(scenarios),
        )
    return found


_ENDED = "-"  # in place of a scenario: why its job ended


def _job(
    target: str, ranks: int, arguments: Sequence[str], device: str, passed_over: Sequence[str], timeout_s: float
) -> list[dict[str, str]]:
    lines: list[list[str]] = [[] for _ in range(ranks)]

    def take(rank: int, line: str) -> None:
        lines[rank].append(line.rstrip())
        print(f"rank {rank}: {line.rstrip()}", flush=True)

    with Ranks(
        target,
        ranks,
        arguments=list(arguments),
        environment={
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "TELEGRAD_TEST_DEVICE": device,
            _PASSED_OVER: ",".join(passed_over),
        },
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
        on_line=take,
        timeout_s=timeout_s,
    ) as started:
        try:
            started.wait()
        except Exception as error:
            for said in lines:
                said.append(f"{_ENDED} {error}")
    return [dict(line.split(" ", 1) for line in said if " " in line) for said in lines]


def run_scenarios(scenarios: Iterable[Callable[[], object]]) -> None:
    """On a rank. The first one that fails is the last; one that hangs ends the process, with all threads' stacks, and
    so does an end that does."""
    passed_over = os.environ.get(_PASSED_OVER, "").split(",")
    try:
        for scenario in scenarios:
            if scenario.__name__ in passed_over:
                continue
            faulthandler.dump_traceback_later(_SCENARIO_S, exit=True)
            try:
                scenario()
            except Exception:
                print(f"{scenario.__name__} {traceback.format_exc()!r}", flush=True)
                sys.exit(1)
            print(f"{scenario.__name__} ok", flush=True)
    finally:
        faulthandler.dump_traceback_later(_END_S, exit=True)
