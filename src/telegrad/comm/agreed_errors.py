"""Errors that every rank raises, because all have heard of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from telegrad.errors import TransportError

if TYPE_CHECKING:
    from telegrad.comm import Communicator


@contextlib.contextmanager
def raised_by_all(comm: Communicator | None) -> Iterator[None]:
    """In it all ranks of ``comm`` raise something, or none does: it holds what follows from what all have heard, and
    nothing that can go wrong on one of them alone. An error leaves once every rank is about to raise: who leaves a
    ``with comm:`` block with one ends what slower ranks are still doing, also what would tell them of it."""
    try:
        yield
    except TransportError:
        raise
    except Exception:
        if comm is not None:
            with contextlib.suppress(TransportError):
                comm.barrier()
        raise


@contextlib.contextmanager
def own_error_first(error: Exception | None) -> Iterator[None]:
    """In it the others hear of ``error``, which this rank is going to raise. It raises it too where they cannot."""
    try:
        yield
    except TransportError as failure:
        if error is not None:
            raise error from failure
        raise
