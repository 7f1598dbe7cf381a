"""What the ranks of test_group_ranks.py do: calls that do not match, in a group of ranks 1 and 3 of four."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import telegrad.torch_backend
from telegrad import Communicator, MismatchedCall

PLACE = "[process group of the job: ranks 0, 1 here are ranks 1, 3 of its parent]"


def _say(of: str, error: Exception) -> None:
    assert isinstance(error, MismatchedCall)
    assert str(error).endswith(PLACE), str(error)
    print(of, error.peer, error.parent_rank, error.parent_peer, flush=True)


def main(store: str, backend: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=4)
    some, all_of_them = dist.new_group([1, 3]), dist.new_group([0, 1, 2, 3])
    x = torch.ones(2 if rank == 3 else 1)
    if rank in (1, 3):
        if backend == telegrad.torch_backend.NAME:
            _say("new_group", _failure(lambda: dist.all_reduce(x, group=some)))
        comm = Communicator.from_torch(some)
        _say("from_torch", _failure(lambda: comm.all_reduce(x)))
        comm.close()
    whole = Communicator.from_torch(all_of_them)
    assert whole.report()["group"] is None
    whole.barrier()
    whole.close()
    dist.destroy_process_group()


def _failure(call: Any) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")
