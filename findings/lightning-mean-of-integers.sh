#!/usr/bin/env bash
# lightning 2.6.6 with torch 2.13.0, CPU, Python 3.11, two ranks over Gloo: Fabric.all_reduce, whose default is the mean.
#
# Behaviour: the mean of integers is cut off to an integer, and the mean of bools is a logical or. No error, no warning.
# Python's own numbers are taken, too: the mean of the ints 1 and 2 is 1, of 1.0 and 2.0 it is 1.5. So the mean of counts,
# as correct predictions or tokens, is too small, and a decision by the mean of flags is that of any rank. The tensor that
# was given holds the result afterwards. self.log of a LightningModule is not concerned: it makes floats of integers first.
#
# Seen (rank 0's and rank 1's, the result on both ranks, its type, and what rank 0's tensor holds afterwards):
#   1 and 2: 1, int32
#   1.0 and 2.0: 1.5, float32
#   tensor(1) and tensor(2): 1, int64, 1 afterwards
#   tensor(-1) and tensor(-2): -1, int64, -1 afterwards
#   tensor(True) and tensor(False): True, bool, True afterwards
#   tensor(1.0) and tensor(2.0): 1.5, float32, 1.5 afterwards
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check lightning==2.6.6 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
tensors = [(torch.tensor(a), torch.tensor(b)) for a, b in ((1, 2), (-1, -2), (True, False), (1.0, 2.0))]
for values in ((1, 2), (1.0, 2.0), *tensors):
    text = " and ".join(str(value) for value in values)
    mine = values[fabric.global_rank]
    result = fabric.all_reduce(mine)
    everyone = fabric.all_gather(result)
    assert bool((everyone == everyone[0]).all())
    after = f", {mine.item()} afterwards" if isinstance(mine, torch.Tensor) else ""
    if fabric.global_rank == 0:
        print(f"SEEN {text.replace('tensor(1.)', 'tensor(1.0)').replace('tensor(2.)', 'tensor(2.0)')}: {result.item()}, {str(result.dtype)[6:]}{after}", flush=True)
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/program.py" 2>/dev/null | sed -n 's/^SEEN //p' | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
