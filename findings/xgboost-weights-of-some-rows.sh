#!/usr/bin/env bash
# xgboost-cpu 3.2.0 (the newest), Python 3.11: LIBSVM text of which some rows have a weight, as in label:weight.
#
# Behaviour: weights are put together without the rows that have none. So the third row's weight goes to the second row,
# and zeros fill the end: rows at the end count for nothing in training. No error, no warning about weights. Where all
# rows have one, or none, all is as it should be.
#
# Seen:
#   all rows have one, 0.5 1 3 1: [0.5, 1.0, 3.0, 1.0]
#   rows 1 and 3 have one, 0.5 and 3: [0.5, 3.0, 0.0, 0.0]
#   no row has one: []
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check xgboost-cpu==3.2.0 numpy==2.4.6 scipy==1.17.1
cat >"$folder/program.py" <<'PYTHON'
import sys

import xgboost

ROWS = {
    "all rows have one, 0.5 1 3 1": "1:0.5 1:1\n0:1 2:1\n0:3 1:2\n1:1 2:2\n",
    "rows 1 and 3 have one, 0.5 and 3": "1:0.5 1:1\n0 2:1\n0:3 1:2\n1 2:2\n",
    "no row has one": "1 1:1\n0 2:1\n0 1:2\n1 2:2\n",
}
for what, text in ROWS.items():
    with open(f"{sys.argv[1]}/rows", "w") as file:
        file.write(text)
    matrix = xgboost.DMatrix(f"{sys.argv[1]}/rows?format=libsvm")
    print(f"{what}: {matrix.get_weight().tolist()}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null)
echo "$seen"
[ "$seen" = "all rows have one, 0.5 1 3 1: [0.5, 1.0, 3.0, 1.0]
rows 1 and 3 have one, 0.5 and 3: [0.5, 3.0, 0.0, 0.0]
no row has one: []" ]
