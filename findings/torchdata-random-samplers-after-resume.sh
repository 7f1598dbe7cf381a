#!/usr/bin/env bash
# torchdata 0.11.0 (the newest) with torch 2.13.0, CPU, Python 3.11: StatefulDataLoader, saved after 2 of 6 batches of its second epoch and
# loaded into a new one, as after a restart, with each random sampler of torch.
#
# Behaviour: with shuffle=True the rest of the epoch comes, as it should. A sampler that the caller makes draws anew after the
# restart, and the loader skips as many places of the new order as were read of the old one: rows come twice in an epoch,
# and others never, without a warning. The tutorial of 0.11 says that torch's RandomSampler and BatchSampler are replaced by
# ones that keep their state when torchdata.stateful_dataloader is imported. They are not; those that do are in
# torchdata.stateful_dataloader.sampler. A generator with a fixed seed does not help after the first epoch.
#
# Seen (of 24 rows, how many the interrupted epoch read twice, and never):
#   shuffle=True: twice 0, never 0
#   torch's RandomSampler: twice 6, never 6
#   torch's RandomSampler, a generator with a seed: twice 6, never 6
#   torch's SubsetRandomSampler: twice 4, never 4
#   torch's WeightedRandomSampler, without replacement: twice 6, never 6
#   torch's BatchSampler of RandomSampler: twice 6, never 6
#   torchdata's RandomSampler: twice 0, never 0
#   torchdata's BatchSampler of its RandomSampler: twice 0, never 0
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torchdata==0.11.0 torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader, sampler

ROWS = list(range(24))


def seeded():
    return torch.Generator().manual_seed(5)


CASES = {
    "shuffle=True": lambda: {"shuffle": True},
    "torch's RandomSampler": lambda: {"sampler": RandomSampler(ROWS)},
    "torch's RandomSampler, a generator with a seed": lambda: {"sampler": RandomSampler(ROWS, generator=seeded())},
    "torch's SubsetRandomSampler": lambda: {"sampler": SubsetRandomSampler(ROWS)},
    "torch's WeightedRandomSampler, without replacement": lambda: {
        "sampler": WeightedRandomSampler(torch.ones(24), 24, replacement=False)
    },
    "torch's BatchSampler of RandomSampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(ROWS), 4, False)},
    "torchdata's RandomSampler": lambda: {"sampler": sampler.RandomSampler(ROWS)},
    "torchdata's BatchSampler of its RandomSampler": lambda: {
        "batch_sampler": sampler.BatchSampler(sampler.RandomSampler(ROWS), 4, False)
    },
}


def loader(options):
    return StatefulDataLoader(ROWS, **({} if "batch_sampler" in options else {"batch_size": 4}), **options)


for name, options in CASES.items():
    torch.manual_seed(0)
    first = loader(options())
    assert len(list(first)) == 6  # the first epoch
    batches = iter(first)
    read = [row for _ in range(2) for row in next(batches).tolist()]
    state = first.state_dict()
    torch.manual_seed(1)  # a new process has drawn other numbers by now
    second = loader(options())
    second.load_state_dict(state)
    read += [row for batch in second for row in batch.tolist()]
    assert len(read) == 24
    twice = sum(read.count(row) > 1 for row in ROWS)
    print(f"{name}: twice {twice}, never {len(set(ROWS) - set(read))}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
