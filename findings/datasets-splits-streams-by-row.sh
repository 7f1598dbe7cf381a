#!/usr/bin/env bash
# datasets 5.2.0, Python 3.11: split_dataset_by_node of iterable datasets for two ranks.
#
# Behaviour: where the number of shards is no multiple of the ranks, each rank takes every second row of the whole
# pipeline, whatever stands before or after the split; else each takes its shards, and the pipeline runs on those. So the
# same program means two things. (1) split(...).take(4) gives 4 rows to each rank, or 4 to both together. (2) take(4) before
# the split gives other rows than one process has. (3) Two sources that alternate (interleave_datasets), over 3 shards:
# rank 0 sees the first source alone, rank 1 the second. (4) A shuffle without a seed is drawn anew in each rank, though
# each takes every second row of it: some rows are read twice, others not at all. Nothing warns.
#
# Seen (24 rows, ranks 0 and 1):
#   4 shards, split, then take(4): [[0, 1, 2, 3], [6, 7, 8, 9]]
#   4 shards, take(4), then split: [[0, 1], [6, 7]]
#   4 shards, two sources in turn: rank 0 sees both, rank 1 sees both
#   3 shards, split, then take(4): [[0, 2], [1, 3]]
#   3 shards, take(4), then split: [[0, 2], [1, 3]]
#   3 shards, two sources in turn: rank 0 sees first, rank 1 sees second
#   shuffle without a seed: all rows once in 0 of 5 epochs
#   shuffle with a seed: all rows once: True
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check datasets==5.2.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node


def rows(start, shards):
    return Dataset.from_dict({"row": list(range(start, start + 24))}).to_iterable_dataset(num_shards=shards)


def on_two_ranks(dataset, after=lambda part: part):
    parts = (after(split_dataset_by_node(dataset(), rank, 2)) for rank in range(2))
    return [[one["row"] for one in part] for part in parts]


for shards in (4, 3):
    print(f"{shards} shards, split, then take(4): {on_two_ranks(lambda: rows(0, shards), lambda part: part.take(4))}")
    print(f"{shards} shards, take(4), then split: {on_two_ranks(lambda: rows(0, shards).take(4))}")
    mixed = on_two_ranks(lambda: interleave_datasets([rows(0, shards), rows(100, shards)]))
    said = ["both" if min(part) < 100 <= max(part) else "second" if min(part) >= 100 else "first" for part in mixed]
    print(f"{shards} shards, two sources in turn: rank 0 sees {said[0]}, rank 1 sees {said[1]}")
read = [sorted(sum(on_two_ranks(lambda: rows(0, 3).shuffle(buffer_size=24)), [])) for _ in range(5)]
print(f"shuffle without a seed: all rows once in {sum(one == list(range(24)) for one in read)} of 5 epochs")
read = sorted(sum(on_two_ranks(lambda: rows(0, 3).shuffle(seed=1, buffer_size=24)), []))
print(f"shuffle with a seed: all rows once: {read == list(range(24))}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
