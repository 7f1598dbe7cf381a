"""A rank of the demo on a device for which the hook has no compression."""

from __future__ import annotations

from typing import Any

import telegrad
from telegrad.tools.demo import training


def refuse(*_: Any, compress: Any, **__: Any) -> None:
    raise TypeError(f"density={compress.density}: gradients on a device are not compressed")


def main(settings_json: str) -> None:
    telegrad.DDPState = refuse  # type: ignore[assignment, misc]
    training.main(settings_json)
