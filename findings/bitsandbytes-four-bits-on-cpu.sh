#!/usr/bin/env bash
# bitsandbytes 0.50.2 with torch 2.13.0, CPU, Python 3.11: a matrix in 4 bits, by quantize_4bit, and back by dequantize_4bit.
#
# Behaviour: rows whose length is no multiple of the block length come back with scales of other blocks. A block is 64
# consecutive entries of the flattened matrix, as in CUDA; the CPU's decoder counts blocks from each row's beginning. The
# stored scales and codes are right: decoded by hand, no entry is further off than 0.16 of its block's largest value.
# Nothing is raised, and Linear4bit, which decodes its weight so, computes with wrong weights. Rows of an odd length take
# another path and are right, as are those of 64, 128, ... And one dimension becomes two: 64 entries come back as (1, 64).
#
# Seen (64 rows of normal numbers, row r times 10^(r/16 - 3); entries other than those decoded by hand):
#   nf4, 64 x 64: no entry wrong
#   nf4, 64 x 96: more than half of the entries wrong
#   nf4, 64 x 97: no entry wrong
#   nf4, 64 x 160: more than half of the entries wrong
#   fp4, 64 x 64: no entry wrong
#   fp4, 64 x 96: more than half of the entries wrong
#   fp4, 64 x 97: no entry wrong
#   fp4, 64 x 160: more than half of the entries wrong
#   one dimension, 64 entries: (1, 64)
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6 bitsandbytes==0.50.2
cat >"$folder/program.py" <<'PYTHON'
import bitsandbytes.functional as functional
import torch

torch.manual_seed(0)
for kind in ("nf4", "fp4"):
    for columns in (64, 96, 97, 160):
        matrix = torch.randn(64, columns) * torch.logspace(-3, 1, 64)[:, None]
        codes, state = functional.quantize_4bit(matrix, quant_type=kind, blocksize=64)
        halves = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten()[: matrix.numel()]
        scales = state.absmax.repeat_interleave(64)[: matrix.numel()]
        by_hand = (state.code[halves.long()] * scales).view_as(matrix)
        largest = ((by_hand - matrix).abs().flatten() / scales).max().item()
        wrong = (functional.dequantize_4bit(codes, state) - by_hand).abs() > 1e-5 * by_hand.abs()
        assert largest < (0.16 if kind == "nf4" else 0.2), largest
        share = wrong.float().mean().item()
        told = "no entry" if share == 0 else "more than half of the entries" if share > 0.5 else f"{share:.2f} of the entries"
        print(f"{kind}, 64 x {columns}: {told} wrong")
codes, state = functional.quantize_4bit(torch.ones(64), quant_type="nf4", blocksize=64)
print(f"one dimension, 64 entries: {tuple(functional.dequantize_4bit(codes, state).shape)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
