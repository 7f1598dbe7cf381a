"""Counts what the wheel's Python consists of, and holds it against ``module_limits.toml``.

``python tests/count_modules.py`` prints the counts. ``--update`` writes limits and lists that have become smaller; what
has become larger it refuses. ``tests/python/test_module_counts.py`` runs the same comparison.

Two lists may only shrink: modules of less than 80 lines that a single other one imports (they belong into that one),
and names that more than one class has.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"
LIMITS = Path(__file__).with_name("module_limits.toml")
SHORT_LINES = 80
_STEP_MODULES, _STEP_LINES = 5, 250  # limits are rounded up to these


@dataclass(frozen=True)
class Counts:
    """``short``: modules of less than 80 lines with one importer, which follows behind an arrow; ``doubled``: names of
    several classes."""

    modules: int
    lines: int
    short: tuple[str, ...]
    doubled: tuple[str, ...]


def counted(sources: Path) -> Counts:
    """Of all packages in ``sources``."""
    files = {_name_of(path, sources): path for path in sorted(sources.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, int] = defaultdict(int)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            for other in _imported(node):
                if other in files and other != name:
                    importers[other].add(name)
    short = [
        f"{name} -> {next(iter(importers[name]))}"
        for name, path in files.items()
        if lines[name] < SHORT_LINES and len(importers[name]) == 1 and not path.name.startswith("__")
    ]
    doubled = [name for name, count in sorted(classes.items()) if count > 1]
    return Counts(len(files), sum(lines.values()), tuple(short), tuple(doubled))


def faults(found: Counts, limits: Mapping[str, object]) -> list[str]:
    """What is above its limit, not in its list, or no longer in what the list names."""
    said = []
    for name in ("modules", "lines"):
        count, most = getattr(found, name), limits[name]
        assert isinstance(most, int)
        if count > most:
            said.append(f"{count} {name}: {most} at most")
    for name, what in (("short", "merge it into its only importer"), ("doubled", "give one class another name")):
        now, listed = set(getattr(found, name)), limits[name]
        assert isinstance(listed, list)
        said += [f"{one}: {what}" for one in sorted(now - set(listed))]
        said += [f"{one}: it is gone, take it off the list" for one in sorted(set(listed) - now)]
    return said


def updated(found: Counts, limits: Mapping[str, object]) -> str:
    """The file with smaller limits and shorter lists. Raises ``ValueError`` where something has grown."""
    grown = [fault for fault in faults(found, limits) if "take it off" not in fault]
    if grown:
        raise ValueError("\n".join(grown))
    return text_of(found)


def text_of(found: Counts) -> str:
    """The file that allows what was found."""
    lines = [
        "# Written by tests/count_modules.py --update; nothing here may grow.",
        f"modules = {-(-found.modules // _STEP_MODULES) * _STEP_MODULES}",
        f"lines = {-(-found.lines // _STEP_LINES) * _STEP_LINES}",
    ]
    for name in ("short", "doubled"):
        lines += [f"{name} = [", *(f'  "{one}",' for one in getattr(found, name)), "]"]
    return "\n".join(lines) + "\n"


def _name_of(path: Path, sources: Path) -> str:
    return ".".join(path.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def main() -> None:
    """The command."""
    found, limits = counted(SOURCES), tomllib.loads(LIMITS.read_text())
    print(f"modules: {found.modules}, lines: {found.lines}")
    print(f"modules of less than {SHORT_LINES} lines with one importer: {len(found.short)}")
    print(f"names of several classes: {len(found.doubled)}")
    if "--update" in sys.argv[1:]:
        LIMITS.write_text(updated(found, limits))
    elif said := faults(found, limits):
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
