"""The command ``telegrad``: one file per subcommand, and what their standard output does. Needs the extra ``cli``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class Command:
    """A subcommand: ``function`` of ``module``, or its Typer app, which has commands of its own.

    ``needs``: packages without which it cannot run, or (after a colon) not with that parameter; ``extra`` brings them.
    """

    name: str
    module: str
    function: str
    needs: tuple[str, ...] = ()
    extra: str = "cli"


COMMANDS = (
    Command("doctor", "telegrad.tools.cli.doctor", "doctor"),
    Command("env", "telegrad.tools.cli.doctor", "env"),
    Command("test", "telegrad.tools.cli.selftest", "selftest"),
    Command("report", "telegrad.tools.cli.report", "report", needs=("matplotlib:plot_file",)),
    Command("bench", "telegrad.tools.cli.bench", "app", needs=("matplotlib:plot_file",)),
    Command("calibrate", "telegrad.tools.cli.calibrate", "calibrate", needs=("matplotlib:plot_file",)),
    Command("simulate", "telegrad.tools.cli.simulate", "app", needs=("matplotlib:plot_file",)),
    Command("advise", "telegrad.tools.cli.advise", "advise", needs=("matplotlib:plot_file",)),
    Command("profile", "telegrad.tools.cli.profile", "profile", needs=("matplotlib:plot_file",)),
    Command("linear", "telegrad.tools.cli.linear", "app", needs=("matplotlib:plot_file",)),
    Command("demo", "telegrad.tools.cli.demo", "demo", needs=("matplotlib",), extra="demo"),
)


_ABOUT = "Sparse and dense gradient exchange for data-parallel training."


def main() -> None:
    """The entry point. Commands are imported here, so that ``import telegrad.tools.cli`` needs no extra: only the one
    that is called, as all of them take longer to import than many take to run."""
    try:
        import rich as _rich  # noqa: F401
        import typer as _typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"telegrad's commands need {error.name}: pip install 'telegrad[cli]'")

    try:
        with standard_output():
            make_app([command for command in COMMANDS if [command.name] == sys.argv[1:2]] or COMMANDS)()
    except KeyboardInterrupt:  # while commands are imported: what they do themselves, they end themselves
        sys.exit(130)


def make_app(commands: Sequence[Command] = COMMANDS, *, program: str = "telegrad", about: str = _ABOUT) -> Any:
    """The Typer app with these commands. One that cannot be imported here says why when it is called. ``program``: what
    users call it; ``about``: the first sentence of its help."""
    import typer

    app = typer.Typer(
        help=about, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
    )

    def say_version(asked: bool) -> None:
        if asked:
            print(f"telegrad {metadata.version('telegrad')}")
            raise typer.Exit

    # There must be a callback: else Typer takes an app of one command for that command.
    option = typer.Option(False, "--version", help="Print telegrad's version.", callback=say_version, is_eager=True)

    @app.callback()
    def _(version: bool = option) -> None:
        pass

    for command in commands:
        try:
            found = getattr(importlib.import_module(command.module), command.function)
        except ImportError as error:  # without the compiled core the doctor must still come
            app.command(command.name, context_settings=_ANY_ARGUMENTS)(_unavailable(program, command, error))
            continue
        if isinstance(found, typer.Typer):
            for inner in found.registered_commands:
                if inner.callback is not None:
                    inner.callback = _as_called(program, command, inner.callback)
            app.add_typer(found, name=command.name)
        else:
            app.command(command.name)(_as_called(program, command, found))
    return app


_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _as_called(program: str, command: Command, function: Callable[..., None]) -> Callable[..., None]:
    """``function``, which first says what it lacks: at once, not after minutes of measurement. However it is
    interrupted, it cleans up; one that has more to say of that says it itself."""
    from rich.console import Console

    from telegrad.tools.cli.interrupts import ended_by_interrupt
    from telegrad.tools.doctor.installation import is_installed

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> None:
        for need in command.needs:
            package, _, parameter = need.partition(":")
            if (not parameter or options.get(parameter) is not None) and not is_installed(package):
                sys.exit(f"{program} {command.name} needs {package}: pip install 'telegrad[{command.extra}]'")
        with ended_by_interrupt(Console(stderr=True), "interrupted"):
            function(*arguments, **options)

    # Typer keeps the ends of a docstring's lines, of which a narrower terminal would break every one twice.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    call.__doc__ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    return call


def _unavailable(program: str, command: Command, reason: ImportError) -> Callable[[], None]:
    said = f"{program} {command.name} cannot start: {reason}\n`telegrad doctor` says what is missing and how to mend it"

    def call() -> None:
        sys.exit(said)

    call.__doc__ = f"Not available here: {reason}"
    return call


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Within it, characters that the encoding of standard output has not are replaced. If it cannot be written, the
    process ends with status 1 and one line that says why; without a line where its reader has seen enough."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")
    if sys.stdout is None:  # nobody would read it, and the next file that is opened would take its number
        raise SystemExit("standard output is closed: leave it open, or send it to /dev/null")
    if not isinstance(sys.stdout, io.TextIOWrapper):  # a test's
        yield
        return
    before, file = sys.stdout, _File(sys.stdout.fileno())
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(file), before.encoding, "replace", line_buffering=before.line_buffering
    )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BaseException as error:
        if file.failure is None:
            raise
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # what is not written yet cannot be
            os.dup2(nothing.fileno(), file.fileno())
        if not isinstance(file.failure, BrokenPipeError):
            with contextlib.suppress(OSError):  # it may be the same terminal
                sys.stderr.write(f"standard output cannot be written: {file.failure.strerror}\n")
        raise SystemExit(1) from error


class _File(io.FileIO):
    """``failure``: why it could not be written. Whoever caught the error may have taken it for another file's."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise
