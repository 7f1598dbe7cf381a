#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, two ranks over Gloo; the same with 2.15.0: collectives of a view with gaps, as x[::2] or a
# column of a matrix.
#
# Behaviour: all_reduce, broadcast, reduce and scatter take the memory behind the view's first element for the view, as if
# there were no gaps. So of three entries of x[::2] the last one is not summed, and the entry between the first two, which
# is in no view, is. No error, no warning. all_gather, all_gather_into_tensor and all_reduce_coalesced heed the gaps, and
# all_to_all_single and send refuse them. Whoever reduces one column of a table of metrics gets other numbers on each rank.
#
# Seen (rank 0 has 0 to 5 and rank 1 10 to 15; each gives the entries 0, 2 and 4; what both have afterwards):
#   all_reduce: [10, 12, 14, 3, 4, 5] and [10, 12, 14, 13, 14, 15]
#   all_reduce of a column: [10, 12, 14, 3, 4, 5] and [10, 12, 14, 13, 14, 15]
#   broadcast: [0, 1, 2, 3, 4, 5] and [0, 1, 2, 13, 14, 15]
#   reduce to rank 0: [10, 12, 14, 3, 4, 5]
#   scatter of 7s and 8s: [7, 7, 7, 3, 4, 5] and [8, 8, 8, 13, 14, 15]
#   all_reduce_coalesced: [10, 1, 14, 3, 18, 5] and [10, 11, 14, 13, 18, 15]
#   all_gather of it: [0, 2, 4, 10, 12, 14] and [0, 2, 4, 10, 12, 14]
#   all_to_all_single: ValueError and ValueError
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def scatter(x):
    parts = [torch.full((3,), 7.0), torch.full((3,), 8.0)]
    dist.scatter(x[::2], parts if dist.get_rank() == 0 else None, 0)


CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x[::2]),
    "all_reduce of a column": lambda x: dist.all_reduce(x.view(3, 2)[:, 0]),
    "broadcast": lambda x: dist.broadcast(x[::2], 0),
    "reduce to rank 0": lambda x: dist.reduce(x[::2], 0),
    "scatter of 7s and 8s": scatter,
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x[::2]]),
    "all_gather of it": lambda x: dist.all_gather([x[:3], x[3:]], x.clone()[::2]),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.zeros(3), x[::2], [2, 1], [2, 1]),
}


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, call in CALLS.items():
        values = torch.arange(6.0) + 10 * rank
        try:
            call(values)
            found = str([int(value) for value in values])
        except (RuntimeError, ValueError) as error:
            found = type(error).__name__
        everyone = [None, None]
        dist.all_gather_object(everyone, found)
        if rank == 0:
            print(f"{name}: {everyone[0] if name.startswith('reduce') else ' and '.join(everyone)}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # how Gloo is torn down is not the subject


if __name__ == "__main__":
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
