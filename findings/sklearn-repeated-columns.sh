#!/usr/bin/env bash
# scikit-learn 1.9.1 with SciPy 1.17.1, Python 3.11: CSR matrices whose rows name a column twice, as 3x and -2x for x.
#
# Behaviour: SciPy's meaning of such entries is their sum: toarray(), products, abs(), norms and max() of SciPy go by it.
# Half of scikit-learn takes each entry for a value of its own. No error, and no warning but one of Lasso about iterations: normalize and StandardScaler
# scale by wrong norms, Lasso and ElasticNet with an intercept do not converge and fit almost nothing, SVC another model, f_regression and
# euclidean_distances are wrong. LogisticRegression, Ridge, LinearSVC and decision trees are right. Rows as these come from
# sparse gradients or hashed features that were put behind one another. X.sum_duplicates() before it helps.
#
# Seen (60 rows of 4 columns; beside the same matrix after sum_duplicates(); largest weight or first value):
#   toarray: alike
#   scipy norm of rows: alike
#   normalize: 0.2 became 0.1
#   StandardScaler: 0.9 became 3.3
#   VarianceThreshold: 0.8 became 4.1
#   Lasso, without intercept: alike
#   Lasso: 0.9 became 0.0
#   ElasticNet: 0.9 became 0.0
#   SVC, linear: 1.4 became 0.1
#   f_regression: 32.2 became 1.6
#   euclidean_distances: 1.4 became 6.6
#   LogisticRegression: alike
#   Ridge: alike
#   LinearSVC: alike
#   DecisionTreeRegressor: alike
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check scikit-learn==1.9.1 scipy==1.17.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import warnings

import numpy as np
import scipy.sparse
from sklearn.feature_selection import VarianceThreshold, f_regression
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression, Ridge
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.preprocessing import StandardScaler, normalize
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeRegressor

random = np.random.default_rng(0)
values = random.normal(size=(60, 4))
target = values @ [1, -1, 0.5, 0.2] + random.normal(size=60) / 2
label = (target > 0).astype(int)
once = scipy.sparse.csr_matrix(values)
data = np.stack([3 * once.data, -2 * once.data], axis=1).ravel()
twice = scipy.sparse.csr_matrix((data, np.repeat(once.indices, 2), once.indptr * 2), shape=once.shape)
summed = twice.copy()
summed.sum_duplicates()
warnings.simplefilter("ignore")  # Lasso says that it did not converge; the others are silent
USES = {
    "toarray": lambda x: x.toarray(),
    "scipy norm of rows": lambda x: scipy.sparse.linalg.norm(x, axis=1),
    "normalize": lambda x: normalize(x).toarray()[:, 0],
    "StandardScaler": lambda x: StandardScaler(with_mean=False).fit(x).scale_,
    "VarianceThreshold": lambda x: VarianceThreshold().fit(x).variances_,
    "Lasso, without intercept": lambda x: Lasso(alpha=0.05, fit_intercept=False, tol=1e-8).fit(x, target).coef_,
    "Lasso": lambda x: Lasso(alpha=0.05).fit(x, target).coef_,
    "ElasticNet": lambda x: ElasticNet(alpha=0.05).fit(x, target).coef_,
    "SVC, linear": lambda x: SVC(kernel="linear").fit(x, label).coef_.toarray(),
    "f_regression": lambda x: f_regression(x, target)[0],
    "euclidean_distances": lambda x: euclidean_distances(x)[0, 1:],
    "LogisticRegression": lambda x: LogisticRegression(tol=1e-8).fit(x, label).coef_,
    "Ridge": lambda x: Ridge().fit(x, target).coef_,
    "LinearSVC": lambda x: LinearSVC(tol=1e-8, max_iter=100000, random_state=0).fit(x, label).coef_,
    "DecisionTreeRegressor": lambda x: DecisionTreeRegressor(random_state=0).fit(x, target).predict(values),
}
for name, use in USES.items():
    right, found = (np.ravel(use(matrix.copy())) for matrix in (summed, twice))
    is_alike = right.shape == found.shape and np.allclose(right, found, rtol=1e-3)
    print(f"{name}: {'alike' if is_alike else f'{right[0]:.1f} became {found[0]:.1f}'}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
