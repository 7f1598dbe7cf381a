"""Runs the tests of what touches torch, numpy and Triton with their oldest and newest supported releases, each in an
environment of its own, and writes what passed into docs/reference/compatibility.md. `make compatibility` calls it.

    python tests/compatibility/run_compatibility.py --wheel FILE.whl [--rows oldest] [--tests FOLDER …]

A row is a file of pinned releases beside this one; other tools are those of constraints.txt. An interrupted run
goes on where it stopped: environments stay in build/compatibility/, and so do the counts of folders whose tests ran
with this wheel, these pins and these sources of the tests. A row takes 5 GB where pip brings torch for CUDA.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "compatibility"
ROWS = ("oldest", "newest")
DOCUMENT = ROOT / "docs" / "reference" / "compatibility.md"
MARKERS = "<!-- begin make compatibility -->", "<!-- end make compatibility -->"
FOLDERS = (
    *("tests/python/torch_backend", "tests/python/compress", "tests/conformance"),
    *("tests/python/ddp", "tests/python/synchronizer", "tests/python/integrations", "tests/python/diloco"),
)
SHOWN = ("torch", "numpy", "triton", "mpich")  # the columns of versions
EXTRAS = ("cli", "linear", "estimators", "lightning", "accelerate", "transformers", "test")
OTHERS = ("libucx-cu12", "nanobind", "cmake", "ninja")  # what tests of the package's own build ask for
LEFT_OUT = ("ruff", "mypy")


class SetupFailed(Exception):  # noqa: N818
    """An environment could not be made."""


@dataclass(frozen=True)
class Counts:
    """Of one folder's tests; ``errors`` of fixtures count as failed."""

    passed: int
    skipped: int
    failed: int

    def __str__(self) -> str:
        return f"{self.passed} / {self.skipped} / {self.failed}"


@dataclass(frozen=True)
class Row:
    """What ran in one environment. ``versions``: of SHOWN and of Python. ``counts``: by folder."""

    name: str
    date: str
    versions: dict[str, str]
    counts: dict[str, Counts]


def pins(text: str) -> dict[str, str]:
    """Releases by package, from lines such as ``torch==2.6.0  # why``."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = dict(line.split("==") for line in lines if line)
    return {name.lower(): version for name, version in found.items()}


def constraints(row: str, common: str, names: Iterable[str]) -> str:
    """The pins of a row, and those of ``common`` for other packages of ``names``. The text of a constraints file.

    What those packages require is left to pip: old releases refuse the newest of it."""
    others = {name: version for name, version in pins(common).items() if name in set(names)}
    return "".join(f"{name}=={version}\n" for name, version in {**others, **pins(row)}.items())


def requirements(project: dict[str, object]) -> list[str]:
    """What the tests need, by name alone: a row's constraints give the releases, some below pyproject.toml's bounds."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]  # type: ignore[index, misc]
    names = {re.match(r"[\w.-]+", one)[0].lower() for one in wanted}  # type: ignore[index]
    return sorted((names | {"torch", *OTHERS}) - {"telegrad", *LEFT_OUT})


def sum_of(folders: Iterable[Path], wheel: Path, text: str) -> str:
    """Of all that a count depends on: files of the tests, the wheel's members (not its dates), the pins."""
    total = hashlib.sha256(text.encode())
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    with zipfile.ZipFile(wheel) as members:
        total.update(repr(sorted((one.filename, one.CRC) for one in members.infolist())).encode())
    return total.hexdigest()


def run(command: Sequence[str | Path], constraint: Path, log: Path) -> None:
    """Raises ``SetupFailed`` with the end of what the command wrote."""
    # PIP_CONSTRAINT and not -c: it takes the place of a machine's own constraints, which may exclude a row's releases.
    environment = {**os.environ, "PIP_CONSTRAINT": str(constraint)}
    with log.open("ab") as output:
        done = subprocess.run(list(map(str, command)), stdout=output, stderr=output, env=environment)
    if done.returncode != 0:
        raise SetupFailed(f"{' '.join(map(str, command))[:200]} … ended with {done.returncode}: {log} says why")


def environment(folder: Path, row: str, wheel: Path) -> Path:
    """The Python that has the row's packages and the wheel; what is there already stays. Raises ``SetupFailed``."""
    folder.mkdir(parents=True, exist_ok=True)
    constraint, log, python = folder / "constraints.txt", folder / "setup.log", folder / "venv" / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraint.write_text(constraints(row, (ROOT / "constraints.txt").read_text(), requirements(project)))
    wanted = [*requirements(project), constraint.read_text(), sys.version]
    made = folder / "made_from"
    if not python.exists() or not made.exists() or made.read_text() != "\n".join(wanted):
        log.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
        run([sys.executable, "-m", "venv", "--clear", folder / "venv"], constraint, log)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-warn-script-location"]
        run([*pip, *requirements(project)], constraint, log)
        made.write_text("\n".join(wanted))
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    run([*install, wheel], constraint, log)
    return python


