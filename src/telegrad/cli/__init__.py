"""The command ``telegrad``: one file per subcommand. Needs the extra ``cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point. Commands are imported here, so that ``import telegrad.cli`` needs no extra."""
    try:
        import matplotlib as _matplotlib  # noqa: F401
        import rich as _rich  # noqa: F401
        import typer
    except ModuleNotFoundError as error:
        sys.exit(f"telegrad's commands need {error.name}: pip install 'telegrad[demo]'")
    from telegrad.cli import bench, demo

    app = typer.Typer(
        help="Sparse and dense gradient exchange for data-parallel training.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.command()(demo.demo)
    app.add_typer(bench.app, name="bench")
    app()
