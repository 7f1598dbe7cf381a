"""A tree of dicts, lists, tensors, arrays and plain values in one file, from which a killed run goes on.

The file is numpy's npz, with the tree as JSON in it and the arrays beside: nothing in it can turn into code. It is
replaced as a whole, so that a kill at any moment leaves the old or the new one.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_TREE = "tree"


def save(path: Path, tree: Any) -> None:
    """Raises ``TypeError`` naming what cannot be saved."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_packed(tree, arrays, "tree"))
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        np.savez(file, **{_TREE: np.frombuffer(text.encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(path: Path) -> Any:
    """What ``save`` was given, tensors on the CPU; tuples come back as lists. Raises ``ValueError`` if the file is
    damaged, ``OSError`` if it cannot be read.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return _unpacked(json.loads(arrays[_TREE].tobytes()), arrays)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and the run begins anew") from error


def _packed(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    if isinstance(value, Mapping):  # as pairs: keys may be numbers
        return {"d": [[key, _packed(one, arrays, f"{where}[{key!r}]")] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"l": [_packed(one, arrays, f"{where}[{place}]") for place, one in enumerate(value)]}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        name = f"a{len(arrays)}"
        arrays[name] = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        return {"t" if isinstance(value, torch.Tensor) else "a": name}
    if isinstance(value, np.generic):
        return {"v": value.item()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"v": value}
    raise TypeError(f"{where} is a {type(value).__name__}: dicts, lists, tensors, arrays and plain values can be saved")


def _unpacked(packed: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    ((kind, content),) = packed.items()
    match kind:
        case "d":
            return {key: _unpacked(one, arrays) for key, one in content}
        case "l":
            return [_unpacked(one, arrays) for one in content]
        case "t":
            return torch.from_numpy(arrays[content])
        case "a":
            return arrays[content]
    return content
