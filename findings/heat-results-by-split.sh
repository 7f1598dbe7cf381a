#!/usr/bin/env bash
# heat 1.8.0 with torch 2.11.0 and MPICH 5.0.2, Python 3.11, CPU; the same with heat 1.9.0 (Python 3.12): mean and argmax of an array
# of 11 rows and 4 columns on three ranks, whole on each rank (split=None) or in parts by rows (split=0) or columns (split=1).
#
# Behaviour: the result depends on how the array is distributed. mean() counts a part with a NaN as a part of zeros, so that
# a finite wrong number comes back, and a diverged training looks sound. A mean of float64 is rounded to float32. argmax()
# gives another entry's index if the array is split by columns, or if its rows are no multiple of the ranks; argmin() is
# alike. No error, no warning. heat.sum(x) / x.size is right in all cases.
#
# Seen (NumPy's result, then heat's on three ranks):
#   mean of ones and one NaN in the last row: nan; split None: nan, 0: 0.727, 1: 0.750
#   mean of float64 1 + 1e-9: 1.000000001; split None: 1.000000001, 0: 1.000000000, 1: 1.000000000
#   argmax, the largest in row 10, column 1: 41; split None: 41, 0: 39, 1: 21
#   argmin, the smallest there: 41; split None: 41, 0: 39, 1: 21
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  heat==1.8.0 torch==2.11.0 mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import heat
import numpy as np

holed = np.ones((11, 4), np.float32)
holed[10, 3] = np.nan
peak = np.zeros((11, 4), np.float32)
peak[10, 1] = 1
CASES = {
    "mean of ones and one NaN in the last row": (holed, "mean", ".3f"),
    "mean of float64 1 + 1e-9": (np.full((11, 4), 1 + 1e-9), "mean", ".9f"),
    "argmax, the largest in row 10, column 1": (peak, "argmax", ".0f"),
    "argmin, the smallest there": (-peak, "argmin", ".0f"),
}
for name, (values, function, form) in CASES.items():
    wanted = format(np.ravel(getattr(np, function)(values))[0], form)
    found = []
    for split in (None, 0, 1):
        array = heat.array(values, split=split)
        result = np.ravel(getattr(heat, function)(array).numpy())[0]
        if function == "mean":
            summed = np.ravel((heat.sum(array) / array.size).numpy())[0]
            assert format(summed, form) == wanted, summed
        found.append(f"{split}: {result:{form}}")
    if heat.MPI_WORLD.rank == 0:
        print(f"{name}: {wanted}; split {', '.join(found)}", flush=True)
PYTHON
"$folder/venv/bin/mpiexec" -n 3 "$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
