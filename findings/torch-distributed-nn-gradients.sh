#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo; the same with 2.15.0: gradients through all_reduce, reduce_scatter and
# reduce of torch.distributed.nn.functional, beside the derivative of the sum of both ranks' losses.
#
# Behaviour: they are right for SUM only, and nothing is raised for the other reductions. all_reduce applies the reduction
# to the gradients as well: for MAX each rank gets the largest gradient, though one rank's value alone was used, and for
# PRODUCT the product of gradients. AVG is right there, but reduce_scatter and reduce with AVG give gradients that are too
# large by the number of ranks. A loss over a batch that was averaged so trains with another learning rate.
#
# Seen (rank 0 has 2, rank 1 has 3, and weighs its result by 2; gradients of ranks 0 and 1):
#   all_reduce: SUM right, AVG right, MAX [2, 2] for [0, 3], MIN [1, 1] for [3, 0], PRODUCT [2, 2] for [9, 6]
#   reduce_scatter: SUM right, AVG [1, 1] for [0.5, 0.5], MAX [1, 1] for [0, 1], MIN [1, 1] for [1, 0], PRODUCT [1, 1] for [3, 2]
#   reduce: SUM right, AVG [1, 1] for [0.5, 0.5], MAX [1, 1] for [0, 1], MIN [1, 1] for [1, 0], PRODUCT [1, 1] for [3, 2]
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
import torch.distributed.nn.functional as functional
import torch.multiprocessing as multiprocessing

TOGETHER = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.mean(0),
    "MAX": lambda x: x.max(0).values,
    "MIN": lambda x: x.min(0).values,
    "PRODUCT": lambda x: x.prod(0),
}
CALLS = {
    "all_reduce": lambda x, op: functional.all_reduce(x, op=op),
    "reduce_scatter": lambda x, op: functional.reduce_scatter(torch.empty(1), list(x.split(1)), op=op),
    "reduce": lambda x, op: functional.reduce(x, 0, op=op),
}


def expected(call, name):
    """In one process. Rank 0's entry 0 is looked at; reduce gives rank 0 alone the result, whose weight is 1."""
    values = torch.tensor([[2.0, 2.0], [3.0, 3.0]], requires_grad=True)
    weight = 3 if call == "all_reduce" else 1
    (weight * TOGETHER[name](values)[0]).backward()
    return [f"{value:g}" for value in values.grad[:, 0]]


def run(rank, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for call, function in CALLS.items():
        told = []
        for name in TOGETHER:
            values = torch.full((2,), 2.0 + rank, requires_grad=True)
            result = function(values, getattr(dist.ReduceOp, name))
            weight = (1.0 + rank) * (call != "reduce" or rank == 0)
            (weight * result).sum().backward()
            both = [None, None]
            dist.all_gather_object(both, f"{values.grad[0]:g}")
            wanted = expected(call, name)
            told.append(f"{name} right" if both == wanted else f"{name} [{', '.join(both)}] for [{', '.join(wanted)}]")
        if rank == 0:
            print(f"{call}: {', '.join(told)}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
