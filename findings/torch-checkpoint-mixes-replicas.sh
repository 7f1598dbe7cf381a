#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo; the same with 2.15.0: torch.distributed.checkpoint (DCP) of replicas
# that differ, as between two rounds of local SGD or DiLoCo, saved by dcp.save on all ranks and loaded on all.
#
# Behaviour: DCP takes plain tensors of one name for copies and writes one of them, which is known. But it shares the work of
# writing: each tensor comes from another rank. So what all ranks load is a model that no rank had, layers of one replica
# between layers of another, and a parameter's weights and its momentum may be of different ones. No error, no warning.
# Numbers and other objects come from rank 0. DefaultSavePlanner(dedup_save_to_lowest_rank=True) takes all from rank 0.
#
# Seen (which rank's values come back):
#   default: 0.weight 0, 1.weight 1, 2.weight 0; momentum of 0.weight 1, 1.weight 0, 2.weight 1; a number 0
#   dedup_save_to_lowest_rank: 0.weight 0, 1.weight 0, 2.weight 0; momentum of 0.weight 0, 1.weight 0, 2.weight 0; a number 0
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

PLANNERS = {
    "default": DefaultSavePlanner(),
    "dedup_save_to_lowest_rank": DefaultSavePlanner(dedup_save_to_lowest_rank=True),
}


def state_of(value):
    """Of a model of three layers and of SGD's momentum, each entry of which is ``value``."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    weights = {name: torch.full_like(one, value) for name, one in model.state_dict().items()}
    return {"model": weights, "momentum": {name: one.clone() for name, one in weights.items()}, "number": value}


def told(state):
    of = [", ".join(f"{name} {one[0, 0]:g}" for name, one in state[part].items()) for part in ("model", "momentum")]
    return f"{of[0]}; momentum of {of[1]}; a number {state['number']}"


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, planner in PLANNERS.items():
        dcp.save(state_of(rank), checkpoint_id=f"{folder}/{name}", planner=planner)
        loaded = state_of(-1)
        dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
        both = [None, None]
        dist.all_gather_object(both, told(loaded))
        if rank == 0:
            print(f"{name}: {both[0] if both[0] == both[1] else both}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
