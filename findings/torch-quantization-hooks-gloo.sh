#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo: PyTorch's two 8-bit hooks for DDP, quantization_pertensor_hook and
# quantization_perchannel_hook.
#
# Behaviour: both fail in every backward pass with an IndexError inside the hook. They take the first element of what an
# all_gather's future holds to be the list of all ranks' tensors. Gloo's future holds that list itself, so the first
# element is rank 0's tensor. fp16_compress_hook, which waits for an all_reduce, works there.
#
# Seen:
#   fp16_compress_hook: mean
#   quantization_pertensor_hook: IndexError: invalid index of a 0-dim tensor
#   quantization_perchannel_hook: IndexError: too many indices for tensor of dimension 2
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import re
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

HOOKS = {
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "quantization_pertensor_hook": quantization_hooks.quantization_pertensor_hook,
    "quantization_perchannel_hook": quantization_hooks.quantization_perchannel_hook,
}


def run(rank, folder, name):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(1024, 1, bias=False))
    model.register_comm_hook(dist.group.WORLD, HOOKS[name])
    try:
        model(torch.full((1, 1024), 1.0 if rank == 0 else 3.0)).sum().backward()
        found = "mean" if torch.allclose(model.module.weight.grad, torch.tensor(2.0), atol=0.05) else "another value"
    except RuntimeError as error:
        found = re.search(r"IndexError: [^.\n]*", str(error)).group()
    if rank == 0:
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    for name in HOOKS:
        multiprocessing.spawn(run, (sys.argv[1], name), 2)
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null)
echo "$seen"
[ "$seen" = "fp16_compress_hook: mean
quantization_pertensor_hook: IndexError: invalid index of a 0-dim tensor
quantization_perchannel_hook: IndexError: too many indices for tensor of dimension 2" ]
