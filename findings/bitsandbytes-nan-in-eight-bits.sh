#!/usr/bin/env bash
# bitsandbytes 0.50.2 with torch 2.13.0, CPU, Python 3.11: quantize_blockwise (8 bits, blocks of 256) and back.
#
# Behaviour: a NaN does not survive. It comes back as minus the largest value of its block, and a check of the result for
# NaN finds nothing. One infinite entry, of either sign, makes the other 255 entries of its block plus infinity, negative
# ones and zeros included, and comes back as minus infinity itself. 4 bits (nf4, fp4) treat both otherwise: the block is
# NaN. So an overflow that a training loop looks for is hidden where its gradients or moments went through 8 bits.
#
# Seen (256 entries from -2 to 2, the fourth replaced; that one, two others, and what the block has in all):
#   8 bits, nan: -1.99, -1.99, 2.00; 0 NaN, 0 infinite
#   8 bits, inf: -inf, inf, inf; 0 NaN, 256 infinite
#   8 bits, -inf: -inf, inf, inf; 0 NaN, 256 infinite
#   nf4, nan: nan, nan, nan; 256 NaN, 0 infinite
#   nf4, inf: inf, nan, nan; 255 NaN, 1 infinite
#   nf4, -inf: inf, nan, nan; 255 NaN, 1 infinite
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6 bitsandbytes==0.50.2
cat >"$folder/program.py" <<'PYTHON'
import math

import bitsandbytes.functional as functional
import torch


def in_eight_bits(values):
    codes, state = functional.quantize_blockwise(values, blocksize=256)
    return functional.dequantize_blockwise(codes, state, blocksize=256)


def in_four_bits(values):
    codes, state = functional.quantize_4bit(values, quant_type="nf4", blocksize=256)
    return functional.dequantize_4bit(codes, state).flatten()


for name, back in (("8 bits", in_eight_bits), ("nf4", in_four_bits)):
    for special in (math.nan, math.inf, -math.inf):
        values = torch.linspace(-2, 2, 256)
        values[3] = special
        got = back(values)
        some = ", ".join(f"{got[place].item():.2f}" for place in (3, 0, 255))
        print(f"{name}, {special}: {some}; {got.isnan().sum()} NaN, {got.isinf().sum()} infinite")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
