#!/usr/bin/env bash
# torch 2.15.0, CPU, Python 3.11, two ranks over Gloo: PyTorch's PowerSGD hook for DDP with a complex model.
#
# Behaviour: each rank ends with other gradients, and all of them are wrong by a fifth, without an error or a warning. A
# bucket's buffer holds complex numbers as pairs of floats. GradBucket.gradients() gives one float tensor of the
# parameter's shape for it, which covers the first half of the buffer. Hooks that go by gradients(), as PowerSGD does,
# leave the other half of each gradient as their own rank computed it. fp16_compress_hook takes buffer() and is right.
#
# Seen:
#   float32, no hook: the mean, alike on both ranks
#   float32, fp16_compress_hook: the mean, alike on both ranks
#   float32, powerSGD_hook: the mean, alike on both ranks
#   complex64, no hook: the mean, alike on both ranks
#   complex64, fp16_compress_hook: the mean, alike on both ranks
#   complex64, powerSGD_hook: more than 5 % off, other values on each rank
#   complex64, a parameter of 1920 entries: 3840 floats in buffer(), 1920 of them in gradients()
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.15.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HOOKS = ("no hook", "fp16_compress_hook", "powerSGD_hook")


def gradient_error(dtype, hook, rank):
    """How far the averaged gradient is from the mean, and whether both ranks have the same."""
    torch.manual_seed(5)
    of_one = torch.outer(torch.randn(40, dtype=dtype), torch.randn(48, dtype=dtype))  # rank 1
    layer = torch.nn.Linear(48, 40, bias=False, dtype=dtype)
    model = DistributedDataParallel(layer)
    if hook == "fp16_compress_hook":
        model.register_comm_hook(None, fp16_compress_hook)
    if hook == "powerSGD_hook":
        state = PowerSGDState(None, 4, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook)
    for _ in range(4):  # the hook averages whole gradients in the first two steps
        model.zero_grad()
        loss = (model(torch.eye(48, dtype=dtype)).T * (1 + rank) * of_one.conj()).sum()
        loss.real.backward()
    found = layer.weight.grad
    peers = torch.view_as_real(found).clone() if found.is_complex() else found.clone()
    dist.broadcast(peers, 0)
    peers = torch.view_as_complex(peers) if found.is_complex() else peers
    alike = torch.tensor([int(torch.equal(peers, found))])
    dist.all_reduce(alike, dist.ReduceOp.MIN)
    error = float((found - 1.5 * of_one).norm() / (1.5 * of_one).norm())
    return error, bool(alike)


def of_bucket():
    """Floats in a bucket's buffer, and in the gradients that it lists."""
    counted = []

    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        counted.append((bucket.buffer().numel(), sum(gradient.numel() for gradient in bucket.gradients())))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(torch.nn.Linear(48, 40, bias=False, dtype=torch.complex64))
    model.register_comm_hook(None, hook)
    model(torch.eye(48, dtype=torch.complex64)).abs().sum().backward()
    return counted[0]


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for dtype in (torch.float32, torch.complex64):
        for hook in HOOKS:
            error, alike = gradient_error(dtype, hook, rank)
            if rank == 1:
                size = "the mean" if error < 0.01 else "more than 5 % off" if error > 0.05 else f"{error:.1%} off"
                same = "alike on both ranks" if alike else "other values on each rank"
                print(f"{str(dtype).removeprefix('torch.')}, {hook}: {size}, {same}", flush=True)
    floats, listed = of_bucket()
    if rank == 1:
        print(f"complex64, a parameter of 1920 entries: {floats} floats in buffer(), {listed} of them in gradients()")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), 2)
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null)
echo "$seen"
[ "$seen" = "float32, no hook: the mean, alike on both ranks
float32, fp16_compress_hook: the mean, alike on both ranks
float32, powerSGD_hook: the mean, alike on both ranks
complex64, no hook: the mean, alike on both ranks
complex64, fp16_compress_hook: the mean, alike on both ranks
complex64, powerSGD_hook: more than 5 % off, other values on each rank
complex64, a parameter of 1920 entries: 3840 floats in buffer(), 1920 of them in gradients()" ]
