#!/usr/bin/env bash
# dask 2026.8.0 with NumPy 2.4.6, Python 3.11: statistics of float16 arrays by dask.array, beside the same of NumPy.
#
# Behaviour: dask counts and adds in float16, where NumPy's mean() adds in float32. The mean of 100,000 ones is NaN, as the
# sum and the number of entries are both infinite in float16. The mean of 1,000 entries of 300 is infinite, and their
# standard deviation NaN. Each partial sum is float16, so that chunks do not help, and a single chunk is as wrong.
# mean(axis=...), nanmean, average and var are alike. A RuntimeWarning of NumPy about an overflow is the only sign. So
# statistics of 16-bit gradients or weights need astype(np.float32) before.
#
# Seen (10 chunks; NumPy, then dask):
#   mean of 1,000 entries of 1: 1, 1
#   mean of 1,000 entries of 300: 300, inf
#   std of 1,000 entries of 10: 0, 0
#   std of 1,000 entries of 300: inf, nan
#   average of 1,000 entries of 300: 300, inf
#   mean of 100,000 entries of 1: 1, nan
#   mean of 100,000 entries of 1, one chunk: 1, nan
#   nanmean of 100,000 entries of 1: inf, nan
#   mean along rows of 100,000 entries of 1: 1, nan
#   mean of 100,000 entries of 1, float32: 1, 1
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check "dask[array]==2026.8.0" numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import dask.array
import numpy as np

CASES = {
    "mean of {:,} entries of {}": ("mean", (1000, 1), (1000, 300)),
    "std of {:,} entries of {}": ("std", (1000, 10), (1000, 300)),
    "average of {:,} entries of {}": ("average", (1000, 300)),
    "mean of {:,} entries of {} ": ("mean", (100000, 1)),
    "mean of {:,} entries of {}, one chunk": ("mean", (100000, 1)),
    "nanmean of {:,} entries of {}": ("nanmean", (100000, 1)),
    "mean along rows of {:,} entries of {}": ("mean", (100000, 1)),
    "mean of {:,} entries of {}, float32": ("mean", (100000, 1)),
}
for text, (name, *sizes) in CASES.items():
    for count, value in sizes:
        values = np.full((1, count), value, np.float32 if "float32" in text else np.float16)
        chunked = dask.array.from_array(values, chunks=(1, count if "one chunk" in text else count // 10))
        axis = {"axis": 1} if "rows" in text else {}
        found = (np.ravel(getattr(module, name)(x, **axis))[0] for module, x in ((np, values), (dask.array, chunked)))
        found = (one.compute() if hasattr(one, "compute") else one for one in found)
        print(f"{text.strip().format(count, value)}: {', '.join(f'{float(one):g}' for one in found)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
