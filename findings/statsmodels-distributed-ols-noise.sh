#!/usr/bin/env bash
# statsmodels 0.15.0 with NumPy 2.4.6, Python 3.11: DistributedModel of statsmodels.base.distributed_estimation, which fits a
# linear model on parts of the rows, with one round of messages.
#
# Behaviour: the default (OLS, debiased lasso) is right only for noise of variance 1. The step that takes the lasso's bias
# away needs the gradient of the squared error, as its comment says. It calls OLS.score without a scale, which is the
# gradient of another function, where the noise is estimated too: it is smaller by the variance of the residuals. So at a
# noise of 0.1 the fit overshoots by six times the lasso's bias, and at 10 the bias remains. One part does the same.
# GLM with the Gaussian family estimates no scale there, and is right, and so is estimation_kwds={"score_kwds": {"scale": 1}}.
#
# Seen (largest error of 5 coefficients beside least squares of all rows; 4,000 rows in 4 parts, alpha 0.2):
#   noise 0.1: lasso alone 0.2, default 1.4, default on one part 1.4, with scale 1 0.0, GLM 0.0
#   noise 0.3: lasso alone 0.2, default 0.8, default on one part 0.8, with scale 1 0.0, GLM 0.0
#   noise 1: lasso alone 0.2, default 0.0, default on one part 0.0, with scale 1 0.0, GLM 0.0
#   noise 10: lasso alone 0.2, default 0.2, default on one part 0.2, with scale 1 0.0, GLM 0.0
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check statsmodels==0.15.0 numpy==2.4.6 scipy==1.17.1
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
import statsmodels.api as sm
from statsmodels.base.distributed_estimation import DistributedModel, _est_regularized_naive, _join_naive

random = np.random.default_rng(0)
rows = random.standard_normal((4000, 5))
unit = random.standard_normal(4000)
GAUSS = {"model_class": sm.GLM, "init_kwds": {"family": sm.families.Gaussian()}}
CASES = {
    "lasso alone": (4, {"estimation_method": _est_regularized_naive, "join_method": _join_naive}),
    "default": (4, {}),
    "default on one part": (1, {}),
    "with scale 1": (4, {"estimation_kwds": {"score_kwds": {"scale": 1}}}),
    "GLM": (4, GAUSS),
}
for noise in (0.1, 0.3, 1, 10):
    values = rows @ [1.0, -2.0, 0.5, 0.0, 0.0] + noise * unit
    best = np.linalg.lstsq(rows, values)[0]
    found = []
    for name, (parts, settings) in CASES.items():
        model = DistributedModel(parts, **settings)
        fitted = model.fit(((values[part::parts], rows[part::parts]) for part in range(parts)), fit_kwds={"alpha": 0.2})
        found.append(f"{name} {np.abs(fitted.params - best).max():.1f}")
    print(f"noise {noise:g}: {', '.join(found)}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
