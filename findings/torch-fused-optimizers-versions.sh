#!/usr/bin/env bash
# PyTorch's fused optimizers change a parameter in place and leave its version number (`Tensor._version`) as it was. The
# same optimizers with foreach=True, or with neither, raise it.
# torch 2.13.0 on Linux, Python 3.11; the same with 2.6.0 and 2.15.0.
#
# Expected: every in-place update raises the number; libraries, and autograd itself, tell by it whether a tensor that
# they remember has changed.
# Seen, for SGD, Adam, AdamW and Adagrad with p.grad = 1, one step each:
#   foreach  version 0 -> 1 (AdamW: 2), values changed
#   plain    version 0 -> 1 (AdamW: 2), values changed
#   fused    version 0 -> 0,            values changed
# Who must notice that a parameter was updated compares values, or uses optimizer hooks.
# Exits with 0 while this is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

print("torch", torch.__version__)
as_described = True
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    for how in ("foreach", "plain", "fused"):
        p = torch.nn.Parameter(torch.ones(8))
        optimizer = kind([p], lr=0.1, **({} if how == "plain" else {how: True}))
        p.grad = torch.ones(8)
        version, values = p._version, p.detach().clone()
        optimizer.step()
        changed, raised = not torch.equal(p, values), p._version > version
        print(f"{kind.__name__:8} {how:8} version {version} -> {p._version}, values changed: {changed}")
        as_described &= changed and raised == (how != "fused")
sys.exit(0 if as_described else 1)
PYTHON
