#!/usr/bin/env bash
# prodigyopt 1.1.2 and pytorch_optimizer 4.1.0 with torch 2.13.0, CPU, Python 3.11, two ranks over Gloo: optimizers that find
# their learning rate by themselves, in torch's ZeroRedundancyOptimizer.
#
# Behaviour: such an optimizer measures one distance d over all parameters, and each step is d times as long. Under
# ZeroRedundancyOptimizer each rank sees its share of the parameters only and finds a d of its own. So layers train with
# different rates, for DAdaptAdan hundreds of times different, depending on which rank has a layer, and another number of
# ranks gives another training. The weights are the same on all ranks, as their owners send them, so nothing shows it.
# Prodigy's own option for sharded parameters, fsdp_in_use, needs a GPU.
#
# Seen (d after 20 steps; of both ranks with ZeroRedundancyOptimizer):
#   AdamW: same weights
#   Prodigy: d 0.018, with ZeroRedundancyOptimizer 0.024 and 0.014, other weights
#   DAdaptAdan: rates differ more than 100 times, other weights
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 prodigyopt==1.1.2 pytorch_optimizer==4.1.0
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from prodigyopt import Prodigy
from pytorch_optimizer import DAdaptAdan
from torch.distributed.optim import ZeroRedundancyOptimizer

KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Prodigy": (Prodigy, {"lr": 1.0}),
    "DAdaptAdan": (DAdaptAdan, {"lr": 1.0}),
}


def train(kind, options, shared):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(4)])
    model = torch.nn.parallel.DistributedDataParallel(model)
    if shared:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **options)
    else:
        optimizer = kind(model.parameters(), **options)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(20):
        batch = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    inner = optimizer.optim if shared else optimizer
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return weights, float(inner.param_groups[0].get("d", 0))


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, (kind, options) in KINDS.items():
        whole, d = train(kind, options, shared=False)
        weights, own = train(kind, options, shared=True)
        everyone = [None, None]
        dist.all_gather_object(everyone, (own, weights))
        assert torch.equal(everyone[0][1], everyone[1][1])  # on both ranks
        same = "same weights" if torch.allclose(whole, weights, rtol=1e-3, atol=1e-5) else "other weights"
        first, second = everyone[0][0], everyone[1][0]
        if name == "DAdaptAdan":
            assert first > 100 * second
            same = f"rates differ more than 100 times, {same}"
        elif d:
            same = f"d {d:.3f}, with ZeroRedundancyOptimizer {first:.3f} and {second:.3f}, {same}"
        if rank == 0:
            print(f"{name}: {same}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
