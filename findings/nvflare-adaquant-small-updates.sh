#!/usr/bin/env bash
# nvflare (NVIDIA FLARE) 2.9.0 with torch 2.13.0, CPU, Python 3.11: ModelQuantizer("adaquant") and ModelDequantizer.
#
# Behaviour: the number of levels grows with the root of a tensor's spread (largest minus smallest), in absolute terms. So
# the same update is held to 1 % where its entries are around 1, to a third where they are around 1e-3, and by two levels
# around 2e-4. Below a spread of 2.25e-4 no level is left: all entries come back as NaN, and nothing is raised. Late
# updates of a model (WEIGHT_DIFF), biases and layer norms are that small. A constant tensor is exact, and the same
# filter's float16 holds all of these sizes.
#
# Seen (1,000 values, uniform up to the size that is named; error of the worst entry, relative to the largest):
#   adaquant: 1 0.01, 0.001 0.33, 0.0002 1.00, 0.0001 all NaN, 1e-06 all NaN
#   float16: 1 0.00, 0.001 0.00, 0.0002 0.00, 0.0001 0.00, 1e-06 0.03
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 nvflare==2.9.0 bitsandbytes==0.50.2
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer


def there_and_back(values, kind):
    update, context = DXO(DataKind.WEIGHT_DIFF, data={"weight": values.copy()}), FLContext()
    sent = ModelQuantizer(quantization_type=kind).process_dxo(update, Shareable(), context)
    return ModelDequantizer().process_dxo(sent, Shareable(), context).data["weight"]


update = np.random.default_rng(0).uniform(-1, 1, 1000)
for kind in ("adaquant", "float16"):
    told = []
    for size in (1, 1e-3, 2e-4, 1e-4, 1e-6):
        values = (update * size).astype(np.float32)
        got = there_and_back(values, kind)
        lost = np.abs(got - values).max() / np.abs(values).max()
        told.append(f"{size:g} {'all NaN' if np.isnan(got).all() else f'{lost:.2f}'}")
    print(f"{kind}: {', '.join(told)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
