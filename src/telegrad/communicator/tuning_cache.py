"""Where tunings are kept between jobs: one small file per place, in the user's cache directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from telegrad.cost import Place, Tuning

_MOST_CANDIDATES = 16  # host sets with the same first host, the newest: all of them travel to all ranks


def cache_folder() -> Path:
    """``$TELEGRAD_CACHE``, else ``$XDG_CACHE_HOME/telegrad``, else ``~/.cache/telegrad``. Raises ``RuntimeError`` if
    there is no home."""
    if own := os.environ.get("TELEGRAD_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "telegrad"


def file_of(place: Place) -> Path:
    """Where the tuning of ``place`` is kept."""
    hosts = _digest(*(f"{name}={count}" for name, count in place.hosts), *map(str, place.nodes))
    return cache_folder() / f"{_beginning_of(place)}-{hosts}.json"


def check_writable() -> None:
    """Raises ``OSError`` if ``store`` could not write, ``RuntimeError`` if there is no home."""
    folder = cache_folder()
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def store(tuning: Tuning) -> Path:
    """Keeps ``tuning`` for later jobs; replaces an earlier one of the same place, at once or not at all. Raises
    ``OSError`` if it cannot be written."""
    path = file_of(tuning.place)
    with _naming(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuning-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(tuning.to_json() + "\n")
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return path


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise OSError(
            f"tunings cannot be kept in {folder} ({why}): let TELEGRAD_CACHE name a folder that can be written"
        ) from error


def candidates(here: Place) -> list[Tuning]:
    """The kept tunings of places that are ``here`` but for the hosts, which are known to hold all of ``here``'s; the
    newest first. A file that is damaged is left out with a warning that names it."""
    try:
        paths = [*cache_folder().glob(f"{_beginning_of(here)}-*.json")]
    except (OSError, RuntimeError):  # not readable, or no home: nothing is kept
        return []
    dated: list[tuple[float, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):  # a link to nothing, or gone meanwhile
            dated.append((path.stat().st_mtime, path))
    found: list[Tuning] = []
    for _, path in sorted(dated, reverse=True):
        try:
            tuning = Tuning.from_json(path.read_text())
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is not used: {error}", stacklevel=2)
            continue
        if _could_be(tuning.place, here):
            found.append(tuning)
    return found[:_MOST_CANDIDATES]


def newest_between_hosts() -> Tuning | None:
    """Of the kept tunings of a network between several hosts the one measured last; damaged files are passed over."""
    found: list[Tuning] = []
    with contextlib.suppress(OSError, RuntimeError):  # not readable, or no home
        for path in cache_folder().glob("*-p*-*.json"):
            with contextlib.suppress(OSError, ValueError):
                tuning = Tuning.from_json(path.read_text())
                if len(tuning.place.hosts) > 1:
                    found.append(tuning)
    return max(found, key=lambda one: one.measured_at, default=None)


def _could_be(place: Place, here: Place) -> bool:
    hosts = {name for name, _ in here.hosts}
    return (
        (place.driver, place.ranks, place.interface, place.environment)
        == (here.driver, here.ranks, here.interface, here.environment)
    ) and hosts <= {name for name, _ in place.hosts}


def _beginning_of(place: Place) -> str:
    network = _digest(place.interface or "", *(f"{name}={value}" for name, value in place.environment))
    return f"{place.driver}-p{place.ranks}-{network}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
