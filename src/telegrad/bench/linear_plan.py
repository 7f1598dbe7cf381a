"""What ``telegrad bench linear`` measures: on which rows, how gradients are summed, among whom."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from telegrad.linear.synthetic import SHAPES

TEXT = "stdlib"
DATA = (*SHAPES, TEXT)
_BY_ALGORITHM = ("split_allgather", "recursive_doubling")
SCHEMES = (
    "gloo-dense",
    "mpich-dense",
    "telegrad-dense",
    "telegrad-sparse",
    *(f"telegrad-{name}" for name in _BY_ALGORITHM),
)


@dataclass(frozen=True)
class LinearPlan:
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
        names = (scheme.removesuffix("-dense") for scheme in self.schemes)
        return tuple(name for name in names if not name.startswith("telegrad"))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "schemes": tuple(fields["schemes"])})


def algorithm_of(scheme: str) -> str | None:
    """Of a sparse sum; ``None`` for a dense scheme."""
    kind = scheme.partition("-")[2]
    return None if kind == "dense" else "auto" if kind == "sparse" else kind
