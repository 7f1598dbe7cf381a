"""What can go wrong in the world: a peer, the network, a gradient. And the class of warnings about choices.

Misuse of the library is a plain ``ValueError`` or ``TypeError``, raised before anything is sent. This module imports
nothing: the core raises these classes too."""

from __future__ import annotations

from typing import Any


class TransportError(Exception):
    """The network or a peer failed; ``shrink()`` or ``close()`` the communicator then.

    ``rank`` raises the error. ``peer`` is the rank that failed, the same on all survivors, or ``None``; ``host`` is its
    host name. ``operation`` was running, with the number ``tag`` on this communicator (for ``send`` and ``recv`` the
    message's tag). If the communicator has only some ranks of the job, ``group`` is its name. ``parent_rank`` and
    ``parent_peer`` are then ``rank`` and ``peer`` as the parent communicator, or the job, numbers them."""

    _usual_operation: str | None = None

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
        self.operation = operation or self._usual_operation
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

    _usual_operation = "rendezvous"


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
