#!/usr/bin/env bash
# openfl 1.9 with NumPy 2.2.6 and scikit-learn 1.9.1, CPU, Python 3.11: its compression pipelines STC (largest entries, one
# magnitude), SKC (largest entries, clusters) and KC (clusters), forward and backward.
#
# Behaviour: STC makes what it keeps too small. Its magnitude is the mean over all entries, with zeros for those that were
# dropped. Sparse ternary compression (Sattler et al., 2019) takes the mean of the kept ones. So at the default p_sparsity
# of 0.1 an update arrives at a tenth of its length, and at 0.01 at a hundredth. And KC and SKC mix values up: as codes 0, 1,
# 2, ... are replaced by their values, one after another in the same array, a value that equals a later code is replaced
# again. Of 1, 2 and 3 all become 3, and SKC makes 10 of a 4. That hits whole numbers, others by chance only. No error.
#
# Seen (magnitude of what STC keeps of 1,000 normal numbers, relative to the mean of the kept; then values before and after):
#   STC, p_sparsity 1: 1.00
#   STC, p_sparsity 0.5: 0.50
#   STC, p_sparsity 0.1: 0.10
#   STC, p_sparsity 0.01: 0.01
#   KC, [0.5, 1.5, 2.5, 0.5, 1.5, 2.5]: [0.5, 1.5, 2.5, 0.5, 1.5, 2.5]
#   KC, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]: [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
#   SKC, the four largest of 20, [10.0, -8.0, 6.5, 4.5]: [10.0, -8.0, 6.5, 4.5]
#   SKC, the four largest of 20, [10.0, -8.0, 6.0, 4.0]: [10.0, -8.0, 6.0, 10.0]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check openfl==1.9 numpy==2.2.6 scikit-learn==1.9.1
cat >"$folder/program.py" <<'PYTHON'
import warnings

import numpy as np
from openfl.pipelines.kc_pipeline import KCPipeline
from openfl.pipelines.skc_pipeline import SKCPipeline
from openfl.pipelines.stc_pipeline import STCPipeline

warnings.simplefilter("ignore")  # fewer values than clusters


def back(pipeline, values):
    data, steps = pipeline.forward(np.array(values, dtype=np.float32))
    return pipeline.backward(data, steps)


update = np.random.default_rng(0).normal(size=1000).astype(np.float32)
largest = np.sort(np.abs(update))[::-1]
for share in (1, 0.5, 0.1, 0.01):
    arrived = back(STCPipeline(p_sparsity=share), update)
    number = round(1000 * share)
    assert np.count_nonzero(arrived) == number
    print(f"STC, p_sparsity {share}: {np.abs(arrived).max() / largest[:number].mean():.2f}")
for values in ([0.5, 1.5, 2.5] * 2, [1.0, 2.0, 3.0] * 2):
    print(f"KC, {values}: {np.round(back(KCPipeline(n_clusters=6), values), 3).tolist()}")
for values in ([10.0, -8.0, 6.5, 4.5], [10.0, -8.0, 6.0, 4.0]):
    arrived = back(SKCPipeline(p_sparsity=0.2, n_clusters=6), values + [0.25] * 16)
    print(f"SKC, the four largest of 20, {values}: {np.round(arrived[:4], 3).tolist()}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
