#!/usr/bin/env bash
# hqq 0.2.8.post1 with torch 2.13.0, CPU, Python 3.11: weights of several sizes in 8, 4 and 2 bits (groups of 64), and back.
#
# Behaviour: small weights are lost, and nothing says so. A group's scale is at least 1/20,000, whatever its values are:
# the scale's inverse is cut off there, to suit float16, although it is float32 here. So 8 bits are three times as coarse
# as they should be where a layer's weights have a deviation of 1e-3, and no better than 4 bits at 1e-4. At 1e-5 and below
# nothing is left, by any number of bits. Differences between two checkpoints, adapters that have just begun and layers
# under strong weight decay are that small. Multiplied by 1,000 before, and divided after, they are held well.
#
# Seen (length of the error, relative to the weights; 128 rows of 128):
#   deviation 0.1: 8 bits 0.005, 4 bits 0.09, 2 bits 0.43
#   deviation 0.001: 8 bits 0.014, 4 bits 0.09, 2 bits 0.43
#   deviation 0.0001: 8 bits 0.137, 4 bits 0.14, 2 bits 0.43
#   deviation 1e-05: 8 bits 0.992, 4 bits 0.99, 2 bits 0.99
#   deviation 1e-05, times 1,000: 8 bits 0.005, 4 bits 0.09, 2 bits 0.43
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check hqq==0.2.8.post1 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from hqq.core.quantize import Quantizer

torch.set_num_threads(1)
unit = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
for deviation, factor in ((0.1, 1), (1e-3, 1), (1e-4, 1), (1e-5, 1), (1e-5, 1000)):
    weight = unit * deviation
    found = []
    for bits, digits in ((8, 3), (4, 2), (2, 2)):
        options = {"nbits": bits, "group_size": 64, "axis": 1, "device": "cpu", "compute_dtype": torch.float32}
        codes, scales = Quantizer.quantize(weight * factor, **options)
        back = Quantizer.dequantize(codes, scales).float() / factor
        found.append(f"{bits} bits {float((back - weight).norm() / weight.norm()):.{digits}f}")
    print(f"deviation {deviation:g}{', times 1,000' if factor > 1 else ''}: {', '.join(found)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
