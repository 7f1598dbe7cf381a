"""A rank of torchrun that sums on two levels; rank 0 writes what it found as JSON into the file that is named."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import telegrad

SIZE = int(sys.argv[2])
TURNS = 5

comm = telegrad.Communicator.from_torch(timeout_s=60.0)
total = comm.world_size * (comm.world_size + 1) // 2


def timed_s(call: Any) -> float:
    took = []
    for _ in range(TURNS):
        comm.barrier()
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


x = torch.full((SIZE,), float(comm.rank + 1))
for algorithm in ("two_level", "ring", "auto"):
    mine = x.clone()
    comm.all_reduce(mine, algorithm=algorithm)
    assert bool((mine == total).all()), algorithm
stream = telegrad.SparseVector.from_dense(torch.where(torch.arange(SIZE) % 8 == comm.rank, x, torch.zeros(())))
sparse_sum = comm.all_reduce(stream, algorithm="two_level").to_dense()
for rank in range(8):
    assert bool((sparse_sum[rank::8] == (rank + 1 if rank < comm.world_size else 0)).all())
times_s = {name: timed_s(lambda name=name: comm.all_reduce(x, algorithm=name)) for name in ("two_level", "ring")}
if comm.rank == 0:
    chosen = str(comm._usable().choose_allreduce(4 * SIZE))
    Path(sys.argv[1]).write_text(json.dumps({"nodes": comm.nodes, "chosen": chosen, "times_s": times_s}))
comm.close()
