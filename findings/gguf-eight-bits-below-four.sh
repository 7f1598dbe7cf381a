#!/usr/bin/env bash
# gguf 0.19.0 (llama.cpp's Python package) with NumPy 2.4.6, Python 3.11: blocks of 32 small values, quantized and back.
#
# Behaviour: 8 bits hold small values worse than 4. A block's scale is a float16, and Q8_0 divides the largest value by
# 127 for it, Q4_0 by 8. So Q8_0's scale gets too small first: a block whose values are below 3e-6 comes back as zeros,
# and at 1e-5 a quarter is lost, while Q4_0 is as exact as ever. Momenta, second moments and late gradients are that
# small. MXFP4, whose scale is a power of two, keeps all sizes. But of a block with one NaN it makes 32 zeros, without a
# warning, where the others make NaN. Q4_1, which stores the smallest value as float16, has NaN from 5e5 on.
#
# Seen (relative error of 32 values, uniform up to the size that is named; then NaN and zeros of 32, if one is NaN):
#   Q8_0: 1 0.004, 1e-05 0.239, 3e-06 1.000, 1e-06 1.000, 500000 0.004, one NaN: 32 NaN and 0 zeros
#   Q5_0: 1 0.037, 1e-05 0.063, 3e-06 0.063, 1e-06 0.063, 500000 0.037, one NaN: 32 NaN and 0 zeros
#   Q4_0: 1 0.067, 1e-05 0.067, 3e-06 0.078, 1e-06 0.078, 500000 0.067, one NaN: 32 NaN and 0 zeros
#   Q4_1: 1 0.055, 1e-05 0.060, 3e-06 0.113, 1e-06 0.233, 500000 nan, one NaN: 32 NaN and 0 zeros
#   MXFP4: 1 0.177, 1e-05 0.143, 3e-06 0.077, 1e-06 0.070, 500000 0.154, one NaN: 0 NaN and 32 zeros
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check gguf==0.19.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from gguf import GGMLQuantizationType, quants


def back(values, kind):
    with np.errstate(all="ignore"):
        return quants.dequantize(quants.quantize(values, kind), kind)


block = np.random.default_rng(0).uniform(-1, 1, (1, 32)).astype(np.float32)
spoilt = block.copy()
spoilt[0, 3] = np.nan
for name in ("Q8_0", "Q5_0", "Q4_0", "Q4_1", "MXFP4"):
    kind = GGMLQuantizationType[name]
    told = []
    for size in (1, 1e-5, 3e-6, 1e-6, 5e5):
        values = block * np.float32(size)
        told.append(f"{size:g} {np.linalg.norm(back(values, kind) - values) / np.linalg.norm(values):.3f}")
    got = back(spoilt, kind)
    print(f"{name}: {', '.join(told)}, one NaN: {np.isnan(got).sum()} NaN and {(got == 0).sum()} zeros")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
