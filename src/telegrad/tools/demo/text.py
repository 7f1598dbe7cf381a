"""The demo's data: the source code of Python's own standard library, as one stream of bytes.

Every machine that can run the demo has this text, so nothing is downloaded. The files are read once, by the parent; the
ranks map the two resulting files into memory and draw their batches from them. Which bytes a step sees depends on the
seed, the step and the rank only, never on the communication: all runs of the demo train on the same data in the same
order. This module must not know of models, processes or networks.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCABULARY = 256
"""One token is one byte."""

_HELD_OUT_IN = 20
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]


def source_files(root: Path | None = None) -> list[Path]:
    """All ``*.py`` files of the standard library in sorted order, without installed third-party packages.

    ``root`` replaces the standard library's folder. Raises ``FileNotFoundError`` when there is no Python file in it.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = [path for path in sorted(folder.rglob("*.py")) if not _FOREIGN.intersection(path.relative_to(folder).parts)]
    if not files:
        if root is not None:
            raise FileNotFoundError(f"--text {root} has no *.py file to train on: name a folder that has")
        raise FileNotFoundError(
            f"{folder} has no *.py file to train on: install Python's standard library with its sources"
        )
    return files


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the validation set: one in 20, decided by a hash of its path inside the library."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:4], "big") % _HELD_OUT_IN == 0


@dataclass(frozen=True)
class Corpus:
    """The training and the held-out text: 1-D uint8 arrays, usually mapped from files that all ranks share."""

    training: Bytes
    held_out: Bytes

    @classmethod
    def prepare(cls, folder: Path, root: Path | None = None) -> Corpus:
        """Reads every source file once and writes ``training.bin`` and ``held_out.bin`` into ``folder``.

        Raises ``FileNotFoundError`` when ``root`` (default: the standard library) has no Python file.
        """
        files = source_files(root)
        base = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for path in files:
            parts[is_held_out(path.relative_to(base).as_posix())].append(path.read_bytes())
        (folder / "training.bin").write_bytes(b"\n".join(parts[False]))
        (folder / "held_out.bin").write_bytes(b"\n".join(parts[True]))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Maps what :meth:`prepare` wrote. Raises ``ValueError`` when a set is empty."""
        sets = []
        for name in ("training.bin", "held_out.bin"):
            if (folder / name).stat().st_size == 0:
                raise ValueError(f"{folder / name} is empty: the text is too small to be split, give a larger one")
            sets.append(np.memmap(folder / name, dtype=np.uint8, mode="r"))
        return cls(sets[0], sets[1])


def _windows(text: Bytes, starts: Tokens, context: int) -> tuple[Tokens, Tokens]:
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def check_length(text: Bytes, context: int) -> None:
    """Raises ``ValueError`` when ``text`` is shorter than one window and the byte after it."""
    if len(text) <= context:
        raise ValueError(f"context={context} needs a longer text than {len(text)} bytes: choose a shorter context")


def training_batch(text: Bytes, *, seed: int, step: int, rank: int, batch: int, context: int) -> tuple[Tokens, Tokens]:
    """The windows that ``rank`` trains on at ``step``: inputs and next bytes, both int64 of shape (batch, context).

    Raises ``ValueError`` when the text is shorter than one window.
    """
    check_length(text, context)
    random = np.random.default_rng([seed, step, rank])
    return _windows(text, random.integers(0, len(text) - context, size=batch), context)


def validation_batches(
    text: Bytes, *, windows: int, batch: int, context: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tokens, Tokens]]:
    """This rank's share of ``windows`` evenly spaced windows of the held-out text, ``batch`` of them at a time.

    The set of windows does not depend on ``world_size``. Raises ``ValueError`` when the text is shorter than a window.
    """
    check_length(text, context)
    starts = np.linspace(0, len(text) - context - 1, windows).astype(np.int64)[rank::world_size]
    for first in range(0, len(starts), batch):
        yield _windows(text, starts[first : first + batch], context)
