"""The lines below the table of ``telegrad bench allreduce``."""

from __future__ import annotations

from telegrad.bench.networks import payload_bytes_per_s, rate_bytes_per_s
from telegrad.bench.peers import PEERS, title_of
from telegrad.bench.plan import text_of
from telegrad.bench.summary import BEST_SHARE, PEER_SHARE, SLACK_S, Summary, Worst


def lines_of(summary: Summary) -> list[str]:
    """What ``summary`` says, a sentence per line; nothing about what was not measured."""
    slack = f"{SLACK_S * 1e6:g} µs"
    lines = []
    if summary.worst is not None:
        lines.append(
            f"auto within {PEER_SHARE:.0%} or {slack} of the better peer: {summary.as_fast} of {summary.compared} "
            f"rows; worst {_text_of(summary.worst)}"
        )
    if summary.ratios_at_16mib:
        times = (f"{1 / ratio:.2f}x as fast as {title_of(peer)}" for peer, ratio in summary.ratios_at_16mib.items())
        lines.append(f"auto at 16 MiB: {', '.join(times)}")
    if summary.worst_choice is not None:
        lines.append(
            f"auto within {BEST_SHARE:.0%} or {slack} of our best algorithm: {summary.well_chosen} of {summary.chosen} "
            f"rows; worst {_text_of(summary.worst_choice)}"
        )
    if summary.most_unlike is not None:
        so = ": so two measurements of one thing differ" if summary.unlike else ""
        lines.append(
            f"the algorithm that auto chose, under its own name: apart by more than that in {summary.unlike} of "
            f"{summary.twice} rows, at most {_text_of(summary.most_unlike)}{so}"
        )
    rate, payload = rate_bytes_per_s(summary.network), payload_bytes_per_s(summary.network)
    if summary.bound_shares and rate and payload:
        shares = (
            f"{share:.1%} ({share * payload / rate:.1%} of the line rate) at {text_of(size)}"
            for size, share in summary.bound_shares.items()
        )
        lines.append(f"auto, share of the bound: {', '.join(shares)}")
    return lines


def _text_of(worst: Worst) -> str:
    other = title_of(worst.other) if worst.other in PEERS else worst.other
    return f"{worst.ratio:.2f}x as long as {other} at {text_of(worst.bytes)}"
