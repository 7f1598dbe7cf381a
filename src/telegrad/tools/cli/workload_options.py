"""Options that say what a step computes, for the commands that predict steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.workload import ARCHITECTURES, DEVICES, Device, Workload, device_of, of_model, scaled
from telegrad.tools.cli.options import refuse_given

_COMPUTATION = "What a step computes"

ModelOption = Annotated[
    str, typer.Option(help=f"Known: {', '.join(ARCHITECTURES)}.", rich_help_panel=_COMPUTATION, show_default=True)
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        exists=True,
        dir_okay=False,
        help="A recorded profile instead of a known model: what Trace.to_json() wrote (docs/explanation/planning.md).",
        rich_help_panel=_COMPUTATION,
        show_default=False,
    ),
]
SamplesOption = Annotated[
    float | None,
    typer.Option(
        help="Mini-batch of a rank. Default: 32 images (AlexNet 128), 8 or 4 long sequences, 20 short ones; 1 with "
        "--trace.",
        rich_help_panel=_COMPUTATION,
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help=f"What computes: {', '.join(DEVICES)}. An assumption, which the output states.",
        rich_help_panel=_COMPUTATION,
    ),
]
ComputeOption = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds of a step, forward and backward, on one rank. Default: the model's multiplications on the "
        "device, or what the trace says.",
        rich_help_panel=_COMPUTATION,
        show_default=False,
    ),
]


def chosen_device(name: str) -> Device:
    """Raises ``BadParameter`` for a name that is not known."""
    try:
        return device_of(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def chosen_workload(
    context: typer.Context,
    model: str,
    trace: Path | None,
    samples: float | None,
    device: Device,
    compute_ms: float | None,
    fixed_ms: float = 0.0,
) -> Workload:
    """Raises ``BadParameter`` for what makes no sense, naming the option."""
    if samples is not None and not 0 < samples < float("inf"):
        raise typer.BadParameter(f"{samples:g} is no mini-batch: use a number above 0", param_hint="--samples")
    if compute_ms is not None and not 0 < compute_ms < float("inf"):
        raise typer.BadParameter(f"{compute_ms:g} is no time: use milliseconds above 0", param_hint="--compute-ms")
    if not 0 <= fixed_ms < float("inf"):
        raise typer.BadParameter(f"{fixed_ms:g} is no time: use milliseconds, 0 or more", param_hint="--fixed-ms")
    if trace is None:
        if model not in ARCHITECTURES:
            raise typer.BadParameter(
                f"{model!r} is not known: use one of {', '.join(ARCHITECTURES)}, or give a recorded profile with "
                "--trace",
                param_hint="--model",
            )
        compute_s = None if compute_ms is None else compute_ms / 1e3
        try:
            return of_model(model, device, samples=samples, compute_s=compute_s, fixed_s=fixed_ms / 1e3)
        except ValueError as error:
            raise _blaming(error, samples) from error
    refuse_given(context, ("model",), "--trace says what a step computes")
    recorded = _read(trace)
    if compute_ms is not None:
        if not recorded.compute_s:
            raise typer.BadParameter(
                f"all times of {trace} are 0, and nothing says how to divide {compute_ms:g} ms: leave this out, or "
                "record another profile",
                param_hint="--compute-ms",
            )
        about = f"{recorded.about or trace.stem}, scaled to {compute_ms:g} ms by --compute-ms"
        recorded = replace(scaled(recorded, compute_ms / 1e3 / recorded.compute_s), about=about)
    try:
        return Workload(trace.stem, recorded, 1.0 if samples is None else samples, fixed_ms / 1e3)
    except ValueError as error:
        raise _blaming(error, samples) from error


def _blaming(error: ValueError, samples: float | None) -> typer.BadParameter:
    """Of a workload; how long its step takes follows from the mini-batch where that is given."""
    takes = "--compute-ms" if samples is None else "--samples"
    option = {"samples": "--samples", "compute_s": takes}.get(str(error).partition("=")[0], "--fixed-ms")
    return typer.BadParameter(str(error), param_hint=option)


def _read(path: Path) -> Trace:
    try:
        found = Trace.from_json(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--trace") from error
    if not found.bytes:
        raise typer.BadParameter(f"{path} has no gradients: record another profile", param_hint="--trace")
    return found
