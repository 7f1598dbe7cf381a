#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo; the same with 2.15.0: PeriodicModelAverager and PostLocalSGDOptimizer, torch's
# local SGD.
#
# Behaviour: they average the parameters that have a gradient at that moment on their own rank, joined to one array. Ranks
# do not compare which. So where two ranks train different layers of one size (experts, tasks, several heads), the mean of
# one layer of rank 0 and of another layer of rank 1 becomes both. A layer that no rank uses in the averaging step stays
# different on the ranks, though earlier steps trained it. No error, no warning. A backward pass through all layers, as
# loss + 0 * sum of all parameters, keeps the layers apart. And after load_state_dict a scheduler of PostLocalSGDOptimizer
# reports its rates, but training goes on at the rate that was loaded: the scheduler changes the groups of before.
#
# Seen (entries of two layers on both ranks; then the rates that steps took):
#   each rank trains a layer of its own, [10, 20] and [10, 20] before: [15, 20] and [10, 15]
#   only the first layer is in the averaging step, [1, 1] and [2, 2] before: [1.5, 1] and [1.5, 2]
#   all layers by a term of zero, [1, 1] and [2, 2] before: [1.5, 1.5] and [1.5, 1.5]
#   ExponentialLR of 1/2: trained at [1.0, 0.5, 0.25], reports 0.125
#   after load_state_dict: trained at [0.125, 0.125, 0.125], reports 0.015625
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

ROW = torch.ones(1, 2)


def optimizer_of(layers, rate, period=1):
    return PostLocalSGDOptimizer(torch.optim.SGD(layers.parameters(), lr=rate), PeriodicModelAverager(period))


def averaged(layers, values, loss):
    for layer, value in zip(layers, values, strict=True):
        torch.nn.init.constant_(layer.weight, value)
    optimizer = optimizer_of(layers, rate=0.0)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    return "[{:g}, {:g}]".format(*(float(layer.weight[0, 0]) for layer in layers))


def rates(layers, optimizer, scheduler):
    taken = []
    for _ in range(3):
        before = float(layers[0].weight[0, 0])
        optimizer.zero_grad()
        layers[0](ROW).sum().backward()
        optimizer.step()
        scheduler.step()
        taken.append(before - float(layers[0].weight[0, 0]))
    return f"trained at {taken}, reports {scheduler.get_last_lr()[0]}"


def run(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a period of 1 is not sensible, but short
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    own = rank + 1.0

    def tell(what, found):
        both = [None, None]
        dist.all_gather_object(both, found)
        if rank == 0:
            print(f"{what}: {both[0]} and {both[1]}" if "[" == found[0] else f"{what}: {found}", flush=True)

    found = averaged(layers, (10, 20), lambda: layers[rank](ROW).sum())
    tell("each rank trains a layer of its own, [10, 20] and [10, 20] before", found)
    found = averaged(layers, (own, own), lambda: layers[0](ROW).sum())
    tell("only the first layer is in the averaging step, [1, 1] and [2, 2] before", found)
    everything = lambda: layers[0](ROW).sum() + 0 * sum(one.sum() for one in layers.parameters())
    tell("all layers by a term of zero, [1, 1] and [2, 2] before", averaged(layers, (own, own), everything))

    optimizer = optimizer_of(layers, rate=1.0, period=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    tell("ExponentialLR of 1/2", rates(layers, optimizer, scheduler))
    optimizer.load_state_dict(optimizer.state_dict())
    tell("after load_state_dict", rates(layers, optimizer, scheduler))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
