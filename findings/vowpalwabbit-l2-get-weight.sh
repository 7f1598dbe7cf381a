#!/bin/sh
# Vowpal Wabbit 9.11.9 (Python): with --l2, Workspace.get_weight() gives numbers that predict() does not use.
#
# Online learning with --l2 keeps weights divided by a factor that shrinks with every example. get_weight() returns them
# without that factor, here twelve times too large, and nothing says so. Without --l2, and with --bfgs, the product of
# get_weight() and an example's values is what predict() gives. Who reads weights to compute an objective, or to carry
# them elsewhere, gets another model.
#
# Output seen (2026-11-29, Python 3.11):
#   --l2 0: predict 4.3532, by weights 4.3532
#   --l2 0.001: predict 1.6941, by weights 20.3891
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q vowpalwabbit==9.11.9
"$folder/venv/bin/python" - <<'END'
import random
import sys

from vowpalwabbit import Workspace

random.seed(0)
rows = [(1 if a > b else -1, a, b) for a, b in ((random.random(), random.random()) for _ in range(5000))]
found = []
for l2 in (0, 1e-3):
    model = Workspace(f"--loss_function logistic --l2 {l2} --noconstant -b 10 --quiet")
    for label, a, b in rows:
        model.learn(f"{label} | 1:{a} 2:{b}")
    predicted = model.predict("| 1:0.7 2:0.2")
    by_weights = 0.7 * model.get_weight(1) + 0.2 * model.get_weight(2)
    print(f"--l2 {l2}: predict {predicted:.4f}, by weights {by_weights:.4f}")
    found.append(abs(by_weights - predicted) < 1e-3 * abs(predicted))
    model.finish()
sys.exit(0 if found == [True, False] else 1)
END
