#!/usr/bin/env bash
# scikit-learn-intelex 2026.2.0 with scikit-learn 1.9.1, NumPy 2.4.6, CPU, Python 3.11: BasicStatistics and
# IncrementalBasicStatistics with sample_weight.
#
# Behaviour: each row is multiplied by its weight, and then all is as without weights: a mean is the sum divided by the
# number of rows. numpy.average and scikit-learn's StandardScaler divide by the sum of the weights. So the constant 10 with
# weights 1, 2, 3 and 2 has a mean of 20, a variance of 67, and 10 and 30 as its least and largest entry. Weights twice as
# large double the mean. Of weights that are counts, 2 for a row that is there twice, the sum alone is right. Batches
# agree with the whole, so that a comparison of the two shows nothing. The documentation does not say how weights count.
#
# Seen (BasicStatistics, the incremental one in two batches, then numpy.average and StandardScaler with the same weights):
#   mean of 10, 10, 10, 10, weights 1, 2, 3, 2: 20, 20; 10
#   variance: 66.7, 66.7; 0
#   smallest and largest: 10 and 30
#   mean of 1, 2, 4, weights 2, 1, 1: 2.67, 2.67; 2
#   sum of 1, 2, 4, weights 2, 1, 1: 8
#   the same with weights 4, 2, 2: mean 5.33, 5.33; 2
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check \
  scikit-learn-intelex==2026.2.0 scikit-learn==1.9.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from sklearn.preprocessing import StandardScaler
from sklearnex.basic_statistics import BasicStatistics, IncrementalBasicStatistics


def statistics(values, weights):
    column, weights = np.array(values, dtype=float)[:, None], np.array(weights, dtype=float)
    whole = BasicStatistics(result_options="all").fit(column, sample_weight=weights)
    batches = IncrementalBasicStatistics(result_options="all")
    for half in np.array_split(np.arange(len(column)), 2):
        batches.partial_fit(column[half], sample_weight=weights[half])
    usual = StandardScaler().fit(column, sample_weight=weights)
    mean = np.average(column[:, 0], weights=weights)
    assert np.isclose(mean, usual.mean_[0])
    return {
        "mean": f"{whole.mean_[0]:.3g}, {batches.mean_[0]:.3g}; {mean:g}",
        "variance": f"{whole.variance_[0]:.3g}, {batches.variance_[0]:.3g}; {usual.var_[0]:g}",
        "ends": f"{whole.min_[0]:g} and {whole.max_[0]:g}",
        "sum": f"{whole.sum_[0]:g}",
    }


found = statistics((10, 10, 10, 10), (1, 2, 3, 2))
print(f"mean of 10, 10, 10, 10, weights 1, 2, 3, 2: {found['mean']}")
print(f"variance: {found['variance']}")
print(f"smallest and largest: {found['ends']}")
found = statistics((1, 2, 4), (2, 1, 1))
print(f"mean of 1, 2, 4, weights 2, 1, 1: {found['mean']}")
print(f"sum of 1, 2, 4, weights 2, 1, 1: {found['sum']}")
print(f"the same with weights 4, 2, 2: mean {statistics((1, 2, 4), (4, 2, 2))['mean']}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
