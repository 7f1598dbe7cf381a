#!/usr/bin/env bash
# scikit-learn-intelex 2026.2.0 with scikit-learn 1.9.1, NumPy 2.4.6, an Intel CPU, Python 3.11: LinearRegression, Ridge and their
# incremental forms, and IncrementalEmpiricalCovariance, of float32 columns whose mean is large beside their deviation.
#
# Behaviour: scikit-learn's own LinearRegression and Ridge, which these replace (patch_sklearn), subtract the means first,
# and are right to two digits and more. Here products are added as they are, in float32. For columns of deviation 1,
# coefficients are wrong by 1 or 2 % at a mean of 100, by a third and more at 300, and all three are 2 at 10,000, where
# incremental variances are negative. No error, no warning. float64 is right there. Subtracting the means
# before the fit helps, or float64.
#
# Seen (10,000 rows of three columns, y = x1 + 2 x2 + 3 x3 + 7; largest error of a coefficient, float32 unless said):
#   scikit-learn, mean 1000: LinearRegression below 0.01, Ridge below 0.01
#   scikit-learn-intelex, mean 0: LinearRegression below 0.01, Ridge below 0.01
#   scikit-learn-intelex, mean 1000: LinearRegression above 0.1, Ridge above 0.1
#   scikit-learn-intelex, mean 10000: LinearRegression above 0.1, Ridge above 0.1
#   scikit-learn-intelex, mean 10000, float64: LinearRegression below 0.01, Ridge below 0.01
#   in three batches, mean 0: LinearRegression below 0.01, Ridge below 0.01
#   in three batches, mean 1000: LinearRegression above 0.1, Ridge above 0.1
#   variances of three batches, mean 10000: negative ones True; of scikit-learn: negative ones False
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  scikit-learn-intelex==2026.2.0 scikit-learn==1.9.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from sklearn import covariance, linear_model
from sklearnex import covariance as incremental_covariance
from sklearnex import linear_model as intel

RIGHT = np.array([1.0, 2.0, 3.0])
NOISE = np.random.default_rng(0).normal(size=(10_000, 3))


class InBatches:
    def __init__(self, model):
        self.model = model

    def fit(self, *arrays):
        for batch in np.array_split(np.arange(len(NOISE)), 3):
            self.model.partial_fit(*(array[batch] for array in arrays))
        return self.model


def columns(mean, dtype):
    x = (NOISE + mean).astype(dtype)
    return x, (x.astype(np.float64) @ RIGHT + 7).astype(dtype)


def tell(name, models, mean, dtype=np.float32):
    found = []
    for model in models:
        off = np.abs(model.fit(*columns(mean, dtype)).coef_ - RIGHT).max()
        found.append("below 0.01" if off < 0.01 else "above 0.1" if off > 0.1 else f"{off:.3f}")
    suffix = ", float64" if dtype is np.float64 else ""
    print(f"{name}, mean {mean}{suffix}: LinearRegression {found[0]}, Ridge {found[1]}", flush=True)


def whole(package):
    return package.LinearRegression(), package.Ridge(alpha=1.0)


def batches():
    return InBatches(intel.IncrementalLinearRegression()), InBatches(intel.IncrementalRidge(alpha=1.0))


def is_negative(estimator):
    x, _ = columns(10_000, np.float32)
    return bool((np.diag(estimator.fit(x).covariance_) < 0).any())


tell("scikit-learn", whole(linear_model), 1000)
for mean in (0, 1000, 10_000):
    tell("scikit-learn-intelex", whole(intel), mean)
tell("scikit-learn-intelex", whole(intel), 10_000, np.float64)
for mean in (0, 1000):
    tell("in three batches", batches(), mean)
negative = is_negative(InBatches(incremental_covariance.IncrementalEmpiricalCovariance()))
own = is_negative(covariance.EmpiricalCovariance())
print(f"variances of three batches, mean 10000: negative ones {negative}; of scikit-learn: negative ones {own}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
