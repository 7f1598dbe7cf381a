"""Errors of which ranks tell each other before they raise them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from telegrad.errors import TransportError


@contextlib.contextmanager
def own_error_first(error: Exception | None) -> Iterator[None]:
    """In it the others hear of ``error``, which this rank is going to raise. It raises it too where they cannot."""
    try:
        yield
    except TransportError as failure:
        if error is not None:
            raise error from failure
        raise
