#!/usr/bin/env bash
# ml_dtypes 0.6.0 with NumPy 2.4.6, Python 3.11: NumPy's functions on arrays of bfloat16 and 8-bit floats.
#
# Behaviour: they work, and some results are wrong without a warning. A sum is rounded after each addition, so that it
# stands still once an addend is below half a step: the mean of 1,000 ones is 0.256 in bfloat16. For NumPy's own float16,
# mean() adds in float32. One NaN ends the order: sort() returns a row that is not sorted, median() a number instead of
# NaN, and unique() repeats. NumPy's own floats put NaN last. dot() and linalg.norm() do not round in between. So whoever
# takes the mean of gradients, or the k-th largest of them, calls astype(np.float32) before.
#
# Seen:
#   float16: mean of 1,000 ones 1, norm 31.6, sorted [0, 1, 2, 3, nan], median with a NaN nan, unique [0, 1, nan]
#   bfloat16: mean of 1,000 ones 0.256, norm 31.6, sorted [1, 3, nan, 0, 2], median with a NaN 2.5, unique [1, nan, 0, 1]
#   float8_e4m3fn: mean of 1,000 ones 0.0156, norm 31.6, sorted [1, 3, nan, 0, 2], median with a NaN 2.5, unique [1, nan, 0, 1]
#   float8_e5m2: mean of 1,000 ones 0.00781, norm 31.6, sorted [1, 3, nan, 0, 2], median with a NaN 2.5, unique [1, nan, 0, 1]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import warnings

import ml_dtypes
import numpy as np

warnings.simplefilter("error")  # none is given


def written(values):
    return "[" + ", ".join(f"{float(value):g}" for value in values) + "]"


for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
    kind = np.dtype(getattr(np, name, None) or getattr(ml_dtypes, name))
    ones = np.ones(1000, kind)
    mixed = np.array([3, 1, np.nan, 2, 0], kind)
    found = [
        f"mean of 1,000 ones {float(ones.mean()):.3g}",
        f"norm {float(np.linalg.norm(ones)):.3g}",
        f"sorted {written(np.sort(mixed))}",
        f"median with a NaN {float(np.median(np.array([1, 2, 3, np.nan], kind))):g}",
        f"unique {written(np.unique(np.array([1, np.nan, 0, 1], kind)))}",
    ]
    print(f"{name}: {', '.join(found)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
