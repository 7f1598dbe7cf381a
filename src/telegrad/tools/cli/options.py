"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from telegrad.tools.bench.plan import check_network, size_of

# Options that several commands have, and values that they take as text. Each function names the option, the value and
# the remedy.

Number = TypeVar("Number", int, float)

_UNITS = {"": 1, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}

RowsFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write all rows, the machine and the commit here.")
]
CalibratesFirst = Annotated[
    bool,
    typer.Option(
        "--calibrate/--no-calibrate",
        help="Calibrate on each network first (about 7 s; not kept), as telegrad calibrate does. Otherwise "
        "the automatic choice is what a calibration has kept, or the built-in one.",
    ),
]
JobTimeout = Annotated[float, typer.Option(min=1, help="Seconds after which a job is given up.")]


@contextmanager
def blaming(option: str) -> Iterator[None]:
    """Within it, a ``ValueError`` is a bad value of ``option``: raises ``BadParameter``."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def bad_setting(error: Exception, names: Collection[str], told: Callable[[str], str] = str) -> typer.BadParameter:
    """``error`` as that of an option, if it begins with ``name=value`` of one of ``names``, which options are called by
    too. ``told``: how the rest is to be said."""
    said = str(error)
    found = re.match(r"(\w+)=('[^']*'|[^\s,:;]+) ", said)
    if found is None or found[1] not in names:
        return typer.BadParameter(told(said))
    value = "it" if found[2] == "True" else found[2].strip("'")
    return typer.BadParameter(told(f"{value} {said[found.end() :]}"), param_hint=f"--{found[1].replace('_', '-')}")


def networks_of(names: list[str]) -> list[str]:
    """``names``, all of which exist here. Raises ``BadParameter``."""
    with blaming("--network"):
        for name in names:
            check_network(name)
    return names


def among(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """The names in ``a,b``, all ``allowed``, each once. Raises ``BadParameter``."""
    found = [one.strip() for one in text.split(",")]
    for one in found:
        if one not in allowed:
            raise typer.BadParameter(f"{one!r} does not exist: use {', '.join(allowed)}", param_hint=option)
    return list(dict.fromkeys(found))


def byte_sizes(text: str) -> tuple[int, ...]:
    """The bytes of ``4,64KiB,16MiB``. Raises ``BadParameter``."""
    with blaming("--sizes"):
        return tuple(size_of(size) for size in text.split(","))


def count_of(text: str, least: int, most: int, option: str) -> int:
    """Of ``4``, ``1000`` or ``16Mi``, from ``least`` to ``most``. Raises ``BadParameter``."""
    digits = text.strip().lower().rstrip("kmgi")
    unit = text.strip().lower()[len(digits) :]
    if not digits.isdigit() or unit not in _UNITS or not least <= int(digits) * _UNITS[unit] <= most:
        raise typer.BadParameter(
            f"{text!r} is no number from {least} to {most}: write it like 4, 1000 or 16Mi", param_hint=option
        )
    return int(digits) * _UNITS[unit]


def numbers_of(text: str, number_of: Callable[[str], Number], factor: int, option: str) -> list[Number]:
    """Of ``4``, ``4,64`` or ``4..64``, ascending; a range grows by ``factor`` and ends with its end. Raises
    ``BadParameter``, also for a ``ValueError`` of ``number_of``."""
    found: set[Number] = set()
    with blaming(option):
        for part in text.split(","):
            first, dots, last = part.partition("..")
            numbers = [number_of(first)]
            if dots:
                end = number_of(last)
                if end < numbers[0]:
                    raise ValueError(f"range {part.strip()!r} ends before it begins: write the smaller number first")
                while (following := numbers[-1] * factor or factor) < end:
                    numbers.append(following)
                numbers.append(end)
            found.update(numbers)
    return sorted(found)


def densities_of(text: str, option: str) -> list[float]:
    """Of ``0.01``, ``1e-4,0.01`` or ``1e-6..0.5``, ascending; a range grows by 4 and ends with its end. Raises
    ``BadParameter`` for what is no part of 1."""
    return numbers_of(text, _density, 4, option)


def _density(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= 1:
        raise ValueError(f"{text!r} is no part of 1: use a number above 0, up to 1")
    return found


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has the option of this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raises ``BadParameter`` if the command line has the option of one of these parameters, which has no effect."""
    for name in names:
        if is_given(context, name):
            hint = next(one.opts[0] for one in context.command.params if one.name == name)
            raise typer.BadParameter(f"{why}: leave this out", param_hint=hint)


# GPUs.


def present_gpu(console: Console) -> str:
    """The name of the machine's GPU. Ends the command with status 1 where torch sees none."""
    from telegrad.tools.bench.device import gpu_name

    gpu = gpu_name()
    if gpu is None:
        console.print("no GPU: torch sees none here, and nothing was measured")
        raise typer.Exit(1)
    return gpu


def described_gpu(console: Console) -> dict[str, object]:
    """The machine and its GPU, for result files. Ends the command with status 1 where torch sees none, 2 where what
    communication of its tensors needs is not installed."""
    import importlib.util

    from telegrad.tools.bench.device import ENVIRONMENT, describe_gpu

    gpu = present_gpu(console)
    try:
        found = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        console.print("cuda-bindings is not installed: pip install 'telegrad[gpu]'", markup=False)
        raise typer.Exit(2)
    return {**describe_gpu(gpu), "environment": ENVIRONMENT}
