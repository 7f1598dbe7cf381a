#!/usr/bin/env bash
# Triton 3.9.0's interpreter refuses a mask that is a vector comparison and a scalar one; 3.7.1's takes it.
# Seen on 2026-11-28 with torch 2.13.0 (CPU) and Python 3.11. `(lane < n) & (tl.load(flag) > 0)` as the mask of tl.load and tl.store:
#   3.7.1: [0, 1, 2, 3, 4, 7, 7, 7], as the compiler's code gives
#   3.9.0: InterpreterError: ValueError('mask has unsupported dtype')
# The scalar is widened to int32 as it is broadcast, so the mask's numpy dtype is int32 and not bool.
# Exits 0 if both behave so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat >"$folder/program.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def copy(x, out, flag, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = (lane < n) & (tl.load(flag) > 0)
    tl.store(out + lane, tl.load(x + lane, mask=mask, other=7), mask=mask)


out = torch.full((8,), 7, dtype=torch.int32)
try:
    copy[(1,)](torch.arange(8, dtype=torch.int32), out, torch.ones(1, dtype=torch.int32), 5, BLOCK=8)
    print(triton.__version__, out.tolist())
except Exception as error:
    print(triton.__version__, type(error).__name__, error)
PYTHON
pip() { "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy==2.4.6
seen=
for version in 3.7.1 3.9.0; do
  pip --no-deps "triton==$version"
  said=$(TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null)
  printf '%s\n' "$said"
  seen+="$said"$'\n'
done
grep -qF '3.7.1 [0, 1, 2, 3, 4, 7, 7, 7]' <<<"$seen" && grep -q '3.9.0 InterpreterError.*mask has unsupported dtype' <<<"$seen"
