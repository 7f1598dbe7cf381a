#!/usr/bin/env bash
# grain 0.2.18, Python 3.11: a DataLoader for each of three shards, and random transformations on shards.
#
# Behaviour: by ShardOptions(drop_remainder=False) the first shards take the remainder, one row each. But an IndexSampler with
# one epoch gives every shard as many examples as the smallest has: of 11 rows on 3 shards, which are split 4, 4, 3, each yields 3, and
# two rows are never read, without the warning that drop_remainder=True prints. And random_map after the split draws the
# same numbers at the same places of all shards, as a place is counted within its shard: data-parallel ranks augment
# their rows alike. Before the split, each row has numbers of its own.
#
# Seen:
#   drop_remainder=True: [[0, 1, 2], [3, 4, 5], [6, 7, 8]], never read [9, 10]
#   drop_remainder=False: [[0, 1, 2], [4, 5, 6], [8, 9, 10]], never read [3, 7]
#   random_map before the split: shards draw other numbers
#   random_map after the split: shards draw the same numbers
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check grain==0.2.18 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import grain


class Rows:
    def __len__(self):
        return 11

    def __getitem__(self, place):
        return place


def read(shard, drop):
    shards = grain.sharding.ShardOptions(shard, 3, drop_remainder=drop)
    sampler = grain.samplers.IndexSampler(11, shard_options=shards, num_epochs=1, seed=0)
    return [int(row) for row in grain.DataLoader(data_source=Rows(), sampler=sampler, worker_count=0)]


def drawn(shard, before):
    rows = grain.MapDataset.range(8).seed(7)
    draw = lambda row, random: int(random.integers(1000))
    parts = rows.random_map(draw)[shard::2] if before else rows[shard::2].random_map(draw)
    return [parts[place] for place in range(4)]


for drop in (True, False):
    got = [read(shard, drop) for shard in range(3)]
    print(f"drop_remainder={drop}: {got}, never read {sorted(set(range(11)) - set(sum(got, [])))}")
for when in ("before", "after"):
    first, second = (drawn(shard, when == "before") for shard in range(2))
    print(f"random_map {when} the split: shards draw {'the same' if first == second else 'other'} numbers")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
