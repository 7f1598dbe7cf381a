"""One rank of Ok-Topk over a network: a call of ``all_reduce_topk`` for each line that it is sent.

``lab.topk.beside`` runs it as a program of two Pythons, whose telegrad may be an older one. So it imports nothing of
the lab, and knows the names of November 2026's versions.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import telegrad
from telegrad.launch import join

_JOIN_TIMEOUT_S = 120.0
_TIMEOUT_S = 300.0


def main(folder: str, name: str, calibration_s: str) -> None:
    """Reads this rank's vectors of all calls from ``folder``, and numbers of calls from the pipe ``name``-rank in it.

    Says that it is ready, then of each call how long it took, the bytes moved, and the sum's checksum."""
    vector = telegrad.SparseVector if hasattr(telegrad, "SparseVector") else telegrad.SparseStream  # before 28 November
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        given = np.load(Path(folder) / f"{communicator.rank}.npz")
        n, k, calls = map(int, given["sizes"])
        vectors = [vector(given[f"indices{call}"], given[f"values{call}"], n) for call in range(calls)]
        state = telegrad.OkTopkState(k)
        telegrad.calibrate(communicator, seconds=float(calibration_s), keep=False)
        _say(ready=True)
        with (Path(folder) / f"{name}-{communicator.rank}").open() as asked:
            for line in asked:
                before = communicator.stats()
                communicator.barrier()
                begin = time.perf_counter()
                done = communicator.all_reduce_topk(vectors[int(line) % calls], state)
                seconds = time.perf_counter() - begin
                after = communicator.stats()
                moved = max(after[what] - before[what] for what in ("bytes_sent", "bytes_received"))
                total = done.sum
                checksum = zlib.crc32(total.values.tobytes(), zlib.crc32(total.indices.tobytes()))
                _say(seconds=seconds, bytes=moved, checksum=checksum, exact=done.report.exact)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
