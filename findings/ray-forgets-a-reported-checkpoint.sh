#!/usr/bin/env bash
# Ray Train 2.60.0 (TorchTrainer, FailureConfig(max_failures=1)), torch 2.13.0, 2 workers.
#
# Behaviour: ray.train.report(metrics, checkpoint) has returned on all workers, and the checkpoint's files are in the
# storage folder. If a worker dies before the controller asks the workers the next time (every 2 s,
# RAY_TRAIN_HEALTH_CHECK_INTERVAL_S; 20 s here, so that it does not depend on luck), the controller never registers it: the
# restarted workers get an older checkpoint, or none, from ray.train.get_checkpoint(). A worker that calls
# ray.train.get_all_reported_checkpoints() first, which waits for the controller, gets the last one.
#
# Seen:
#   killed after report(): resumes without a checkpoint; folders in storage before the restart: 1
#   killed after get_all_reported_checkpoints(): resumes from a checkpoint; folders in storage before the restart: 1
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 "ray[train]==2.60.0" numpy
cat >"$folder/program.py" <<'PYTHON'
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import torch.distributed as dist
from ray.train.torch import TorchTrainer


def train(config):
    rank, notes = ray.train.get_context().get_world_rank(), Path(config["notes"])
    checkpoint = ray.train.get_checkpoint()
    if (notes / "died").exists():
        (notes / "resumed").write_text("from a checkpoint" if checkpoint else "without a checkpoint")
        return
    with tempfile.TemporaryDirectory() as made:
        Path(made, f"rank-{rank}").write_text("state")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(made))
    dist.barrier()  # every worker has reported
    if rank == 1:
        if config["waits"]:
            ray.train.get_all_reported_checkpoints()
        (notes / "died").write_text(str(len([*notes.glob("run/checkpoint_*/rank-1")])))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
for waits, name in ((False, "report()"), (True, "get_all_reported_checkpoints()")):
    notes = Path(sys.argv[1], "waits" if waits else "goes")
    notes.mkdir()
    TorchTrainer(
        train,
        train_loop_config={"notes": str(notes), "waits": waits},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(notes), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
    died, resumed = ((notes / file).read_text() for file in ("died", "resumed"))
    print(f"killed after {name}: resumes {resumed}; folders in storage before the restart: {died}", flush=True)
PYTHON
export RAY_USAGE_STATS_ENABLED=0 RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=300 RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=20 OMP_NUM_THREADS=1
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>"$folder/errors" | grep "^killed after" | tee "$folder/seen" || tail -20 "$folder/errors"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
