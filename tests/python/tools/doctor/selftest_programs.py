"""Ranks that the self-test must find fault with; TELEGRAD_TEST_HOW says which."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from telegrad import Communicator, SparseVector
from telegrad.launch import join
from telegrad.tools.doctor import selftest

call_differently = selftest.call_differently
HOW = os.environ.get("TELEGRAD_TEST_HOW", "")


def collectives(interface: str) -> None:
    match HOW:
        case "one rank computes wrongly":
            _spoil_dense()
        case "one rank loses an entry":
            _spoil_sparse()
        case "a rank dies":
            if os.environ["TELEGRAD_RANK"] == "1":
                sys.exit("rank 1 does not feel well")
        case "the ranks hang":
            time.sleep(60)
        case "nonsense":
            print("{this is no JSON", flush=True)
            print(json.dumps(["nor an object"]), flush=True)
    selftest.collectives(interface)


def _spoil_dense() -> None:
    honest = Communicator.all_reduce

    def wrong(self: Communicator, x: object, *arguments: object, **options: object) -> object:
        result = honest(self, x, *arguments, **options)  # type: ignore[arg-type]
        if isinstance(x, np.ndarray) and not options.get("async_op") and x.size == 1000 and self.rank == 1:
            x[17] += 1
        return result

    Communicator.all_reduce = wrong  # type: ignore[method-assign,assignment]


def _spoil_sparse() -> None:
    honest = Communicator.all_reduce_into

    def wrong(self: Communicator, stream: SparseVector, out: object, *arguments: object, **options: object) -> object:
        if self.rank == 0:
            stream = SparseVector(stream.raw_indices[1:], stream.raw_values[1:], stream.n)
        return honest(self, stream, out, *arguments, **options)  # type: ignore[arg-type]

    Communicator.all_reduce_into = wrong  # type: ignore[method-assign,assignment]


def reduce_for_ever(interface: str) -> None:
    """A survivor that blames the wrong rank, or hears nothing."""
    if HOW != "the survivors lie":
        return selftest.reduce_for_ever(interface)
    communicator = join(interface=interface or None)
    print(json.dumps({"ready": True}), flush=True)
    if communicator.rank == 1:
        time.sleep(60)
    try:
        communicator.barrier()
    except Exception:
        print(json.dumps({"error": "PeerFailed", "peer": 0, "text": "it was me"}), flush=True)
    communicator.close()
    return None
