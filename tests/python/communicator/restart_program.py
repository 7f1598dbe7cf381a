"""A rank of torchrun. In its first attempt rank 1 dies once all have joined twice; in the next one all go through."""

from __future__ import annotations

import os
import sys

import numpy as np

import telegrad.torch_backend

if len(sys.argv) > 1:
    import torch.distributed as dist

    dist.init_process_group(sys.argv[1])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for turn in range(2):
    with telegrad.Communicator.from_torch(timeout_s=30.0, join_timeout_s=60.0) as comm:
        x = np.full(3, comm.rank + 1.0)
        comm.all_reduce(x)
        assert x.tolist() == [3.0] * 3
        if attempt == 0 and turn == 1 and comm.rank == 1:
            os._exit(5)
        comm.barrier()
sys.stdout.write(f"attempt {attempt}: rank {comm.rank} is through\n")  # a line in one piece
