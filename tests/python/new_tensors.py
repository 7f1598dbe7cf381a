"""What tensors hold of which nobody has said it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def garbage_in_new_tensors() -> Iterator[None]:
    """``torch.empty`` and what else makes tensors without values gives NaN, and the largest integers.

    Memory of a GPU is used again, and holds what others have left; the host's mostly is fresh, and 0, so that what
    relies on zeros passes there.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
