"""Checks of what policies are given. Each message names the argument, its value and the remedy."""

from __future__ import annotations

import numbers
import operator

import numpy as np


def checked_whole(value: object, name: str, least: int, most: int | None, meaning: str) -> int:
    """``value`` as an int from ``least`` to ``most`` (``None``: no end); else ``TypeError`` or ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r} must be an int: {meaning}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name}={value} must be at least {least}{upper}: {meaning}")
    return number


def checked_count(value: object, argument: str) -> int:
    """``value``, an int or numpy's, as an int of at least 0; else ``TypeError`` or ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{argument}={value!r} must be an int")
    if value < 0:
        raise ValueError(f"{argument}={value} must not be negative")
    return operator.index(value)


def check_share(value: object, name: str, meaning: str) -> None:
    """Raises ``TypeError`` or ``ValueError`` if ``value`` is no number in (0, 1)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number in (0, 1): {meaning}")
    if not 0 < float(value) < 1:
        raise ValueError(f"{name}={value} must be in (0, 1): {meaning}")


def check_gain(value: object, name: str, meaning: str) -> None:
    """Raises ``TypeError`` or ``ValueError`` if ``value`` is no number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number from 0 to 1: {meaning}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{name}={value} must be from 0 to 1: {meaning}")
