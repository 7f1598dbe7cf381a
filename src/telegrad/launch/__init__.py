"""Starts the ranks of a job on this machine, without torch: for tests, benchmarks and the demo.

``with Ranks("module:function", 4, timeout_s=60) as ranks: ranks.wait()`` starts four processes; each calls
``telegrad.launch.join()`` for its communicator.
"""

from telegrad.launch.joining import join, rank_and_size
from telegrad.launch.ranks import SINGLE_THREADED, LaunchError, RankExit, RankFailed, Ranks, RanksTimedOut

__all__ = [
    "SINGLE_THREADED",
    "LaunchError",
    "RankExit",
    "RankFailed",
    "Ranks",
    "RanksTimedOut",
    "join",
    "rank_and_size",
]
