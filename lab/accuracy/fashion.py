"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60,000 + 10,000 grey images of 28 x 28 in ten classes, as IDX files.

This module must not know of torch.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

DEFAULT_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts it."""

CLASSES = 10
SIDE = 28

_FILES = {
    "training": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "held_out": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UNSIGNED_BYTE = 8

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.uint8]


class DataMissing(Exception):  # noqa: N818
    """A data set is not on this machine; the message says how to get it."""


@dataclass(frozen=True)
class Labelled:
    """Images, uint8 of shape (n, 28, 28), and the class of each, uint8 of shape (n,)."""

    images: Images
    labels: Labels


def read_fashion(folder: Path | None = None) -> tuple[Labelled, Labelled]:
    """The training and the held-out set from the IDX files in ``folder``, gzipped or not.

    Raises ``DataMissing`` if a file is not there, ``ValueError`` for one that is not what its name says.
    """
    place = DEFAULT_FOLDER if folder is None else folder
    sets = []
    for images_name, labels_name in _FILES.values():
        images, labels = read_idx(_find(place, images_name)), read_idx(_find(place, labels_name))
        if images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
            raise ValueError(f"{place / images_name} has shape {images.shape}: images of {SIDE} x {SIDE} are needed")
        if labels.shape != images.shape[:1] or not labels.size or labels.max() >= CLASSES:
            raise ValueError(
                f"{place / labels_name} has shape {labels.shape} and labels that do not fit {len(images)} images: one "
                f"below {CLASSES} is needed for each"
            )
        sets.append(Labelled(images, labels))
    return sets[0], sets[1]


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    Raises ``ValueError`` for what is no such file.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is no complete gzip file ({error}): get it again") from error
    if len(content) < 4 or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or len(content) < 4 + 4 * content[3]:
        raise ValueError(f"{path} is no IDX file of unsigned bytes: get it again")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path} has {len(content) - start} bytes for an array of shape {shape}: get it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataMissing(
        f"{folder} has no {name} or {name}.gz: `apt-get install dataset-fashion-mnist` puts Fashion-MNIST into "
        f"{DEFAULT_FOLDER} (without root: `apt-get download dataset-fashion-mnist`, then `dpkg -x` the file into a "
        "folder), or give the folder with its IDX files as --data"
    )
