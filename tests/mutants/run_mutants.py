"""Plants each bug of ``mutants.py`` into a copy of its file, links it with the core, and lets the explorer look for it.

    python tests/mutants/run_mutants.py --all [--json FILE] [--jobs N]      every mutant
    python tests/mutants/run_mutants.py --match ring                        those whose name contains "ring"

Only the mutated file is compiled: its object stands before libtelegrad.a on the linker's line, and wins. A finding
counts only if the core without the bug has none at that seed. Needs CMake, ninja and a C++ compiler. Bugs in Python
need none of these: the explorer imports the mutated file instead of the package's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutants_membership import MEMBERSHIP_MUTANTS

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core"
PACKAGE = ROOT / "src" / "telegrad"
BUILD = ROOT / "build" / "mutants"
BUILT = ROOT / "build" / "core"

CPU_LIMIT_S = 600.0
"""Of processor time for one mutant: it counts as not found after that."""

SEEDS = 1_000_000
_MAIN = BUILD / "explore_main.o"
_EXPLORER = ROOT / "tests" / "mutants" / "explore_membership.py"
_FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-w", f"-I{CORE}", f"-I{CORE / 'api'}")
_CXX = (*shlex.split(os.environ.get("CXX", "c++")), *_FLAGS)


@dataclass(frozen=True)
class Found:
    """``seed``: the first that shows the bug; None: none did within ``CPU_LIMIT_S``. ``what``: a finding's sort, or
    "crash" or "endless". ``cpu_s``: of the search alone, ``build_s``: of compiling and linking."""

    name: str
    file: str
    seed: int | None
    what: str
    detail: str
    cpu_s: float
    build_s: float


class DoesNotApply(Exception):  # noqa: N818
    """A mutant's text is not in its file, or more than once."""


class DoesNotBuild(Exception):  # noqa: N818
    """The compiler, or CMake, says no."""


def original(mutant: Mutant) -> Path:
    """The file without the bug."""
    return (PACKAGE if mutant.is_python else CORE) / mutant.file


def mutate(mutant: Mutant) -> str:
    """The file with the bug. Raises ``DoesNotApply``."""
    text = original(mutant).read_text()
    for old, new in mutant.edits:
        if (times := text.count(old)) != 1:
            raise DoesNotApply(f"{mutant.name}: {old!r} occurs {times} times in {mutant.file}: bring it up to date")
        text = text.replace(old, new)
    return text


def build_core() -> Path:
    """The explorer without a bug, and libtelegrad.a beside it, where `make test` has them; what is up to date stays."""
    if not (BUILT / "CMakeCache.txt").exists():
        _run(["cmake", "-S", str(CORE), "-B", str(BUILT), "-G", "Ninja", "--log-level=WARNING"])
    _run(["cmake", "--build", str(BUILT), "--target", "explore"])
    BUILD.mkdir(parents=True, exist_ok=True)
    _run([*_CXX, "-c", str(ROOT / "tests" / "mutants" / "explore_main.cpp"), "-o", str(_MAIN)])
    return BUILT / "explore"


def plant(mutant: Mutant) -> Path:
    """The explorer with the bug. Raises ``DoesNotApply`` and ``DoesNotBuild``. Needs ``build_core()``."""
    folder = BUILD / "".join(character if character.isalnum() else "_" for character in mutant.name)
    folder.mkdir(parents=True, exist_ok=True)
    source, binary = folder / Path(mutant.file).name, folder / "explore"
    source.write_text(mutate(mutant))
    if mutant.is_python:
        module = ".".join(("telegrad", *Path(mutant.file.removesuffix("/__init__.py")).with_suffix("").parts))
        return write_explorer(binary, ["--plant", f"{module}={source}"])
    library = BUILT / "libtelegrad.a"
    _run([*_CXX, str(_MAIN), str(source), str(library), "-pthread", "-o", str(binary)])
    return binary


def write_explorer(path: Path, options: Sequence[str] = ()) -> Path:
    """A program at ``path`` that explores shrink, grow and join in Python, with these options. Returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["env", "PYTHONHASHSEED=0", sys.executable, str(_EXPLORER), *options])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def search(binary: Path, first_seed: int, ranks: str, cpu_s: float) -> tuple[dict[str, object] | None, float]:
    """The first failure from ``first_seed`` on, or None, and the processor time that it took."""
    most = int(cpu_s) + 1

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    command = [str(binary), "--stop", "--first-seed", str(first_seed), "--seeds", str(SEEDS), "--ranks", ranks]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=limit) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    failures = json.loads(said)["failures"] if said else []
    return failures[0] if failures else None, usage.ru_utime + usage.ru_stime


def hunt(mutant: Mutant, clean: Path) -> Found:
    """Looks for a mutant until it is found or ``CPU_LIMIT_S`` is used up. ``clean``: the core's explorer."""
    if mutant.is_python:
        clean = write_explorer(BUILD / "explore_membership")
    began_s = time.monotonic()
    binary = plant(mutant)
    build_s = time.monotonic() - began_s
    cpu_s, seed = 0.0, 0
    while cpu_s < CPU_LIMIT_S:
        failure, used_s = search(binary, seed, mutant.ranks, CPU_LIMIT_S - cpu_s)
        cpu_s += used_s
        if failure is None:
            break
        seed = int(str(failure["seed"]))
        if is_clean(clean, seed, mutant.ranks):
            detail = str(failure.get("detail", "")).partition("\n")[0]
            return Found(mutant.name, mutant.file, seed, str(failure["what"]), detail, cpu_s, build_s)
        seed += 1
    return Found(mutant.name, mutant.file, None, "not found", "", cpu_s, build_s)


def is_clean(binary: Path, seed: int, ranks: str) -> bool:
    """Whether a seed shows nothing."""
    command = [str(binary), "--stop", "--first-seed", str(seed), "--seeds", "1", "--ranks", ranks]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def hunt_all(mutants: Sequence[Mutant], jobs: int) -> list[Found]:
    """All of them, ``jobs`` at a time; tells each as it is found."""
    for mutant in mutants:
        mutate(mutant)  # says what does not apply before minutes have passed
    clean = Path() if all(mutant.is_python for mutant in mutants) else build_core()

    def one(mutant: Mutant) -> Found:
        found = hunt(mutant, clean)
        where = "NOT FOUND" if found.seed is None else f"seed {found.seed}"
        print(f"{found.name:<66} {where:>12} {found.what:<12} {found.cpu_s:7.2f} s", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, mutants))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise DoesNotBuild(f"{shlex.join(command)}\n{done.stdout}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--match", default="", help="only mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args()
    if not options.all and not options.match:
        parser.error("choose --all, or some with --match")
    found = hunt_all([mutant for mutant in MUTANTS + MEMBERSHIP_MUTANTS if options.match in mutant.name], options.jobs)
    missed = [one.name for one in found if one.seed is None]
    slowest = max((one.cpu_s for one in found), default=0.0)
    print(f"{len(found) - len(missed)} of {len(found)} found; the slowest took {slowest:.1f} s of processor time")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
