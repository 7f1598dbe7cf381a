"""Rows in a binary file beside the text that they were read from, mapped into memory.

A header, whose JSON says what the file was made of and where its arrays lie, then the arrays. It is used only if the
text has the size and time that it had, and is to be read alike; it is written beside its place and then moved there.
Of one text, only the shares of the last number of ranks that wrote some are kept, so that they do not pile up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from telegrad.linear.rows import Rows

_MAGIC = b"telegrad rows\n"
_VERSION = 2
_HEADER_BYTES = 8192
_ALIGNMENT = 64
_ARRAYS = {"offsets": "uint64", "starts": "uint64", "labels": "float32", "indices": "uint32", "values": "float32"}


def cache_path(file: Path, rank: int, world_size: int) -> Path:
    """Where the rows of one of ``world_size`` shares of ``file`` are kept."""
    return file.with_name(f"{file.name}.{rank}of{world_size}.rows")


def cached(
    file: Path, state: os.stat_result, settings: Mapping[str, object], rank: int, world_size: int
) -> Rows | None:
    """This share's rows, from its own file or that of all rows, if one is there and still right."""
    made_of = _made_of(state, settings)
    for share in ((rank, world_size), (0, 1)):
        found = _load(cache_path(file, *share), made_of)
        if found is None:
            continue
        rows, text_bytes = found
        if share == (rank, world_size):
            return rows
        assert rows.starts is not None
        borders = [text_bytes * one // world_size for one in (rank, rank + 1)]
        first, last = np.searchsorted(rows.starts, np.array(borders, np.uint64))
        part = rows.part(int(first), int(last))
        # What was left out is counted once among all ranks.
        return part if rank else _with_damage(part, rows)
    return None


def keep(
    rows: Rows,
    file: Path,
    state: os.stat_result,
    settings: Mapping[str, object],
    rank: int,
    world_size: int,
    text_bytes: int,
) -> None:
    """Writes this share's rows for later; does nothing where that cannot be. Rank 0 removes the shares of other numbers
    of ranks; who has these mapped keeps them."""
    assert rows.starts is not None
    at = _HEADER_BYTES
    places = {}
    for name in _ARRAYS:
        array = getattr(rows, name)
        places[name] = (at, array.size)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = {
        **_made_of(state, settings),
        "n_features": rows.n_features,
        "index_base": rows.index_base,
        "base_is_guessed": rows.base_is_guessed,
        "damaged": rows.damaged,
        "first_damaged": rows.first_damaged,
        "text_bytes": text_bytes,
        "bytes": at,
        "arrays": places,
    }
    text = _MAGIC + json.dumps(header).encode()
    target = cache_path(file, rank, world_size)
    if len(text) > _HEADER_BYTES:
        return
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.")
        try:
            with open(descriptor, "wb") as place:
                place.write(text.ljust(_HEADER_BYTES))
                for array, (begin, _) in places.items():
                    place.seek(begin)
                    place.write(getattr(rows, array).data)
                place.truncate(at)
            os.chmod(name, stat.S_IMODE(state.st_mode) | stat.S_IWUSR)  # who may read the text may read its rows
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
        if rank == 0:
            for other in _shares_of(file):
                if not other.name.endswith(f"of{world_size}.rows"):
                    other.unlink(missing_ok=True)


def _shares_of(file: Path) -> list[Path]:
    """All caches of this text."""
    share = re.compile(re.escape(file.name) + r"\.\d+of\d+\.rows")
    return [path for path in file.parent.iterdir() if share.fullmatch(path.name)]


def _made_of(state: os.stat_result, settings: Mapping[str, object]) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "byteorder": sys.byteorder,
        "source": [state.st_size, state.st_mtime_ns],
        "settings": dict(settings),
    }


def _load(path: Path, made_of: Mapping[str, Any]) -> tuple[Rows, int] | None:
    """The rows and the length of the text; ``None`` for what is not there, of something else, or not whole."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEADER_BYTES)
        if not head.startswith(_MAGIC):
            return None
        header = json.loads(head[len(_MAGIC) :])
        if any(header[name] != value for name, value in made_of.items()) or path.stat().st_size != header["bytes"]:
            return None
        memory = np.memmap(path, np.uint8, mode="r")
        arrays = {}
        for name, dtype in _ARRAYS.items():
            at, size = header["arrays"][name]
            arrays[name] = np.frombuffer(memory, dtype, size, at)
        rows = Rows(
            **arrays,
            n_features=header["n_features"],
            damaged=header["damaged"],
            first_damaged=tuple(header["first_damaged"]),
            index_base=header["index_base"],
            base_is_guessed=header["base_is_guessed"],
        )
        return rows, header["text_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _with_damage(part: Rows, whole: Rows) -> Rows:
    return replace(part, damaged=whole.damaged, first_damaged=whole.first_damaged)
