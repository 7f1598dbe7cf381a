#!/usr/bin/env bash
# dask-ml 2025.1.0 with dask-glm 0.4.0, dask 2026.8.0, Python 3.11: LogisticRegression by its five solvers.
#
# Behaviour: C (and penalty) have no effect with solver="newton" and solver="gradient_descent". Both take every setting and
# fit without regularisation, whatever C is; the other three follow C. On separable data nothing holds the weights, and
# newton leaves the optimum altogether: its objective on scikit-learn's breast cancer set is more than 1,000 times the best.
# Where the intercept is fitted, the solvers that do follow C penalise it, so they agree with liblinear, not with lbfgs of
# scikit-learn.
#
# Seen (600 rows of 3 columns, without intercept; the first weight for C = 0.001, 1, 1000):
#   admm: 0.10, 1.04, 1.06
#   lbfgs: 0.10, 1.04, 1.06
#   proximal_grad: 0.11, 1.06, 1.06
#   newton: 1.06, 1.06, 1.06
#   gradient_descent: 1.06, 1.06, 1.06
#   breast cancer, lbfgs: within 1 % of the best objective
#   breast cancer, newton: more than 1,000 times it
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  dask-ml==2025.1.0 dask-glm==0.4.0 "dask[dataframe]==2026.8.0" scikit-learn==1.9.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import warnings

import dask.array
import numpy as np
from dask_ml.linear_model import LogisticRegression
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.preprocessing import StandardScaler

warnings.filterwarnings("ignore")


def weights(rows, labels, solver, strength):
    model = LogisticRegression(C=strength, solver=solver, fit_intercept=False, max_iter=300)
    split = len(rows) // 2
    model.fit(dask.array.from_array(rows, chunks=(split, -1)), dask.array.from_array(labels, chunks=split))
    return model.coef_


def objective(rows, labels, w):
    with np.errstate(over="ignore"):
        return np.logaddexp(0, -(2 * labels - 1) * (rows @ w)).sum() + w @ w / 2


random = np.random.default_rng(0)
rows = random.normal(size=(600, 3))
labels = (rows @ [1.0, -1, 0.5] + random.logistic(size=600) > 0).astype(int)
for solver in ("admm", "lbfgs", "proximal_grad", "newton", "gradient_descent"):
    first = (weights(rows, labels, solver, strength)[0] for strength in (1e-3, 1.0, 1e3))
    print(f"{solver}: {', '.join(f'{one:.2f}' for one in first)}")
rows, labels = load_breast_cancer(return_X_y=True)
rows = StandardScaler().fit_transform(rows)
best = objective(rows, labels, Reference(tol=1e-10, max_iter=10000, fit_intercept=False).fit(rows, labels).coef_[0])
for solver in ("lbfgs", "newton"):
    ratio = objective(rows, labels, weights(rows, labels, solver, 1.0)) / best
    print(f"breast cancer, {solver}: {'within 1 % of the best objective' if ratio < 1.01 else 'more than 1,000 times it' if ratio > 1e3 else ratio}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
