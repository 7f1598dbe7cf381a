"""How programs that experiments start, ranks first of all, find the lab, whatever folder they are started in."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the tree."""


def let_children_import_lab() -> None:
    """Puts ``ROOT`` into PYTHONPATH, which child processes inherit; a second call does nothing."""
    before = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if str(ROOT) not in before:
        os.environ["PYTHONPATH"] = os.pathsep.join([*before, str(ROOT)])
