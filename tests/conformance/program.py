"""Runs the cases on the ranks that this process has, and says what came out."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TypedDict

import numpy as np
from cases import Oracle, Started, groups, numbers_of
from cases_moves import DIFFERS_BY_RANK

from telegrad import Communicator
from telegrad.launch import join


class Outcome(TypedDict):
    """Of one case on one rank."""

    rank: int
    group: int
    case: int
    digest: int  # of the result's bits, to be compared across ranks
    fault: str
    began_s: float
    ended_s: float


def run(communicators: Sequence[Communicator], *, one_in: int = 1) -> Iterator[Outcome]:
    """All ranks of the job in one process, or the one rank that this process is. ``one_in``: of so many groups of a
    family, one."""
    size, size_here = communicators[0].world_size, len(communicators)
    oracle = Oracle(size)
    asked = groups(size)
    for number in numbers_of(asked, one_in):
        group = asked[number]
        if group.staggered and len(communicators) == 1:
            time.sleep(0.002 * (communicators[0].rank * 5 % size))
        random = np.random.default_rng(number)
        begun = {}
        for at in random.permutation(len(communicators)):
            began_s = time.monotonic()
            begun[communicators[at].rank] = (
                began_s,
                [Started(case, communicators[at], alone=size_here == 1) for case in group.cases],
            )
        for rank, (began_s, started) in begun.items():
            order = list(range(len(started)))
            if group.staggered:
                np.random.default_rng([number, rank]).shuffle(order)
            for index in order:
                bits = started[index].outcome()
                ended_s = time.monotonic()
                case = group.cases[index]
                # Where all ranks must hold the same bits, which their digests show, one of them is judged.
                judged = case.operation in DIFFERS_BY_RANK or rank == (number + index) % size
                fault = oracle.fault(case, bits, rank) if judged else ""
                digest = zlib.crc32(np.ascontiguousarray(bits).tobytes())
                yield {
                    "rank": rank,
                    "group": number,
                    "case": index,
                    "digest": digest,
                    "fault": fault,
                    "began_s": began_s,
                    "ended_s": ended_s,
                }


def main(one_in: str) -> None:
    """One rank among processes; prints a line of JSON for each outcome."""
    with join(timeout_s=60.0) as communicator:
        for outcome in run([communicator], one_in=int(one_in)):
            print(json.dumps(outcome))
