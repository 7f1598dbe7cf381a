#!/usr/bin/env bash
# torchao 0.18.0 with torch 2.13.0, CPU, Python 3.11, two ranks with DistributedDataParallel over Gloo.
#
# Behaviour: torchao's optimizers for bfloat16 parameters can round at random (bf16_stochastic_round=True). They draw from
# torch's generator of the process. Where ranks have seeds of their own, as dropout wants it, replicas that get the same
# averaged gradients differ after the first step, in more than a tenth of their entries, and nothing says so. With one
# seed on all ranks, or without that option, they stay alike.
#
# Seen:
#   to the nearest, a seed for each rank: replicas are alike
#   at random, one seed: replicas are alike
#   at random, a seed for each rank: more than a tenth of the entries differ after 1 step
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchao==0.18.0
cat >"$folder/program.py" <<'PYTHON'
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torchao.optim import AdamW8bit

CASES = {
    "to the nearest, a seed for each rank": (False, True),
    "at random, one seed": (True, False),
    "at random, a seed for each rank": (True, True),
}


def differing(rank, at_random, own_seed):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 64, bias=False).bfloat16())
    optimizer = AdamW8bit(model.parameters(), lr=1e-3, bf16_stochastic_round=at_random)
    rows = torch.randn(8, 128, generator=torch.Generator().manual_seed(rank)).bfloat16()
    torch.manual_seed(1 + rank * own_seed)
    model(rows).square().sum().backward()
    optimizer.step()
    weights = model.module.weight.detach().float()
    least, most = weights.clone(), weights.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return (least != most).float().mean().item()


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, case in CASES.items():
        share = differing(rank, *case)
        if rank == 0:
            many = "more than a tenth of the entries differ after 1 step" if share > 0.1 else f"{share:.0%} differ"
            print(f"{name}: {'replicas are alike' if share == 0 else many}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(run, (tempfile.mkdtemp(),), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
