#!/usr/bin/env bash
# lightgbm 4.7.0 with SciPy 1.17.1, Python 3.11: sparse matrices whose rows name a column twice, as 3x and -2x for x.
#
# Behaviour: LightGBM takes one of the two entries for the value, where SciPy means their sum. Which one depends on the order
# of entries, and prediction from CSR and from CSC differ. Training on such rows gives a model that is worse on the dense
# rows than their mean is. No error, no warning. Rows as these come from sparse features that were put behind one another,
# or hashed. X.sum_duplicates() before it helps.
#
# Seen (mean squared error over 300 rows of 2 columns, as a share of that of the mean):
#   trained on dense rows, predicts dense: below 0.05
#   trained on dense rows, predicts CSR: below 0.05
#   trained on dense rows, predicts CSR with 3x before -2x: above 1
#   trained on dense rows, predicts CSR with -2x before 3x: 0.05 to 1
#   trained on dense rows, predicts CSC with 3x before -2x: 0.05 to 1
#   trained on CSR with 3x before -2x, predicts dense: above 1
#   trained on CSR after sum_duplicates(), predicts dense: below 0.05
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check lightgbm==4.7.0 scipy==1.17.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import lightgbm
import numpy as np
import scipy.sparse

random = np.random.default_rng(0)
dense = random.normal(size=(300, 2))
target = dense @ [1, -1]
once = scipy.sparse.csr_matrix(dense)


def twice(factors):
    data = np.stack([factor * once.data for factor in factors], axis=1).ravel()
    return scipy.sparse.csr_matrix((data, np.repeat(once.indices, 2), once.indptr * 2), shape=once.shape)


def fit(matrix):
    settings = {"objective": "regression", "verbose": -1, "num_leaves": 8, "num_threads": 1, "deterministic": True}
    return lightgbm.train(settings, lightgbm.Dataset(matrix, target), 100)


def show(name, model, matrix):
    share = ((model.predict(matrix) - target) ** 2).mean() / np.var(target)
    print(f"{name}: {'below 0.05' if share < 0.05 else 'above 1' if share > 1 else '0.05 to 1'}")


first, second = twice((3, -2)), twice((-2, 3))
assert np.allclose(first.toarray(), dense) and np.allclose(second.toarray(), dense)
summed = first.copy()
summed.sum_duplicates()
model = fit(dense)
show("trained on dense rows, predicts dense", model, dense)
show("trained on dense rows, predicts CSR", model, once)
show("trained on dense rows, predicts CSR with 3x before -2x", model, first)
show("trained on dense rows, predicts CSR with -2x before 3x", model, second)
show("trained on dense rows, predicts CSC with 3x before -2x", model, first.tocsc())
show("trained on CSR with 3x before -2x, predicts dense", fit(first), dense)
show("trained on CSR after sum_duplicates(), predicts dense", fit(summed), dense)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
