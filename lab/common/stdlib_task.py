"""A text task that every machine has: of which top-level package of Python's standard library is a source file?"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}  # not of the library, whatever is installed
_SEED = 0


def stdlib_sources(folder: str | os.PathLike[str] | None = None) -> tuple[list[bytes], list[str]]:
    """The text and the package (or module) of each source file of the standard library, or of ``folder``, in the order
    of their paths. Raises ``FileNotFoundError`` where there is none."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    files = []
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOREIGN]
        files += [Path(place, name).relative_to(root) for name in names if name.endswith(".py")]
    if not files:
        raise FileNotFoundError(f"{root} has no Python sources: install the standard library's")
    files.sort()
    return [(root / file).read_bytes() for file in files], [file.parts[0].removesuffix(".py") for file in files]


def stdlib_pieces(
    piece: int, folder: str | os.PathLike[str] | None = None
) -> tuple[list[bytes], npt.NDArray[np.float32]]:
    """All sources in pieces of ``piece`` bytes, a file's last one shorter, in a fixed random order, and their labels: 1
    where the file is of the package that has the most bytes, else -1."""
    texts, packages = stdlib_sources(folder)
    names, which = np.unique(packages, return_inverse=True)
    largest = np.argmax(np.bincount(which, [len(text) for text in texts], len(names)))
    cut = [text[at : at + piece] for text in texts for at in range(0, len(text), piece)]
    labels = np.where(which == largest, np.float32(1), np.float32(-1))
    targets = np.repeat(labels, [-(-len(text) // piece) for text in texts])
    order = np.random.default_rng(_SEED).permutation(len(cut))
    return [cut[one] for one in order], targets[order]
