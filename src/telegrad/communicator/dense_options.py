"""Options of operations that dense tensors have not: refused where they are given, since they would do nothing."""

from __future__ import annotations

from typing import Any

from telegrad.communicator.arguments import checked_factor, checked_slices
from telegrad.communicator.encoded import checked_seed

_NOT_FOR_DENSE = "is for sparse streams: leave it out for a dense x"


def check_dense_options(
    *, seed: Any, rounds: bool | None = None, switch_factor: Any = None, slices: Any = "equal"
) -> None:
    """Raises ``TypeError`` or ``ValueError`` for one that is wrong, or is not its default. ``rounds``: whether a
    ``wire`` is named, which a ``seed`` is for; ``None``: the operation has none for dense tensors."""
    if switch_factor is None and type(slices) is str and type(seed) is int and slices == "equal" and seed == 0:
        return  # as nearly all calls, for less than a look at each
    factor = 1.0 if switch_factor is None else checked_factor(switch_factor)
    if factor != 1.0:
        raise ValueError(f"switch_factor={factor} {_NOT_FOR_DENSE}")
    if checked_slices(slices) != "equal":
        raise ValueError(f"slices={slices!r} {_NOT_FOR_DENSE}")
    number = checked_seed(seed)
    if number and rounds is None:
        raise ValueError(f"seed={number} {_NOT_FOR_DENSE}")
    if number and not rounds:
        raise ValueError(f"seed={number} is for wire=, which may round at random: name a wire, or leave seed out")
