"""What a planted bug is: a source edit that the explorer must find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``edits``: (old, new) texts of ``file``, a path under core/, or one of Python under src/telegrad/; each old text
    occurs there exactly once. ``ranks``: what the explorer draws from, where the default cannot show the bug."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    ranks: str = "2..33"

    @property
    def is_python(self) -> bool:
        """Of the package, not of the core."""
        return self.file.endswith(".py")


def mutant(name: str, file: str, old: str, new: str, ranks: str = "2..33") -> Mutant:
    return Mutant(name, file, ((old, new),), ranks)
