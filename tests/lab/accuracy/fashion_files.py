"""A data set in the form of Fashion-MNIST, small and made up: classes that a model can learn in a few steps."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion(folder: Path, training: int = 320, held_out: int = 80) -> Path:
    """Bright bars on noise, the bar's place says the class; gzipped as Debian has them."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for prefix, count in (("train", training), ("t10k", held_out)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 100, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 6] = 255
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


def write_sources(folder: Path) -> Path:
    """A library of Python files, some of which are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(60):
        (folder / f"module{i}.py").write_text(f"def function{i}(argument):\n    return argument + {i}\n" * 20)
    return folder
