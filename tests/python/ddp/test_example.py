"""The scripts that README and docs/how-to/gpu.md name run as they stand, learn, and are warned of no choice; on the CPU
without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from ports import free_port
from torchrun_client import ask

_EXAMPLES = Path(__file__).parents[3] / "examples"
_LOSS_OF_GUESSING = 2.30  # ln 10


def said_by(torchrun_server: str, example: str, folder: Path, *arguments: str) -> str:
    """What two ranks of it print."""
    script = [str(_EXAMPLES / example), *arguments]
    request = {"script": script, "ranks": 2, "folder": str(folder), "environment": {}, "port": free_port()}
    statuses, said = ask(torchrun_server, request)
    assert statuses == [0, 0], said
    assert "ChoiceWarning" not in said
    return str(said)


def test_the_example_learns(torchrun_server: str, tmp_path: Path) -> None:
    said = said_by(torchrun_server, "ddp.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), ", said, re.MULTILINE)]
    assert len(losses) == 4, said
    assert losses[-1] < _LOSS_OF_GUESSING - 0.5, losses


def test_the_example_for_gpus_keeps_what_it_goes_on_from(torchrun_server: str, tmp_path: Path) -> None:
    said = said_by(torchrun_server, "ddp_gpu.py", tmp_path)
    found = re.search(r"^step 100 on \w+: loss ([\d.]+), ", said, re.MULTILINE)
    assert found is not None, said
    assert float(found[1]) < _LOSS_OF_GUESSING
    for rank in range(2):
        kept = torch.load(tmp_path / "ddp_gpu" / f"rank{rank}.pt", weights_only=True)
        assert kept["telegrad"]["step"] == 100
        assert any(entry["residual"].any() for entry in kept["telegrad"]["compressor"]["parameters"].values())
    assert re.search(r"^step 200 on \w+: loss ", said_by(torchrun_server, "ddp_gpu.py", tmp_path), re.MULTILINE)


def test_the_elastic_example_goes_on(torchrun_server: str, tmp_path: Path) -> None:
    assert "\nstep 40: loss" in said_by(torchrun_server, "elastic.py", tmp_path, "elastic", "40")
    said = said_by(torchrun_server, "elastic.py", tmp_path, "elastic", "60")
    assert "goes on from elastic/step-40 on 2 ranks" in said
    assert "\nstep 60: loss" in said


def test_replicas_of_the_example_learn_together(torchrun_server: str, tmp_path: Path) -> None:
    said = said_by(torchrun_server, "diloco.py", tmp_path)
    found = re.search(r"^7 rounds: held-out loss ([\d.]+), ", said, re.MULTILINE)
    assert found is not None, said
    assert float(found[1]) < _LOSS_OF_GUESSING - 0.5
