#!/usr/bin/env bash
# xgboost-cpu 3.2.0 (the newest for Python 3.11) with NumPy 2.4.6, two workers by RabitTracker and xgboost.collective; the same
# with 3.4.1 (Python 3.12): booster=gblinear, where each worker has a part of the rows.
#
# Behaviour: each worker fits a linear model to its own rows, and learns nothing of the others'. So the workers end with
# different weights, and the one that saves its model saves a model of a part of the data. No error, and no warning about
# it (a warning says that gblinear is deprecated). shotgun and coord_descent are alike. Trees are fitted to all rows, and
# exact, the one tree method that cannot work so, raises XGBoostError. Beside it: allreduce with Op.MAX (or Op.MIN) drops
# a NaN or keeps it, depending on the worker that has it.
#
# Seen (y = 3 x on the first worker's rows, y = x on the second's; the weight, or for trees the predicted rise, on both):
#   gblinear, one process with all rows: 2.0
#   gblinear, shotgun: 3.0 and 1.0
#   gblinear, coord_descent: 3.0 and 1.0
#   gbtree, hist: 2.0 and 2.0
#   gbtree, exact: XGBoostError
#   largest of NaN and 1: 1.0 and 1.0
#   largest of 1 and NaN: nan and nan
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check xgboost-cpu==3.2.0 numpy==2.4.6 scipy==1.17.1
cat >"$folder/program.py" <<'PYTHON'
import multiprocessing

import numpy as np
import xgboost
from xgboost import collective
from xgboost.tracker import RabitTracker

LEFT, RIGHT = -np.ones((1, 1)), np.ones((1, 1))


def rise(rows, values, **options):
    parameters = {"nthread": 1, "lambda": 0, "objective": "reg:squarederror", "verbosity": 0, **options}
    model = xgboost.train(parameters, xgboost.DMatrix(rows, values), num_boost_round=100)
    left, right = (float(model.predict(xgboost.DMatrix(row))[0]) for row in (LEFT, RIGHT))
    return round((right - left) / 2, 1) + 0.0


def work(number, arguments, answers):
    with collective.CommunicatorContext(**arguments, dmlc_task_id=str(number)):
        rank = collective.get_rank()
        rows = np.tile([[-1.0], [1.0]], (50, 1))
        values = rows[:, 0] * (3, 1)[rank]
        found = {}
        for booster, name in (
            ("gblinear", "shotgun"), ("gblinear", "coord_descent"), ("gbtree", "hist"), ("gbtree", "exact"),
        ):  # fmt: skip
            choice = {"updater" if booster == "gblinear" else "tree_method": name}
            try:
                found[f"{booster}, {name}"] = rise(rows, values, booster=booster, **choice)
            except xgboost.core.XGBoostError:
                found[f"{booster}, {name}"] = "XGBoostError"
        for text, both in (("NaN and 1", (np.nan, 1.0)), ("1 and NaN", (1.0, np.nan))):
            found[f"largest of {text}"] = float(collective.allreduce(np.array([both[rank]]), collective.Op.MAX)[0])
        answers.put((rank, found))


if __name__ == "__main__":
    rows = np.tile([[-1.0], [1.0]], (100, 1))
    values = rows[:, 0] * np.repeat((3, 1), 100)
    print(f"gblinear, one process with all rows: {rise(rows, values, booster='gblinear')}")
    tracker = RabitTracker(n_workers=2, host_ip="127.0.0.1")
    tracker.start()
    fresh = multiprocessing.get_context("spawn")  # OpenMP is in use here by now
    answers = fresh.Queue()
    workers = [fresh.Process(target=work, args=(number, tracker.worker_args(), answers)) for number in range(2)]
    for worker in workers:
        worker.start()
    first, second = (found for _, found in sorted(answers.get(timeout=60) for _ in workers))
    for name in first:
        same = first[name] == second[name] == "XGBoostError"
        print(f"{name}: {first[name]}" if same else f"{name}: {first[name]} and {second[name]}")
    for worker in workers:
        worker.join()
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | grep -v "got rank" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
