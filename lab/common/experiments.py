"""Which experiments there are, and how one is called: ``python -m lab EXPERIMENT``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from typing import Any

from lab.common.programs import ROOT
from telegrad.tools.cli import Command, make_app, standard_output

FOLDER = ROOT / "lab"
PROGRAM = "python -m lab"


def experiments() -> dict[str, str]:
    """The first sentence about each, by its name on the command line. None of them is imported."""
    files = [path for path in FOLDER.glob("*.py") if not path.name.startswith("__")]
    packages = [path.parent / "__init__.py" for path in FOLDER.glob("*/command.py")]
    found = {(path.parent.name if path.name == "__init__.py" else path.stem): path for path in (*files, *packages)}
    return {name.replace("_", "-"): _first_line(found[name].read_text()) for name in sorted(found)}


def app(names: Sequence[str] | None = None) -> Any:
    """The Typer app with these experiments, or with all, which are imported."""
    return make_app(
        [_command(name) for name in (experiments() if names is None else names)],
        program=PROGRAM,
        about="Experiments that show what telegrad's claims rest on.",
    )


def main() -> None:
    """Runs the experiment that the command line names, or lists all."""
    known = experiments()
    try:
        with standard_output():
            if (name := next(iter(sys.argv[1:]), "--help")) in known:
                app([name])(prog_name=PROGRAM)
            elif name == "--help":
                _list(known)
            else:
                sys.exit(f"{name!r} is no experiment: use one of {', '.join(known)}")
    except KeyboardInterrupt:  # while an experiment is imported: what it does itself, it ends itself
        sys.exit(130)


def _command(name: str) -> Command:
    module = name.replace("-", "_")
    place = f"lab.{module}.command" if (FOLDER / module).is_dir() else f"lab.{module}"
    return Command(name, place, "command", needs=("matplotlib:plot_file",))


def _list(known: dict[str, str]) -> None:
    print(f"Usage: {PROGRAM} EXPERIMENT [OPTIONS]\n\nExperiments (each has its own --help):\n")
    width = max(map(len, known))
    for name, about in known.items():
        print(f"  {name:{width}}  {about}")


def _first_line(source: str) -> str:
    about = ast.get_docstring(ast.parse(source))
    assert about, "an experiment begins with a sentence about it"
    return about.splitlines()[0]
