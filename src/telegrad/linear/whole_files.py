"""Files that are written whole, or not at all. This module must not know what is in them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[Any]], None]) -> None:
    """``write`` writes a file beside ``path``, which then takes its place: whoever reads meanwhile, or after this was
    broken off, finds the old one. What is no regular file, and one whose folder lets none be made beside it, is written
    in place. Raises ``OSError`` where that cannot be."""
    given = Path(path)
    target = given.resolve()  # of a link, which stays; that of a descriptor may lead nowhere, or to another file
    if (target.is_file() and target.samefile(given)) or not given.exists():
        try:
            _replace(target, write)
            return
        except PermissionError:
            pass
        except FileNotFoundError as error:  # names the file beside it
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    with given.open("wb") as file:
        write(file)


def _replace(target: Path, write: Callable[[IO[Any]], None]) -> None:
    if target.exists():
        target.open("ab").close()  # raises where it is write-protected, which its folder's owner could pass over
    beside = target.with_name(f"telegrad-{secrets.token_hex(8)}.new")  # fits, however long the other is
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before its name: or a machine that fails may keep the name alone
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
