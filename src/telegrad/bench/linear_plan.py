"""What ``telegrad bench linear`` measures: on which rows, how gradients are summed, among whom."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from telegrad.bench.json_fields import JsonFields
from telegrad.bench.peers import PEERS
from telegrad.linear.synthetic import SHAPES

TEXT = "stdlib"
DATA = (*SHAPES, TEXT)
_BY_ALGORITHM = ("split_allgather", "recursive_doubling")
SGD_SCHEMES = (
    "gloo-dense",
    "mpich-dense",
    "telegrad-dense",
    "telegrad-sparse",
    *(f"telegrad-{name}" for name in _BY_ALGORITHM),
)
CD_SCHEMES = ("cd-dense", "cd-sparse")
"""Coordinate descent, whose changes ranks gather as whole slices of the model or as entries."""
SCHEMES = (*SGD_SCHEMES, *CD_SCHEMES)


@dataclass(frozen=True)
class LinearPlan(JsonFields):
    """``data``: one of ``DATA``, or a LIBSVM file. ``rows``: of each rank in a step; ``steps``: of a pass; ``columns``:
    how many are not empty in all rows of a made-up set, or ``None`` for as many as published; ``network``: as
    ``open_network`` knows it. Raises ``ValueError`` for what does not exist."""

    data: str
    network: str
    ranks: int
    schemes: tuple[str, ...]
    rows: int = 1000
    steps: int = 3
    columns: int | None = None
    calibrates: bool = True
    store: str = ""

    def __post_init__(self) -> None:
        if self.data not in DATA and not Path(self.data).is_file():
            raise ValueError(f"data={self.data!r} does not exist: use {', '.join(DATA)} or a LIBSVM file")
        for scheme in self.schemes:
            if scheme not in SCHEMES:
                raise ValueError(f"scheme {scheme!r} does not exist: use {', '.join(SCHEMES)}")
        if self.columns is not None:
            if self.data not in SHAPES:
                raise ValueError(f"columns={self.columns} is for made-up rows, but data={self.data!r} is real")
            _ = dataclasses.replace(SHAPES[self.data], columns=self.columns).popularity

    @property
    def name(self) -> str:
        """Of the data, in rows and tables."""
        return self.data if self.data in DATA else Path(self.data).name

    @property
    def peers(self) -> tuple[str, ...]:
        dense = (scheme for scheme in self.schemes if scheme.endswith("-dense"))
        names = (scheme.removesuffix("-dense") for scheme in dense)
        return tuple(name for name in names if name in PEERS)


def default_schemes(data: str) -> tuple[str, ...]:
    """All, but coordinate descent with URL's shape alone, as in the paper: a pass has a step for each 100 columns of a
    rank, and a dense one moves the whole model."""
    return SCHEMES if data == "url" else SGD_SCHEMES


def algorithm_of(scheme: str) -> str | None:
    """Of a sparse sum of gradients; ``None`` for a dense scheme."""
    kind = scheme.partition("-")[2]
    return None if kind == "dense" else "auto" if kind == "sparse" else kind
