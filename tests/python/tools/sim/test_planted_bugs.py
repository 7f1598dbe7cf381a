"""The explorer finds bugs planted into the sources: a handful here, all of them with ``run_mutants.py --all``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from mutants_membership import MEMBERSHIP_MUTANTS  # noqa: E402
from run_mutants import (  # noqa: E402
    DoesNotApply,
    DoesNotBuild,
    build_core,
    hunt,
    is_clean,
    mutate,
    original,
    plant,
    write_explorer,
)

from mutants import MUTANTS, Mutant  # noqa: E402

_QUICK = (
    "lanes: the last segment is lost",
    "doubling: sums lie in the output before all are heard",
    "barrier: every second round is left out",
    "call: not compared",
    "abort: not told to the others",
    "heartbeats: never sent",
)

_QUICK_OF_MEMBERSHIP = (
    "members: a group is decided before the others have come",
    "members: newcomers get the first ranks",
    "members: one that was left out is told another rank",
    "members: the thread for the store goes on",
)

_needs_compiler = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("cmake", "ninja", "c++")), reason="needs CMake, ninja and c++"
)


@pytest.fixture(scope="module")
def clean() -> Path:
    return build_core()


def test_every_mutant_applies() -> None:
    assert len(MUTANTS) >= 24
    assert len(MEMBERSHIP_MUTANTS) >= 25
    every = MUTANTS + MEMBERSHIP_MUTANTS
    assert len({mutant.name for mutant in every}) == len(every)
    for mutant in every:
        assert mutate(mutant) != original(mutant).read_text()


def test_a_mutant_that_does_not_apply_is_refused() -> None:
    with pytest.raises(DoesNotApply, match="occurs 0 times"):
        mutate(Mutant("gone", "session/session.cpp", (("no such text", ""),)))
    with pytest.raises(DoesNotApply, match="bring it up to date"):
        mutate(Mutant("twice", "session/session.cpp", (("return", ""),)))


@_needs_compiler
@pytest.mark.timeout(900)  # compiles the core, once
def test_the_core_without_a_bug_is_clean(clean: Path) -> None:
    assert all(is_clean(clean, seed, "2..33") for seed in range(20))


@_needs_compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _QUICK)
def test_a_planted_bug_is_found(clean: Path, name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    found = hunt(mutant, clean)
    assert found.seed is not None, found
    assert found.what in ("hang", "wrong result", "wrong error", "crash", "endless")


def test_the_agreement_of_members_without_a_bug_is_clean(tmp_path: Path) -> None:
    explorer = write_explorer(tmp_path / "explore")
    assert all(is_clean(explorer, seed, "") for seed in (0, 100))


@pytest.mark.parametrize("name", _QUICK_OF_MEMBERSHIP)
def test_a_bug_planted_into_python_is_found(name: str) -> None:
    mutant = next(mutant for mutant in MEMBERSHIP_MUTANTS if mutant.name == name)
    assert mutant.is_python
    found = hunt(mutant, Path("not used"))
    assert found.seed is not None, found


@_needs_compiler
@pytest.mark.timeout(900)
def test_a_mutant_that_does_not_compile_is_told(clean: Path) -> None:
    assert clean.is_file()
    with pytest.raises(DoesNotBuild, match="error"):
        plant(Mutant("broken", "collectives/dense/barrier.cpp", (("Task<void> barrier(", "Taks<void> barrier("),)))
