#!/usr/bin/env bash
# numcodecs 0.16.6 with NumPy 2.4.6, Python 3.11: BitRound, the codec (also of Zarr) that rounds floats to fewer bits.
#
# Behaviour: a NaN whose fraction bits are all set becomes -0.0, and with its sign set 0.0. By NVIDIA's PTX ISA, GPUs write that
# NaN in 16 and 32 bits. The rounding adds half a step to the bits, and the carry runs over exponent and sign. NumPy's own
# NaN stays one, a signalling one becomes infinite, and so do the largest finite numbers. So a gradient, weight or metric
# that a GPU made NaN is a zero in the archive, and a search for NaN there finds nothing. No error, no warning.
#
# Seen (what BitRound(keepbits=...) makes of bit patterns):
#   float16 5 bits: 7fff nan -> -0.0, ffff nan -> 0.0, 7e00 nan -> nan, 7c01 nan -> inf, 7bff 65504 -> inf
#   float32 1 bits: 7fffffff nan -> -0.0, ffffffff nan -> 0.0, 7fc00000 nan -> nan, 7f800001 nan -> inf, 7f7fffff 3.40282e+38 -> inf
#   float32 10 bits: 7fffffff nan -> -0.0, ffffffff nan -> 0.0, 7fc00000 nan -> nan, 7f800001 nan -> inf, 7f7fffff 3.40282e+38 -> inf
#   float32 22 bits: 7fffffff nan -> -0.0, ffffffff nan -> 0.0, 7fc00000 nan -> nan, 7f800001 nan -> inf, 7f7fffff 3.40282e+38 -> inf
#   float64 30 bits: 7fffffffffffffff nan -> -0.0, 7ff8000000000000 nan -> nan, 7ff0000000000001 nan -> inf
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check numcodecs==0.16.6 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numcodecs
import numpy as np

FLOAT32 = ("float32", "7fffffff ffffffff 7fc00000 7f800001 7f7fffff")
CASES = (
    ("float16", "7fff ffff 7e00 7c01 7bff", 5),
    *((*FLOAT32, keepbits) for keepbits in (1, 10, 22)),
    ("float64", "7fffffffffffffff 7ff8000000000000 7ff0000000000001", 30),
)
for dtype, patterns, keepbits in CASES:
    width = np.dtype(dtype).itemsize
    values = np.array([int(pattern, 16) for pattern in patterns.split()], f"u{width}").view(dtype)
    codec = numcodecs.BitRound(keepbits=keepbits)
    back = np.asarray(codec.decode(codec.encode(values))).view(dtype)
    texts = (f"{float(value):.6g}" for value in values)
    pairs = (f"{pattern} {text} -> {float(other)}" for pattern, text, other in zip(patterns.split(), texts, back))
    print(f"{dtype} {keepbits} bits: {', '.join(pairs)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
