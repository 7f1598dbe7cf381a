#!/bin/sh
# scikit-learn 1.9.1: load_svmlight_file ignores the comment in which dump_svmlight_file says how it numbered the columns.
#
# dump_svmlight_file(X, y, path, comment="...") numbers columns from 0 and writes "# Column indices are zero-based" above
# the rows. load_svmlight_file(path), by default zero_based="auto", does not read that line: where column 0 holds no
# entry, it takes the file for one-based and shifts every column. For load_digits(), whose first pixel is always 0, the
# round trip loses a column, and all others are moved, without a warning.
# Further: two files loaded one by one may be shifted differently (load_svmlight_files decides once for all of its
# files), and offset= or length= turn "auto" into zero_based=True, so that a part of a one-based file has other columns
# than the whole file.
#
# Output seen (2026-11-28, Python 3.11):
#   second line of the file: # Column indices are zero-based
#   written (1797, 64), read (1797, 63), equal after a shift by one: True
#   training and test file read together (20, 5) (20, 5) test file alone (20, 4)
#   first row of a one-based file [1. 2. 3. 0.] of its first half by length= [0. 1. 2. 3.]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q scikit-learn==1.9.1
"$folder/venv/bin/python" - "$folder" <<'END'
import os
import sys

import numpy as np
from sklearn.datasets import dump_svmlight_file, load_digits, load_svmlight_file, load_svmlight_files

path = sys.argv[1] + "/digits.svm"
digits = load_digits()
dump_svmlight_file(digits.data, digits.target, path, comment="any")
with open(path) as file:
    line = file.read().splitlines()[1]
read = load_svmlight_file(path)[0]
shifted = np.array_equal(read.toarray(), digits.data[:, 1:])
print("second line of the file:", line)
print(f"written {digits.data.shape}, read {read.shape}, equal after a shift by one: {shifted}")

train, test = path + ".train", path + ".test"
rows = np.random.default_rng(0).random((20, 5))
dump_svmlight_file(rows, np.ones(20), train)
rows[:, 0] = 0
dump_svmlight_file(rows, np.ones(20), test)
first, _, together, _ = load_svmlight_files([train, test])
alone = load_svmlight_file(test)[0]
print("training and test file read together", first.shape, together.shape, "test file alone", alone.shape)

rows = np.tile([1.0, 2.0, 3.0], (20, 1))
dump_svmlight_file(rows, np.ones(20), train, zero_based=False)
whole = load_svmlight_file(train, n_features=4)[0].toarray()[0]
half = load_svmlight_file(train, n_features=4, offset=0, length=os.path.getsize(train) // 2)[0].toarray()[0]
print("first row of a one-based file", whole, "of its first half by length=", half)
ok = line == "# Column indices are zero-based" and shifted and alone.shape[1] == 4 and together.shape[1] == 5
sys.exit(not (ok and whole[0] == 1 and half[0] == 0))
END
