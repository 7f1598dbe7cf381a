#!/usr/bin/env bash
# torch 2.13.0, CPU; ml_dtypes 0.6.0; Python 3.11: float32 to 8-bit floats, of numbers that are too large or no numbers.
#
# Behaviour: torch's Tensor.to(float8_e4m3fn) makes infinity 448, the largest number, and so it does with all that is too
# large. The format has a NaN, and ml_dtypes uses it there. torch's three neighbouring formats do not saturate: e5m2 makes
# infinity, e4m3fnuz and e5m2fnuz NaN. So a gradient that overflowed passes for finite after e4m3fn, and only after it.
# float8_e8m0fnu, for scales, has no sign and no zero: torch makes -1 into 1 and 0 into 2^-127, ml_dtypes both into NaN.
#
# Seen:
#   torch e4m3fn inf 1e+06 470 464 nan: 448 448 448 448 nan
#   torch e5m2 inf 1e+06 470 464 nan: inf inf 448 448 nan
#   torch e4m3fnuz inf 1e+06 470 464 nan: nan nan nan nan nan
#   torch e5m2fnuz inf 1e+06 470 464 nan: nan nan 448 448 nan
#   ml_dtypes e4m3fn inf 1e+06 470 464 nan: nan nan nan 448 nan
#   ml_dtypes e5m2 inf 1e+06 470 464 nan: inf inf 448 448 nan
#   torch e8m0fnu -1 0: 1 5.87747e-39
#   ml_dtypes e8m0fnu -1 0: nan nan
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
cat >"$folder/program.py" <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

LARGE, SCALES = [float("inf"), 1e6, 470.0, 464.0, float("nan")], [-1.0, 0.0]


def show(what, given, made):
    print(what, *(f"{one:g}" for one in given), end=": ")
    print(*(f"{float(one):g}" for one in made))


def by_torch(name, given):
    show(f"torch {name}", given, torch.tensor(given).to(getattr(torch, f"float8_{name}")).float())


def by_ml_dtypes(name, given):
    with np.errstate(all="ignore"):
        made = np.array(given, np.float32).astype(getattr(ml_dtypes, f"float8_{name}")).astype(np.float32)
    show(f"ml_dtypes {name}", given, made)


for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
    by_torch(name, LARGE)
for name in ("e4m3fn", "e5m2"):
    by_ml_dtypes(name, LARGE)
by_torch("e8m0fnu", SCALES)
by_ml_dtypes("e8m0fnu", SCALES)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
