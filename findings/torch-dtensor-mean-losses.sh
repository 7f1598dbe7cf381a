#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, three ranks over Gloo; the same with 2.15.0: losses of a DTensor batch that is sharded by
# rows, with replicated weights, beside the same losses of plain tensors.
#
# Behaviour: some losses with reduction="mean" give gradients that are too large by the number of ranks, though the loss is
# right, and nothing is raised or warned of. Their backward pass divides by the rows of a shard. Others are right, and so
# is the mean written out. Where rows do not divide evenly (7: 3, 3 and 1), the loss is the mean of the shards' means too,
# so a row of the small shard counts three times as much. Adam hides the factor, SGD and clip_grad_norm_ do not.
#
# Seen:
#   mse_loss: of 6 rows loss 1.000, gradient 3.000 times the plain one; of 7 rows loss wrong, gradient wrong
#   smooth_l1_loss: of 6 rows loss 1.000, gradient 3.000 times the plain one; of 7 rows loss wrong, gradient wrong
#   huber_loss: of 6 rows loss 1.000, gradient 3.000 times the plain one; of 7 rows loss wrong, gradient wrong
#   binary_cross_entropy: of 6 rows loss 1.000, gradient 3.000 times the plain one; of 7 rows loss wrong, gradient wrong
#   soft_margin_loss: of 6 rows loss 1.000, gradient 3.000 times the plain one; of 7 rows loss wrong, gradient wrong
#   binary_cross_entropy_with_logits: of 6 rows loss 1.000, gradient 1.000 times the plain one; of 7 rows loss wrong, gradient right
#   l1_loss: of 6 rows loss 1.000, gradient 1.000 times the plain one; of 7 rows loss right, gradient right
#   cross_entropy: of 6 rows loss 1.000, gradient 1.000 times the plain one; of 7 rows loss right, gradient right
#   square().mean(): of 6 rows loss 1.000, gradient 1.000 times the plain one; of 7 rows loss right, gradient right
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

LOSSES = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "l1_loss": F.l1_loss,
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "square().mean()": lambda x, y: (x - y).square().mean(),
}


def trained(loss, rows, targets, weights):
    """The loss and the gradient of the weights, whole on every rank."""
    weights.requires_grad_()
    value = loss(rows @ weights, targets)
    value.backward()
    found = [value.detach(), weights.grad]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


def run(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    mesh = init_device_mesh("cpu", (3,))
    for name, loss in LOSSES.items():
        told = []
        for count in (6, 7):
            draw = torch.Generator().manual_seed(0)
            rows, targets, weights = (torch.randn(*shape, generator=draw) for shape in ((count, 5), (count, 4), (5, 4)))
            sharded = [distribute_tensor(one, mesh, [Shard(0)]) for one in (rows, targets)]
            of_plain = trained(loss, rows, targets, weights.clone())
            of_shards = trained(loss, *sharded, distribute_tensor(weights, mesh, [Replicate()]))
            if count == 6:
                ratios = [(one.norm() / plain.norm()).item() for one, plain in zip(of_shards, of_plain)]
                told.append("of 6 rows loss {:.3f}, gradient {:.3f} times the plain one".format(*ratios))
            else:
                right = [
                    "right" if torch.allclose(one, plain, rtol=1e-4, atol=1e-6) else "wrong"
                    for one, plain in zip(of_shards, of_plain)
                ]
                told.append("of 7 rows loss {}, gradient {}".format(*right))
        if rank == 0:
            print(f"{name}: {'; '.join(told)}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=3)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$(mktemp -d -p "$folder")" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
