"""A training step of one rank, without communication: how long its forward pass takes, and its backward pass for each
gradient. Recorded from a model, or computed from an architecture."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

_FORMAT, _VERSION = "telegrad-trace", 1


@dataclass(frozen=True)
class Trace:
    """``names``, ``sizes`` (bytes) and ``backward_times`` (seconds after the gradient before): in backward order, that
    in which gradients come. ``forward_s``: from the start of the step to that of the backward pass. ``about``: where
    it comes from, in words. ``rows``: the first dimension of each, 1 of a vector; empty where it is not known.

    Raises ``ValueError`` for lists of different lengths and for what is negative or not finite.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    backward_times: tuple[float, ...]
    forward_s: float
    about: str = ""
    samples: float | None = None
    accumulate: int = 1
    rest_s: float = 0.0
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.sizes) == len(self.backward_times):
            raise ValueError(
                f"{len(self.names)} names, {len(self.sizes)} sizes and {len(self.backward_times)} backward_times: give "
                "one of each for every gradient"
            )
        if len(self.rows) not in (0, len(self.names)) or not all(one >= 1 for one in self.rows):
            raise ValueError(f"rows={self.rows} must be empty, or have a number of 1 or more for every gradient")
        for name, size, seconds in zip(self.names, self.sizes, self.backward_times, strict=True):
            if not (0 <= size < math.inf and 0 <= seconds < math.inf):
                raise ValueError(f"gradient {name!r} has {size} bytes and {seconds} s: both must be finite, 0 or more")
        if not 0 <= self.forward_s < math.inf:
            raise ValueError(f"forward_s={self.forward_s} must be finite, 0 or more")
        if not 0 <= self.rest_s < math.inf:
            raise ValueError(f"rest_s={self.rest_s} must be finite, 0 or more")
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} must be at least 1: passes of each optimizer step")
        if self.samples is not None and not 0 < self.samples < math.inf:
            raise ValueError(f"samples={self.samples} must be above 0 and finite, or None")

    @property
    def backward_s(self) -> float:
        """Of the whole backward pass."""
        return list(accumulate(self.backward_times))[-1] if self.backward_times else 0.0

    @property
    def compute_s(self) -> float:
        """Of a step without communication."""
        return self.forward_s + self.backward_s

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(self.sizes)

    def in_order(self, names: Sequence[str]) -> Self:
        """The same gradients, which count in this order: each is there when those before it are there too.

        Raises ``ValueError`` unless ``names`` are those of this trace."""
        if sorted(names) != sorted(self.names):
            raise ValueError("names must be those of the trace, each once, in another order")
        places = {name: place for place, name in enumerate(self.names)}
        there = [*accumulate(self.backward_times)]
        order = [places[name] for name in names]
        times, last_s = [], 0.0
        for place in order:
            times.append(max(there[place] - last_s, 0.0))
            last_s = max(last_s, there[place])
        return replace(
            self,
            names=tuple(names),
            sizes=tuple(self.sizes[place] for place in order),
            backward_times=tuple(times),
            rows=tuple(self.rows[place] for place in order) if self.rows else (),
        )

    def all_at_once(self) -> Self:
        """The same gradients, none of which may leave before the backward pass is over."""
        if not self.sizes:
            return self
        return replace(self, backward_times=(self.backward_s, *[0.0] * (len(self.sizes) - 1)))

    def to_json(self) -> str:
        """What ``from_json`` reads: the same trace, bit for bit."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "about": self.about,
                "forward_s": self.forward_s,
                "samples": self.samples,
                "accumulate": self.accumulate,
                "rest_s": self.rest_s,
                "rows": self.rows,
                "gradients": [*zip(self.names, self.sizes, self.backward_times, strict=True)],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ``ValueError`` for what is no trace."""
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is no trace but damaged JSON ({error}): record it again") from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"this is no trace: it must come from Trace.to_json() ({_FORMAT!r})")
        if found.get("version") != _VERSION:
            raise ValueError(f"this trace has version {found.get('version')!r}: this telegrad reads {_VERSION}")
        try:
            rows = [(str(name), operator.index(size), float(seconds)) for name, size, seconds in found["gradients"]]
            forward_s, about = float(found["forward_s"]), str(found["about"])
            samples = None if found.get("samples") is None else float(found["samples"])
            accumulate, rest_s = operator.index(found.get("accumulate", 1)), float(found.get("rest_s", 0.0))
            of_matrices = tuple(map(operator.index, found.get("rows", ())))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"this trace is damaged ({error!r}): it must come from Trace.to_json()") from error
        names, sizes, times = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(names, sizes, times, forward_s, about, samples, accumulate, rest_s, of_matrices)
