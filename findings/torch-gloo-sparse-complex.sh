#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo: all_reduce of sparse (COO) tensors.
#
# Behaviour: a sparse tensor of complex numbers comes back as it was given, on every rank, without an error: nothing has
# been summed. Real numbers are summed, and so are complex ones of a dense tensor. The sum is made, and lost: a call
# with async_op=True has it in its result(), as pairs of real numbers.
#
# Seen:
#   float32: rank 0 [1, 4, 0, 2] rank 1 [1, 4, 0, 2]
#   complex64: rank 0 [1, 2, 0, 0] rank 1 [0, 2, 0, 2]
#   complex128: rank 0 [1, 2, 0, 0] rank 1 [0, 2, 0, 2]
#   complex64, dense: rank 0 [1, 4, 0, 2] rank 1 [1, 4, 0, 2]
#   complex64, result(): rank 0 [1, 4, 0, 2] rank 1 [1, 4, 0, 2]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def given(rank, dtype):
    indices, values = ([[0, 1]], [1, 2]) if rank == 0 else ([[1, 3]], [2, 2])
    return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (4,), check_invariants=True)


def show(name, values):
    every = [None, None]
    dist.all_gather_object(every, [round(one) for one in values])
    if dist.get_rank() == 0:
        print(f"{name}: rank 0 {every[0]} rank 1 {every[1]}", flush=True)


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name in ("float32", "complex64", "complex128"):
        vector = given(rank, getattr(torch, name))
        dist.all_reduce(vector)
        show(name, vector.to_dense().real.tolist())
    vector = given(rank, torch.complex64).to_dense()
    dist.all_reduce(vector)
    show("complex64, dense", vector.real.tolist())
    work = dist.all_reduce(given(rank, torch.complex64), async_op=True)
    work.wait()
    show("complex64, result()", work.result()[0].to_dense()[:, 0].tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(run, (tempfile.mkdtemp(),), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
