"""Gradients of a model in training, one mini-batch of each of many ranks at equal weights: what schemes are compared
on. Needs no torch."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_FORMAT = "telegrad-gradients-1"
_LARGEST = 32768.0  # what a gradient's largest magnitude becomes: far from where float16 ends, or gets coarse
_STRIDE = 7


@dataclass(frozen=True)
class Recording:
    """``values``: float16 of shape (gradients, elements), each row a gradient over ``scales[row]``. ``names`` and
    ``sizes``: of the parameters, in the order of the elements. ``task`` and ``steps``: what was trained, and how long.
    """

    task: str
    steps: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    values: npt.NDArray[np.float16]
    scales: npt.NDArray[np.float32]

    @property
    def count(self) -> int:
        """How many gradients there are."""
        return len(self.values)

    @property
    def elements(self) -> int:
        """Of each."""
        return int(self.values.shape[1])

    def gradient(self, rank: int, call: int) -> npt.NDArray[np.float32]:
        """What ``rank`` gives in call number ``call``: in a call all ranks' are different, up to as many as there are;
        the next call's are others' of this one."""
        row = (rank + _STRIDE * call) % self.count
        found = np.asarray(self.values[row], np.float32)
        found *= self.scales[row]
        return found

    def save(self, path: Path) -> None:
        """Writes a file for ``load``."""
        with path.open("wb") as file:
            np.savez(
                file,
                format=_FORMAT,
                task=self.task,
                steps=self.steps,
                names=np.array(self.names),
                sizes=np.array(self.sizes, np.int64),
                values=self.values,
                scales=self.scales,
            )

    @classmethod
    def load(cls, path: Path) -> Self:
        """What ``save`` wrote. Raises ``ValueError`` for another file, ``OSError`` where it cannot be read."""
        try:
            found: Any = np.load(path)
            if str(found["format"]) != _FORMAT:
                raise ValueError(str(found["format"]))
            return cls(
                str(found["task"]),
                int(found["steps"]),
                tuple(map(str, found["names"])),
                tuple(map(int, found["sizes"])),
                found["values"],
                found["scales"],
            )
        except (ValueError, KeyError, EOFError, IndexError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            why = "numpy has not written it" if "pickle" in str(error) else error  # of which numpy has dangerous advice
            raise ValueError(f"{path} holds no recorded gradients ({why}): name another file, or remove it") from error


class Recorder:
    """Room for ``count`` gradients of parameters with these ``names`` and ``sizes``."""

    def __init__(self, task: str, steps: int, sizes: dict[str, int], count: int) -> None:
        self._task, self._steps, self._sizes = task, steps, sizes
        self._values = np.empty((count, sum(sizes.values())), np.float16)
        self._scales = np.empty(count, np.float32)

    def take(self, row: int, gradient: npt.NDArray[np.float32]) -> None:
        """Keeps ``gradient`` as number ``row``."""
        scale = float(np.abs(gradient).max()) / _LARGEST or 1.0
        self._scales[row] = scale
        self._values[row] = gradient / np.float32(scale)

    def recording(self) -> Recording:
        """All that was taken."""
        names, sizes = tuple(self._sizes), tuple(self._sizes.values())
        return Recording(self._task, self._steps, names, sizes, self._values, self._scales)
