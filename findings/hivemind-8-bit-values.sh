#!/usr/bin/env bash
# hivemind 1.1.12 with torch 2.13.0 and two NumPys, CPU, Python 3.11: its two 8-bit formats of tensors.
#
# Behaviour: with NumPy 2.4 a tensor is written, and no reader can read it: TypeError, for each tensor. With NumPy 2.3 it
# reads. Both formats give entries of a bin their bin's mean, and say nothing of what that loses. QUANTILE_8BIT puts the
# same number of entries into each of 256 bins, so one gradient of 1 among 9,999 small ones comes back as 0.03.
# UNIFORM_8BIT has bins up to three standard deviations, and one for all beyond, so of 1 to 100 at 100 of 10,000 places
# all above 17 come back as 59. bfloat16 is taken there, and refused by the two 16-bit formats.
#
# Seen:
#   numpy 2.4.6 UNIFORM_8BIT: TypeError in reading
#   numpy 2.4.6 QUANTILE_8BIT: TypeError in reading
#   numpy 2.3.5 UNIFORM_8BIT: 1 among small ones 1.00, 1 to 100 among zeros: 10 is 10, 50 is 59, 100 is 59
#   numpy 2.3.5 QUANTILE_8BIT: 1 among small ones 0.03, 1 to 100 among zeros: 10 is 11, 50 is 41, 100 is 80
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6 hivemind==1.1.12
cat >"$folder/program.py" <<'PYTHON'
import warnings

import numpy as np
import torch

warnings.simplefilter("ignore")
from hivemind.compression import Quantile8BitQuantization, Uniform8BitQuantization  # noqa: E402
from hivemind.compression.base import CompressionInfo  # noqa: E402

ONE_LARGE = torch.cat([torch.linspace(-1e-3, 1e-3, 9_999), torch.tensor([1.0])])
FEW = torch.zeros(10_000)
FEW[::100] = torch.arange(1.0, 101.0)

for name, kind in (("UNIFORM_8BIT", Uniform8BitQuantization), ("QUANTILE_8BIT", Quantile8BitQuantization)):
    codec = kind()

    def read_back(values, codec=codec):
        written = codec.compress(values, CompressionInfo.from_tensor(values))
        return codec.extract(written)

    try:
        large, few = read_back(ONE_LARGE), read_back(FEW)
        told = f"1 among small ones {large[-1]:.2f}, 1 to 100 among zeros: " + ", ".join(
            f"{one} is {few[100 * (one - 1)]:.0f}" for one in (10, 50, 100)
        )
    except TypeError:
        told = "TypeError in reading"
    print(f"numpy {np.__version__} {name}: {told}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check numpy==2.3.5
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee -a "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
