"""Selection policies by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from telegrad.compress.arguments import checked_whole
from telegrad.compress.baselines import BucketTopK, GaussianThreshold, RandomK
from telegrad.compress.selection import (
    ExactTopK,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
)

SELECTIONS: Mapping[str, type[Selection]] = {
    "reused": ReusedThreshold,
    "topk": ExactTopK,
    "trimmed": TrimmedTopK,
    "search": ThresholdSearch,
    "sampled": SampledThreshold,
    "buckets": BucketTopK,
    "gaussian": GaussianThreshold,
    "random": RandomK,
}
"""What ``select=`` can be. What each promises is in its docstring and in docs/reference/selection.md."""


def selection_named(
    name: str, interval: int | None = None, *, same_sign: bool = False, argument: str = "selection"
) -> Selection:
    """The policy of that name. ``interval``: for those that reuse a threshold, others have none; ``None``: their own.

    ``argument``: what the caller's one is called. ``same_sign``: entries of one sign at a time. Raises ``ValueError``
    and ``TypeError`` for what does not exist.
    """
    if name not in SELECTIONS:
        raise ValueError(f"{argument}={name!r} does not exist: use one of {', '.join(SELECTIONS)}")
    policy = SELECTIONS[name]
    options: dict[str, object] = {}
    if interval is not None:  # checked in any case
        interval = checked_whole(interval, "interval", 1, None, "calls from one exact threshold to the next")
        if _has(policy, "interval"):
            options["interval"] = interval
    if same_sign:
        if not _has(policy, "same_sign"):
            able = ", ".join(other for other in SELECTIONS if _has(SELECTIONS[other], "same_sign"))
            raise ValueError(f"same_sign=True does not fit {argument}={name!r}: use one of {able}, or leave it out")
        options["same_sign"] = True
    return policy(**options)


def reuses(selection: object) -> bool:
    """Whether it is the name of one that takes an ``interval``."""
    return isinstance(selection, str) and _has(SELECTIONS[selection], "interval")


def _has(policy: type[Selection], option: str) -> bool:
    return option in {field.name for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
