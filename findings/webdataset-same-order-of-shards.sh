#!/usr/bin/env bash
# webdataset 1.0.2 with torch 2.13.0, CPU, Python 3.11: WebDataset(shardshuffle=...) of 12 shards on two ranks, three epochs.
#
# Behaviour: every epoch has the same order of shards, though no seed was given. One is drawn when the dataset is made, and
# each epoch begins with it again. split_by_node comes before the shuffle, so that each rank has the same half of the
# shards for ever as well: no row ever meets one of the other half. detshuffle=True counts epochs, but in a DataLoader's
# workers the count is lost: they are made anew for each epoch, unless persistent_workers=True. It is known there
# (pull request 502), and in no release.
#
# Seen (different orders of a rank's shards in three epochs; and how many shards a rank has seen after them):
#   shardshuffle: 1 order, 6 of 12 shards
#   shardshuffle, 1 worker: 1 order, 6 of 12 shards
#   detshuffle: 3 orders, 6 of 12 shards
#   detshuffle, 1 worker: 1 order, 6 of 12 shards
#   detshuffle, 1 persistent worker: 3 orders, 6 of 12 shards
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check webdataset==1.0.2 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import torch
import webdataset

SHARDS = [f"{sys.argv[1]}/{number:02d}.tar" for number in range(12)]
for number, path in enumerate(SHARDS):
    with webdataset.TarWriter(path) as shard:
        shard.write({"__key__": f"{number:02d}", "txt": str(number)})
for text, deterministic, loading in (
    ("shardshuffle", False, None),
    ("shardshuffle, 1 worker", False, {"num_workers": 1}),
    ("detshuffle", True, None),
    ("detshuffle, 1 worker", True, {"num_workers": 1}),
    ("detshuffle, 1 persistent worker", True, {"num_workers": 1, "persistent_workers": True}),
):
    found = []
    for rank in ("0", "1"):
        os.environ.update(RANK=rank, WORLD_SIZE="2")
        seed = 1 if deterministic else None
        rows = webdataset.WebDataset(
            SHARDS, shardshuffle=100, detshuffle=deterministic, seed=seed, nodesplitter=webdataset.split_by_node
        )
        rows = rows.map(lambda row: row["__key__"])
        if loading:
            rows = torch.utils.data.DataLoader(rows, batch_size=None, **loading)
        epochs = [tuple(rows) for _ in range(3)]
        found.append((len(set(epochs)), len({key for epoch in epochs for key in epoch})))
    assert found[0] == found[1], found
    orders, seen = found[0]
    print(f"{text}: {orders} order{'s' * (orders > 1)}, {seen} of 12 shards")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
