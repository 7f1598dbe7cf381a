"""Messages between two ranks that keep somebody waiting, as the reports tell of them."""

from __future__ import annotations

from collections.abc import Sequence

from telegrad.report.hang_files import Message
from telegrad.report.hang_graph import ends_of
from telegrad.report.hang_lanes import Lane


def open_messages(lanes: Sequence[Lane]) -> dict[int, list[Message]]:
    """By rank: the sends and receives that are not over, oldest first; ranks without any are left out."""
    return {lane.rank: list(lane.report.messages) for lane in lanes if lane.report is not None and lane.report.messages}


def ends_of_messages(waiting: dict[int, list[Message]], size: int) -> tuple[list[int], list[list[int]]]:
    """Whom it comes down to: the ranks that others wait for and that wait for nobody, and the circles. Who takes
    anybody's message waits for all."""

    def peers(rank: int, messages: list[Message]) -> list[int]:
        if any(message.peer is None for message in messages):
            return [peer for peer in range(size) if peer != rank]
        return sorted({message.peer for message in messages if message.peer is not None})

    return ends_of({rank: peers(rank, messages) for rank, messages in waiting.items()})


def told_message(rank: int, message: Message) -> str:
    """``rank 0 waits in recv(…) for rank 1, which has not sent it``."""
    missing = "sent" if message.operation == "recv" else "received"
    why = "any rank, none of which has" if message.peer is None else f"rank {message.peer}, which has not"
    return f"rank {rank} waits in {message.call} for {why} {missing} it"
