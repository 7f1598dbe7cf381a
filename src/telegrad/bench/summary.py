"""What the rows of one network say in a few numbers: is the automatic choice as fast as the better peer, as the best of
our own, and as the link allows?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from telegrad.bench.peers import PEERS
from telegrad.bench.plan import is_alternative, is_slower

Row = Mapping[str, Any]

PEER_SHARE, BEST_SHARE, SLACK_S = 0.10, 0.05, 2e-6
"""Slower than the better peer, or than our best algorithm, is what is so by more than this share and this time."""

_COMPARED_BYTES = 16 << 20
_BOUND_BYTES = 4 << 20


@dataclass(frozen=True)
class Worst:
    """The row in which ``auto`` takes the most times as long as ``other`` does."""

    bytes: int
    other: str
    ratio: float


@dataclass
class Summary:
    """``compared`` rows of ``auto`` have a peer, in ``as_fast`` it is no slower than the better one; ``chosen`` have
    another algorithm of ours beside them, in ``well_chosen`` it is no slower than the best of these. ``twice`` have the
    algorithm that was chosen beside them under its own name: the same calls, which in ``unlike`` of them take longer by
    as much, the one or the other: the scatter that no choice can be judged below.
    ``ratios_at_16mib``: to each peer. ``bound_shares``: bound over median by bytes, from 4 MiB up."""

    network: str
    ranks: int
    compared: int = 0
    as_fast: int = 0
    worst: Worst | None = None
    chosen: int = 0
    well_chosen: int = 0
    worst_choice: Worst | None = None
    twice: int = 0
    unlike: int = 0
    most_unlike: Worst | None = None
    ratios_at_16mib: dict[str, float] = field(default_factory=dict)
    bound_shares: dict[int, float] = field(default_factory=dict)


def summary_of(rows: Sequence[Row]) -> Summary:
    """``rows``: those of one network and number of ranks, at least one."""
    found = Summary(rows[0]["network"], rows[0]["ranks"])
    for auto in (row for row in rows if row["algorithm"] == "auto"):
        size, median_s = auto["bytes"], auto["median_s"]
        peers = {peer: auto[f"{peer}_median_s"] for peer in PEERS if auto[f"{peer}_median_s"] is not None}
        own = {
            row["algorithm"]: row["median_s"]
            for row in rows
            if row["bytes"] == size and is_alternative(row["algorithm"])
        }
        if peers:
            best = min(peers, key=peers.__getitem__)
            found.compared += 1
            found.as_fast += not is_slower(median_s, peers[best], share=PEER_SHARE, slack_s=SLACK_S)
            found.worst = _worse(found.worst, Worst(size, best, median_s / peers[best]))
        if own:
            best = min(own, key=own.__getitem__)
            found.chosen += 1
            found.well_chosen += not is_slower(median_s, own[best], share=BEST_SHARE, slack_s=SLACK_S)
            found.worst_choice = _worse(found.worst_choice, Worst(size, best, median_s / own[best]))
        if auto["chosen"] in own:
            same_s = own[auto["chosen"]]
            longer_s, shorter_s = max(median_s, same_s), min(median_s, same_s)
            found.twice += 1
            found.unlike += is_slower(longer_s, shorter_s, share=BEST_SHARE, slack_s=SLACK_S)
            found.most_unlike = _worse(found.most_unlike, Worst(size, auto["chosen"], longer_s / shorter_s))
        if size == _COMPARED_BYTES:
            found.ratios_at_16mib = {peer: median_s / seconds for peer, seconds in peers.items()}
        if auto["bound_s"] is not None and size >= _BOUND_BYTES:
            found.bound_shares[size] = auto["bound_s"] / median_s
    return found


def _worse(one: Worst | None, other: Worst) -> Worst:
    return other if one is None or other.ratio > one.ratio else one
