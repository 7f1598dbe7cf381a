#!/usr/bin/env bash
# torch 2.13.0 with safetensors 0.8.0, CPU, Python 3.11, two ranks over Gloo; the same with torch 2.15.0: a model saved by
# torch.distributed.checkpoint with HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True).
#
# Behaviour: a tensor without dimensions (a learned temperature, a quantizer's scale) is 0 in the consolidated file. Each
# rank's own file has it right, and so has a checkpoint that is not consolidated. One of shape (1,) is right, and so are matrices,
# however they are sharded. Nothing is raised, and torch's own reader returns the 0 as well. A model with any integer or
# bool, as a batch norm's counter, is refused: TypeError. A project that has a copy of this code corrected the scalars there
# in 2025 (NVIDIA-NeMo/Automodel, pull request 301).
#
# Seen (what was saved, then what the file holds):
#   matrix by rows: same
#   matrix by columns: same
#   scale of shape (1,): 3.5, 3.5
#   scale of shape (), a file a rank: 3.5, 3.5
#   scale of shape (), consolidated: 3.5, 0.0
#   scale of shape (), consolidated, by torch's reader: 3.5, 0.0
#   with an integer: TypeError
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def save(tensors, folder, is_consolidated):
    writer = checkpoint.HuggingFaceStorageWriter(
        path=folder, save_distributed=True, enable_consolidation=is_consolidated
    )
    checkpoint.save(dict(tensors), storage_writer=writer)
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    matrix = torch.arange(35.0).view(7, 5)
    tensors = {
        "rows": distribute_tensor(matrix, mesh, [Shard(0)]),
        "columns": distribute_tensor(matrix, mesh, [Shard(1)]),
        "one": torch.tensor([3.5]),
        "scale": torch.tensor(3.5),
    }
    whole = save(tensors, f"{folder}/consolidated", True)
    each = save(tensors, f"{folder}/each", False)
    read = {"scale": torch.tensor(-1.0)}
    checkpoint.load(read, storage_reader=checkpoint.HuggingFaceStorageReader(path=f"{folder}/consolidated"))
    try:
        save({"steps": torch.tensor([3])}, f"{folder}/integers", True)
        refusal = "saved"
    except checkpoint.api.CheckpointException as error:
        refusal = "TypeError" if "TypeError" in str(error) else str(error)
    if rank == 0:
        for name in ("rows", "columns"):
            print(f"matrix by {name}: {'same' if torch.equal(whole[name], matrix) else 'differs'}")
        print(f"scale of shape (1,): 3.5, {whole['one'].item()}")
        print(f"scale of shape (), a file a rank: 3.5, {each['scale'].item()}")
        print(f"scale of shape (), consolidated: 3.5, {whole['scale'].item()}")
        print(f"scale of shape (), consolidated, by torch's reader: 3.5, {read['scale'].item()}")
        print(f"with an integer: {refusal}", flush=True)
    dist.barrier()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
