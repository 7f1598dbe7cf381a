"""The files that commands write: said before the work, not after it."""

from __future__ import annotations

from pathlib import Path

import typer


def check_folder_of(path: Path | None, option: str) -> None:
    """Raises ``BadParameter`` if ``path``, given as ``option``, is in a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist: make it first", param_hint=option)
