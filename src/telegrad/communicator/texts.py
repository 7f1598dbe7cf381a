"""Texts of all ranks, on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from telegrad.communicator import Communicator
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


def all_gather_text(comm: Communicator, own: str) -> list[str]:
    """By rank; they may differ in length. What UTF-8 cannot have (file names may) becomes its number. Called on all
    ranks."""
    text = np.frombuffer(own.encode(errors="backslashreplace"), np.uint8)
    lengths = comm.all_gather(np.array([text.size], np.int64)).ravel().tolist()
    texts = comm.all_gather(text, counts=lengths)
    ends = np.cumsum(lengths)
    return [bytes(texts[end - length : end]).decode() for end, length in zip(ends, lengths, strict=True)]