def counted(report: Path) -> Counts:
    """From a report in JUnit's format."""
    passed = skipped = failed = 0
    for case in ET.parse(report).getroot().iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed += 1
        elif "skipped" in outcomes:
            skipped += 1
        else:
            passed += 1
    return Counts(passed, skipped, failed)


def tested(python: Path, tests: str, folder: Path, workers: int) -> Counts:
    """Runs a folder's tests. Raises ``SetupFailed`` where pytest itself does not come to its end."""
    name = tests.strip("/").replace("/", "-")
    report, output = folder / f"{name}.xml", folder / f"{name}.txt"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", tests]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    with output.open("wb") as file:
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, stdout=file, stderr=file, env={**os.environ, "PATH": path}
        )
    if done.returncode not in (0, 1) or not report.exists():
        raise SetupFailed(f"pytest {tests} ended with {done.returncode}: {output} says why")
    return counted(report)


def versions_of(python: Path) -> dict[str, str]:
    program = f"""
import importlib.metadata, json, platform
print(json.dumps({{"Python": platform.python_version(), **{{n: importlib.metadata.version(n) for n in {SHOWN!r}}}}}))"""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def table(rows: Sequence[Row], folders: Sequence[str] = FOLDERS) -> list[str]:
    """The lines of a table in Markdown."""
    titles = ["", "date", "Python", *SHOWN, *(f"`{folder}`" for folder in folders)]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        cells = [row.name, row.date, row.versions["Python"], *(row.versions[name] for name in SHOWN)]
        cells += [str(row.counts.get(folder, "not run")) for folder in folders]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def replaced(document: str, rows: Sequence[Row]) -> str:
    """``document`` with the rows' lines in its table; those of other rows stay. Raises ``ValueError`` where a marker is
    missing."""
    begin, end = MARKERS
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the document needs one line {begin!r} and one {end!r}")
    before, rest = document.split(begin)
    old, after = rest.split(end)
    head, rule, *lines = table(rows)
    kept = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[2:]} if head in old else {}
    kept |= {row.name: line for row, line in zip(rows, lines, strict=True)}
    ordered = [kept[name] for name in ROWS if name in kept]
    return f"{before}{begin}\n" + "\n".join([head, rule, *ordered]) + f"\n{end}{after}"


def run_row(name: str, wheel: Path, folders: Sequence[str], workers: int) -> Iterator[Row]:
    """The row, as far as it has come, after each folder. Raises ``SetupFailed``."""
    text, folder = (HERE / f"{name}.txt").read_text(), BUILD / name
    print(f"{name}: environment in {folder.relative_to(ROOT)}", flush=True)
    python = environment(folder, text, wheel)
    versions = versions_of(python)
    print(f"{name}: {', '.join(f'{package} {version}' for package, version in versions.items())}", flush=True)
    state = sum_of([ROOT / "tests", ROOT / "examples"], wheel, (folder / "constraints.txt").read_text())
    kept = folder / "counts.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    found = (
        {one: Counts(**counts) for one, counts in known.get("counts", {}).items()} if known.get("of") == state else {}
    )
    for number, tests in enumerate(folders, 1):
        begun_s = time.monotonic()
        if tests in found and found[tests].failed == 0:
            print(f"{name}: {number} of {len(folders)}: {tests}: {found[tests]}, from an earlier run", flush=True)
            yield Row(name, date.today().isoformat(), versions, dict(found))
            continue
        print(f"{name}: {number} of {len(folders)}: {tests} …", end="", flush=True)
        found[tests] = tested(python, tests, folder, workers)
        kept.write_text(json.dumps({"of": state, "counts": {one: asdict(counts) for one, counts in found.items()}}))
        print(f" {found[tests]} (passed / skipped / failed), {(time.monotonic() - begun_s) / 60:.0f} min", flush=True)
        yield Row(name, date.today().isoformat(), versions, dict(found))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tests with the oldest and newest supported releases.")
    parser.add_argument("--wheel", type=Path, required=True, help="telegrad's, of this tree")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--tests", nargs="+", default=FOLDERS, metavar="FOLDER", help="other folders: the table stays")
    parser.add_argument("--workers", type=int, default=2, help="test processes at a time")
    given = parser.parse_args(arguments)
    if not given.wheel.is_file():
        parser.error(f"--wheel={given.wheel} is no file: build it (make compatibility does)")
    rows: dict[str, Row] = {}
    try:
        for name in given.rows:
            for row in run_row(name, given.wheel.resolve(), given.tests, given.workers):
                rows[name] = row
                if tuple(given.tests) == FOLDERS:
                    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), [row]))
    except SetupFailed as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2
    print("\n".join(table([*rows.values()], given.tests)))
    return int(any(counts.failed for row in rows.values() for counts in row.counts.values()))


if __name__ == "__main__":
    sys.exit(main())
