#!/usr/bin/env bash
# Accelerate 1.15.0, torch 2.13.0, a machine without a GPU, torchrun with 2 ranks.
#
# Behaviour: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]) makes the process group and counts 2
# processes, but prepare() gives the bare model back. It is not wrapped in DistributedDataParallel, nothing warns, and the
# ranks end with different weights. With cpu=True they train together; but then any backend other than gloo or mpi is
# refused as "not available", although torch knows it and Accelerate accepts a group of it that exists already.
#
# Seen:
#   gloo: DistributedType.NO, 2 processes, Linear, same weights: False
#   gloo, cpu=True: DistributedType.MULTI_CPU, 2 processes, DistributedDataParallel, same weights: True
#   other, cpu=True: ValueError: Your assigned backend other is not available, please use gloo
#   other, cpu=True, group made before: DistributedType.MULTI_CPU, 2 processes, DistributedDataParallel, same weights: True
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 accelerate==1.15.0 numpy
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

case = sys.argv[1]
backend = case.split(",")[0]


def gloo_group(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("other", gloo_group, devices=["cpu"])
handlers = [InitProcessGroupKwargs(backend=backend)]
if case.endswith("before"):
    dist.init_process_group(backend)
    handlers = []
try:
    accelerator = Accelerator(cpu="cpu=True" in case, kwargs_handlers=handlers)
except ValueError as error:
    if os.environ["RANK"] == "0":
        print(f"{case}: ValueError: {error}", flush=True)
    sys.exit()
torch.manual_seed(0)
network = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
model(torch.full((8, 4), 1.0 + dist.get_rank())).sum().backward()
optimizer.step()
weights = [torch.empty(1, 4) for _ in range(2)]
dist.all_gather(weights, network.weight.detach())
if dist.get_rank() == 0:
    kind, size = accelerator.distributed_type, accelerator.num_processes
    same = torch.equal(*weights)
    print(f"{case}: {kind}, {size} processes, {type(model).__name__}, same weights: {same}", flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # how a group of another backend is torn down is not the subject
PYTHON
export OMP_NUM_THREADS=1
for case in "gloo" "gloo, cpu=True" "other, cpu=True" "other, cpu=True, group made before"; do
  "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/program.py" "$case" 2>"$folder/errors" ||
    tail -5 "$folder/errors" >&2
done | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
