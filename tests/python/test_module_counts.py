"""The wheel's Python does not grow: modules, lines, crumbs with one importer, and names of several classes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from count_modules import LIMITS, SOURCES, Counts, counted, faults, text_of, updated


def test_nothing_has_grown() -> None:
    said = faults(counted(SOURCES), tomllib.loads(LIMITS.read_text()))
    assert said == [], "python tests/count_modules.py --update takes what is gone off the lists"


def test_what_is_counted(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.one import A\n")
    (package / "one.py").write_text("from package import two\nclass A: ...\n")
    (package / "two.py").write_text("class A: ...\nclass B: ...\n")
    (package / "three.py").write_text("import package.one\n" + "x = 1\n" * 99)
    (package / "four.py").write_text("def f():\n    from package.three import x\n")
    assert counted(tmp_path) == Counts(5, 107, ("package.two -> package.one",), ("A",))


def test_what_is_more_or_gone_is_named() -> None:
    limits = {"modules": 5, "lines": 250, "short": ["a -> b", "c -> d"], "doubled": ["A"]}
    assert faults(Counts(5, 250, ("a -> b", "c -> d"), ("A",)), limits) == []
    assert faults(Counts(6, 251, ("a -> b", "e -> f"), ("A", "B")), limits) == [
        "6 modules: 5 at most",
        "251 lines: 250 at most",
        "e -> f: merge it into its only importer",
        "c -> d: it is gone, take it off the list",
        "B: give one class another name",
    ]


def test_limits_become_smaller_only() -> None:
    limits = {"modules": 10, "lines": 500, "short": ["a -> b"], "doubled": ["A"]}
    smaller = Counts(4, 249, (), ("A",))
    assert tomllib.loads(updated(smaller, limits)) == {"modules": 5, "lines": 250, "short": [], "doubled": ["A"]}
    assert updated(smaller, limits) == text_of(smaller)
    with pytest.raises(ValueError, match="^11 modules: 10 at most$"):
        updated(Counts(11, 249, (), ("A",)), limits)
