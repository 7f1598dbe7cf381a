"""Arrays in ``npz`` files. This module must not know whose they are."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection
from typing import Any

import numpy as np


def read_arrays(path: str | os.PathLike[str], names: Collection[str]) -> dict[str, Any]:
    """Those of ``names`` that the file has. Raises ``ValueError`` with what else it is, ``OSError`` without one."""
    with open(path, "rb") as file:
        # asked first, as numpy would take such a file for a pickle, and tell how to load that
        if not zipfile.is_zipfile(file):
            raise ValueError("no npz file")
        file.seek(0)
        try:
            with np.load(file) as arrays:
                return {name: arrays[name] for name in arrays.files if name in names}
        except Exception as error:  # damaged bytes lead the readers of numpy and of zipfile to errors of many kinds
            raise ValueError("an npz file whose arrays are damaged or not a model's") from error
