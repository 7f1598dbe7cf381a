#!/usr/bin/env bash
# liblinear 2.50 (liblinear-official 2.50.0 from PyPI), Python 3.11; scikit-learn 1.9.1 for its breast cancer data only.
#
# Behaviour: liblinear's default tolerances end a primal training far from the optimum, and nothing says so, also on
# standardised columns. The squared hinge (-s 2, trust region) ends 8.8 % above the objective that the same solver
# reaches with -e 1e-8, logistic loss with L1 (-s 6) 2 to 4 % (its order is random). The dual solver of the squared
# hinge (-s 1), of the same objective, ends under 0.1 % above. The rule is of the gradient, relative to the one at zero
# and by the share of the rarer class, not of the objective. Who compares programs by their time at the defaults
# compares times to different models, and who counts non-zero weights counts others.
#
# Seen (objective over that of -e 1e-8; "limit": liblinear has told that it reached its number of iterations):
#   standardised, -s 0: 0.56 % above
#   standardised, -s 2: 8.80 % above
#   standardised, -s 1: under 0.1 % above
#   standardised, -s 6: over 2 % above, and other weights are zero
#   as they come, -s 0: 0.78 % above
#   as they come, -s 2: 2.84 % above
#   as they come, -s 6: over 2 % above, and other weights are zero
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  liblinear-official==2.50.0 scikit-learn==1.9.1 numpy==2.4.6 scipy==1.17.1
cat >"$folder/program.py" <<'PYTHON'
import ctypes
import os

import numpy as np
import scipy.sparse
from liblinear.liblinearutil import parameter, problem, train
from sklearn.datasets import load_breast_cancer

columns, classes = load_breast_cancer(return_X_y=True)
signs = 2.0 * classes - 1
standardised = (columns - columns.mean(0)) / columns.std(0)


def objective(solver, weights, rows):
    margins = signs * (rows @ weights)
    if solver in (1, 2):
        loss = (np.maximum(0, 1 - margins) ** 2).sum()
    else:
        loss = np.logaddexp(0, -margins).sum()
    return loss + (np.abs(weights).sum() if solver == 6 else weights @ weights / 2)


def trained(solver, rows, options):
    """The weights, and whether liblinear has told of its limit."""
    out, into = os.pipe()
    kept = os.dup(1)
    os.dup2(into, 1)
    model = train(problem(signs, scipy.sparse.csr_matrix(rows)), parameter(f"-s {solver} -c 1 {options}"))
    ctypes.CDLL(None).fflush(None)
    os.dup2(kept, 1)
    os.close(into)
    said = os.read(out, 1 << 20)
    return np.array(model.get_decfun()[0]) * model.get_labels()[0], b"reaching max number" in said


for name, rows, solvers in (("standardised", standardised, (0, 2, 1, 6)), ("as they come", columns, (0, 2, 6))):
    for solver in solvers:
        weights, told = trained(solver, rows, "")
        best, _ = trained(solver, rows, "-e 1e-8")
        above = 100 * (objective(solver, weights, rows) / objective(solver, best, rows) - 1)
        if solver in (0, 2):
            text = f"{above:.2f} % above"
        elif above < 0.1:
            text = "under 0.1 % above"
        else:
            text = "over 2 % above" if above > 2 else f"{above:.2f} % above"
        if solver == 6:
            text += f", and {'other' if ((weights == 0) != (best == 0)).any() else 'the same'} weights are zero"
        print(f"{name}, -s {solver}: {text}{', limit' if told else ''}")
PYTHON
found=$("$folder/venv/bin/python" "$folder/program.py")
expected=$(sed -n 's/^#   //p' "$0")
echo "$found"
[ "$found" = "$expected" ]
