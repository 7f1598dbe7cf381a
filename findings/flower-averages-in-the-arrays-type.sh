#!/usr/bin/env bash
# flwr (Flower) 1.42.0, Python 3.11, NumPy 2.4.6: the weighted average of two clients' arrays, as FedAvg makes it.
#
# Behaviour: flwr.server.strategy (FedAvg, FedOpt and the others there) multiplies each array by its client's number of
# examples in the array's own type. int8 and uint8 wrap without a word: 100 of one client and 101 of three others average
# to -27.25 and 36.75. Products beyond 65,504 are infinite in float16, so clients with 50,000 examples
# spoils all averages, which become NaN. flwr.serverapp.strategy, the newer interface of the same release, divides first, and is
# right for all of them. Integers of a model that are counters (int64) are averaged to fractions by both.
#
# Seen (the third entry is 100 and 101):
#   float32, 1 and 3 examples: server.strategy [1.75, 3.75, 100.75], serverapp.strategy [1.75, 3.75, 100.75]
#   int8, 1 and 3 examples: server.strategy [1.75, 3.75, -27.25], serverapp.strategy [1.75, 3.75, 100.75]
#   uint8, 1 and 3 examples: server.strategy [1.75, 3.75, 36.75], serverapp.strategy [1.75, 3.75, 100.75]
#   float16, 1 and 3 examples: server.strategy [1.75, 3.75, 100.75], serverapp.strategy [1.75, 3.75, 100.75]
#   float16, 50000 and 60000 examples: server.strategy [nan, nan, nan], serverapp.strategy [1.54, 3.54, 100.56]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check flwr==1.42.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from flwr.common import ArrayRecord, MetricRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords


def average(kind, examples):
    arrays = [np.array(values).astype(kind) for values in ([1, 3, 100], [2, 4, 101])]
    with np.errstate(all="ignore"):
        old = aggregate([([array], count) for array, count in zip(arrays, examples)])[0]
        records = [
            RecordDict({"arrays": ArrayRecord([array]), "metrics": MetricRecord({"num-examples": count})})
            for array, count in zip(arrays, examples)
        ]
        new = aggregate_arrayrecords(records, "num-examples").to_numpy_ndarrays()[0]
    return [[round(float(one), 2) for one in values] for values in (old, new)]


for kind, examples in (("float32", (1, 3)), ("int8", (1, 3)), ("uint8", (1, 3)), ("float16", (1, 3)), ("float16", (50000, 60000))):
    old, new = average(kind, examples)
    print(f"{kind}, {examples[0]} and {examples[1]} examples: server.strategy {old}, serverapp.strategy {new}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
