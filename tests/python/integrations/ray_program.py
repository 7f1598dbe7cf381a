"""What test_ray_train.py starts: a Ray of its own, and three runs of examples/ray_train.py on it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray_train
import torch

STEPS = 60
DIES_AT = 50  # after the checkpoint of step 40


def train_and_die(config: dict[str, Any]) -> None:
    """Worker 1 kills itself between two checkpoints, once; then it notes the step at which it resumes."""
    given = ray_train.batch
    died, resumed = Path(os.environ["NOTES"], "died"), Path(os.environ["NOTES"], "resumed")

    def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rank == 1 and died.exists() and not resumed.exists():
            resumed.write_text(str(step))
        if step == DIES_AT and rank == 1 and not died.exists():
            ray.train.get_all_reported_checkpoints()  # waits: Ray may not have registered the last one yet
            died.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return given(step, rank)

    ray_train.batch = batch
    try:
        ray_train.train(config)
    finally:
        ray_train.batch = given


def names_backend(config: dict[str, Any]) -> None:
    """Ray has made the group of a backend that nothing here has imported."""
    assert torch.distributed.get_backend() == "telegrad"
    assert type(torch.distributed.group.WORLD).__module__ == "telegrad.torch_backend.process_group"
    ray_train.train(config)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as session:  # short: sockets lie in it
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=100 << 20,
                configure_logging=False,
                _temp_dir=session,
                runtime_env={"env_vars": {"NOTES": str(folder), "OMP_NUM_THREADS": "1"}},
            )
            for name, backend, loop in (
                ("hook", "gloo", ray_train.train),
                ("backend", "telegrad", names_backend),
                ("killed", "telegrad", train_and_die),
            ):
                result = ray_train.run(folder / name, STEPS, backend, loop)
                assert result.metrics["step"] == STEPS, result
                (folder / name / "last").symlink_to(result.checkpoint.path)
                print("trained", name, flush=True)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
