"""What simulations of sparse sums are asked for alike: formats on the wire, and which algorithms have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from telegrad import _core
from telegrad.comm.stream_wire import formats_named

WireOption = Annotated[
    str,
    typer.Option(
        help="How messages hold entries: [bold]raw[/] or [bold]blocked[/] indices, [bold]packed[/] indices and values "
        "or packed [bold]indices[/] alone, and values as they are or as bf16, f16, int8, qsgd8, qsgd4, qsgd2 or their "
        "mean: [bold]packed-bf16[/]. [bold]auto[/]: as a communicator does that is calibrated on this network."
    ),
]


def sparse_algorithms(chosen: Sequence[str], wire: str, *, all_of_them: bool) -> tuple[str, ...]:
    """``chosen``, and of ``all_of_them`` only those that ``wire`` is for: recursive doubling takes no rounded values.
    Raises ``BadParameter``."""
    try:
        encoding = formats_named(wire, "f32").values
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--wire") from error
    if encoding == _core.ValueEncoding.native:
        return tuple(chosen)
    if "recursive_doubling" in chosen and not all_of_them:
        raise typer.BadParameter(
            f"recursive_doubling takes no rounded values, as {wire!r} makes them: use another --algorithm",
            param_hint="--wire",
        )
    return tuple(name for name in chosen if name != "recursive_doubling")
