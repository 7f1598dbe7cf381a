"""How a time is written: for every table, and for reports of an installation whose compiled core is missing."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """``18.2 µs``, ``5.40 ms``, ``1.2 s``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
