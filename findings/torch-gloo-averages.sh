#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo: which types and reductions all_reduce takes.
#
# Behaviour: ReduceOp.AVG, which torch documents for NCCL alone, works over Gloo for floats and complex numbers, and is an
# error for integers. Integers of 16 bits, and unsigned ones of 32 and 64, are an error in all reductions; complex
# numbers of 16-bit halves are summed. SUM of bool is a logical or.
#
# Seen:
#   AVG: bool error, uint8 error, int16 error, int32 error, uint64 error, float16 [1.0, 0.5], bfloat16 [1.0, 0.5], complex32 [(1+0j), (0.5+0j)]
#   SUM: bool [True, True], uint8 [2, 1], int16 error, int32 [2, 1], uint64 error, float16 [2.0, 1.0], bfloat16 [2.0, 1.0], complex32 [(2+0j), (1+0j)]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

TYPES = ("bool", "uint8", "int16", "int32", "uint64", "float16", "bfloat16", "complex32")


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, reduction in (("AVG", dist.ReduceOp.AVG), ("SUM", dist.ReduceOp.SUM)):
        found = []
        for kind in TYPES:
            values = torch.tensor([1, 1] if rank == 0 else [1, 0]).to(getattr(torch, kind))
            try:
                dist.all_reduce(values, reduction)
                found.append(f"{kind} {values.tolist()}")
            except RuntimeError:
                found.append(f"{kind} error")
        if rank == 0:
            print(f"{name}: {', '.join(found)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(run, (tempfile.mkdtemp(),), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
