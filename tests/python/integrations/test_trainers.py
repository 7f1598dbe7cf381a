"""Lightning's Trainer, Hugging Face's and Accelerate train over telegrad's hook as over DDP alone, and resume."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from telegrad.launch import Ranks

pytestmark = pytest.mark.ranks("torch")

RANKS = 2
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
SCENARIOS = {
    "pytorch_lightning": [
        "lightning_trains_and_resumes",
        "lightning_example_learns_as_plain_ddp",
        "lightning_goes_on_in_the_next_fit",
        "lightning_refusals",
    ],
    "accelerate": ["accelerate_trains_and_resumes", "accelerate_example_learns_as_plain_ddp"],
    "transformers": [
        "transformers_trains_and_resumes",
        "transformers_accumulates_and_evaluates",
        "transformers_goes_on_in_the_next_training",
        "transformers_best_model",
        "transformers_evaluates_first",
        "transformers_copies_and_searches",
        "transformers_resumes_other_options",
        "transformers_example_learns_as_plain_ddp",
        "transformers_refusals",
    ],
}
_TORCHRUN = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""What tells trainers that their ranks are already started. Nobody connects there: the process group is made before."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[dict[str, str]]]:
    """What each rank said of each scenario; all of one job, since importing trainers is slow."""

    @functools.cache
    def report() -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp("job")
        lines: list[list[str]] = [[] for _ in range(RANKS)]

        def environment_of(rank: int) -> dict[str, str]:
            return {name: str(rank) for name in ("RANK", "LOCAL_RANK")} | {
                name: str(RANKS) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
            }

        installed = [name for name in SCENARIOS if find_spec(name)]
        ranks = Ranks(
            "trainers_program:run",
            RANKS,
            arguments=[f"file://{folder / 'store'}", *installed],
            environment={
                "PYTHONPATH": os.pathsep.join([str(HERE), str(EXAMPLES), *sys.path]),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder),
                **_TORCHRUN,
            },
            environment_of=environment_of,
            on_line=lambda rank, line: lines[rank].append(line.rstrip()),
            timeout_s=280,
        )
        with ranks:
            try:
                ranks.wait()
            except Exception as error:
                for said in lines:
                    said.append(f"- {error}")
        return [dict(line.split(" ", 1) for line in said if " " in line) for said in lines]

    return report


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytorch_lightning", "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "telegrad.integrations.lightning", raising=False)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    with pytest.raises(ImportError, match=r"needs Lightning: pip install 'telegrad\[lightning\]'"):
        importlib.import_module("telegrad.integrations.lightning")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "telegrad.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'telegrad\[transformers\]'"):
        importlib.import_module("telegrad.integrations.transformers")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("package", "scenario"), [(one, name) for one, names in SCENARIOS.items() for name in names])
def test_two_ranks(reports: Callable[[], list[dict[str, str]]], package: str, scenario: str) -> None:
    if not find_spec(package):
        pytest.skip(f"{package} is not installed: pip install 'telegrad[lightning,transformers]'")
    said = [report.get(scenario, f"was not reached: {report.get('-')}") for report in reports()]
    assert said == ["ok"] * RANKS
