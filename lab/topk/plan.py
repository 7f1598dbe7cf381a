"""What the measured part of ``python -m lab topk`` runs: plain data, which travels to the ranks as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True)
class MeasuredPlan:
    """``file``: of recorded gradients, of which ``blocks`` side by side make a rank's vector. ``calls``: of selection
    with residuals, whose streams the schemes get in turn."""

    network: str
    ranks: int
    density: float
    schemes: tuple[str, ...]
    file: str
    blocks: int = 16
    calls: int = 4
    samples: int = 15
    seconds: float = 20.0
    calibrates: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of ``to_json``."""
        fields = json.loads(text)
        return cls(**{**fields, "schemes": tuple(fields["schemes"])})
