"""A rank that forks a child, which tries to join in its place. Prints what the child hears."""

from __future__ import annotations

import os
import sys

import numpy as np

import telegrad
from telegrad.launch import joining

how, place = sys.argv[1:]
comm = joining.join(timeout_s=30.0) if how == "launcher" else telegrad.Communicator.from_torch(timeout_s=30.0)
if place == "closed":
    comm.close()
child = os.fork()
if child == 0:
    try:
        if how == "launcher":
            joining.join(timeout_s=30.0)
        else:
            telegrad.Communicator.from_torch(timeout_s=30.0, join_timeout_s=60.0)
    except telegrad.RendezvousError as error:
        print(f"child: {error}", flush=True)
    except Exception as error:
        print(f"not as documented: {type(error).__name__}: {error}", flush=True)
    os._exit(0)
os.waitpid(child, 0)
if place == "open":
    x = np.ones(10, np.float32)
    comm.all_reduce(x)
    print(f"parent: {x.sum():g}", flush=True)
    comm.close()
