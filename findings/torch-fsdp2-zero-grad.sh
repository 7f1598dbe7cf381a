#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo; the same with 2.15.0: gradients that are accumulated without a sum
# over ranks, in DistributedDataParallel (no_sync) and in FSDP2 (fully_shard, set_requires_gradient_sync(False)).
#
# Behaviour: FSDP2 keeps such gradients where no zero_grad() reaches them, neither the model's nor the optimizer's, and
# setting .grad to None does not either. The next pass that sums adds them. .grad is None all the time, so nothing shows
# them. Who drops a batch in the middle of an accumulation, because its loss is NaN, trains on it all the same, and all
# weights are NaN after the step. DDP forgets them.
#
# Seen (the second batch alone gives 4, both give 404):
#   DDP: .grad is a tensor; 404 without zero_grad, 4 after model.zero_grad, 4 after optimizer.zero_grad, 4 after grad = None
#   DDP: a batch with NaN dropped by optimizer.zero_grad: 4
#   FSDP2: .grad is None; 404 without zero_grad, 404 after model.zero_grad, 404 after optimizer.zero_grad, 404 after grad = None
#   FSDP2: a batch with NaN dropped by optimizer.zero_grad: nan
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def set_to_none(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


DROPS = {
    "without zero_grad": lambda model, optimizer: None,
    "after model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "after optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "after grad = None": set_to_none,
}


def gradient(kind, first, drop):
    """Of two batches, of which the first is not summed over ranks, and dropped."""
    model = torch.nn.Linear(4, 2, bias=False)
    if kind == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync() if kind == "DDP" else contextlib.nullcontext():
        if kind == "FSDP2":
            model.set_requires_gradient_sync(False)
        model(torch.full((4, 4), first)).sum().backward()
    [parameter] = model.parameters()
    seen = "None" if parameter.grad is None else "a tensor"
    drop(model, optimizer)
    if kind == "FSDP2":
        model.set_requires_gradient_sync(True)
    model(torch.ones(4, 4)).sum().backward()
    found = parameter.grad
    return seen, (found.full_tensor() if isinstance(found, DTensor) else found)[0, 0].item()


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in ("DDP", "FSDP2"):
        found = {name: gradient(kind, 100.0, drop) for name, drop in DROPS.items()}
        _, of_nan = gradient(kind, float("nan"), DROPS["after optimizer.zero_grad"])
        if rank == 0:
            [seen] = {seen for seen, _ in found.values()}
            print(f"{kind}: .grad is {seen}; {', '.join(f'{value:g} {name}' for name, (_, value) in found.items())}")
            print(f"{kind}: a batch with NaN dropped by optimizer.zero_grad: {of_nan:g}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
