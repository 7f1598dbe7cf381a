"""What can go wrong in the world: a peer, the network, a gradient. And the class of warnings about choices.

Misuse of the library is a plain ``ValueError`` or ``TypeError``, raised before anything is sent. This module imports
nothing: the core raises these classes too.
"""

from __future__ import annotations

from typing import Any


class TransportError(Exception):
    """The network or a peer failed; the communicator can only be closed afterwards.

    ``rank`` reports; ``peer`` is the culprit, the same on all survivors (``None`` if unknown), and ``host`` the name of
    its machine; ``operation`` is the operation that was running and ``tag`` its sequence number on this communicator
    (of a send or recv the message's tag). Of a communicator that ``split()`` made, or that has some of a job's ranks
    (``from_torch(group)``, ``new_group`` of the backend ``telegrad``), ``group`` is its name, and ``parent_rank`` and
    ``parent_peer`` are ``rank`` and ``peer`` as the communicator that it was split from, or the job, numbers them;
    ``None`` of others.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        peer: int | None = None,
        host: str | None = None,
        operation: str | None = None,
        tag: int | None = None,
        group: str | None = None,
        parent_rank: int | None = None,
        parent_peer: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.host = host
        self.operation = operation
        self.tag = tag
        self.group = group
        self.parent_rank = parent_rank
        self.parent_peer = parent_peer

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.rank, self.peer, self.host, self.operation, self.tag)
        return type(self), (self.args[0], *facts, self.group, self.parent_rank, self.parent_peer)


class PeerFailed(TransportError):  # noqa: N818 - named by what happened
    """A peer died, left or aborted."""


class TimeoutExpired(TransportError):  # noqa: N818
    """Something did not happen in time."""


class MismatchedCall(TransportError):  # noqa: N818
    """Ranks called different operations, or the same one with different counts, types or options."""


class RendezvousError(TransportError):
    """The job's processes did not find each other."""


class NonFiniteGradient(ValueError):  # noqa: N818
    """A gradient holds NaN or infinity, or made its residual overflow. ``rank`` and ``parameter`` say whose."""

    def __init__(self, message: str, rank: int | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.rank, self.parameter)


class ChoiceWarning(UserWarning):
    """A choice works, but trains worse than it needs to, or sends more: the text says what to do. Once in a process, on
    rank 0. docs/how-to/choose-what-is-sent.md lists them; ``TELEGRAD_WARN=0`` silences all of them."""
