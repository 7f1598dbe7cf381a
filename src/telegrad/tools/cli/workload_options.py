"""Options that say what a step computes, for the commands that predict steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.architectures import ARCHITECTURES
from telegrad.tools.advise.workload import DEVICES, Device, Workload, device_of, of_model, scaled
from telegrad.tools.cli.options import blaming, refuse_given

_COMPUTATION = "What a step computes"

ModelOption = Annotated[
    str,
    typer.Option(
        help=f"Known: {', '.join(ARCHITECTURES)}; or package.module:function, as for telegrad profile --meta.",
        rich_help_panel=_COMPUTATION,
        show_default=True,
    ),
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
        help="Mini-batch of a rank in one forward and backward pass. Default: the model's or the profile's own.",
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
        help="Milliseconds of one forward and backward pass on one rank. Default: the model's multiplications on the "
        "device, or the times of the trace.",
        rich_help_panel=_COMPUTATION,
        show_default=False,
    ),
]

GradientsOption = Annotated[
    str,
    typer.Option(
        help="What gradients of a known model are: float32; bfloat16, which has shorter messages and no quantised "
        "ones; or float16, which is sent densely. Computation is the device's, or --compute-ms.",
        rich_help_panel=_COMPUTATION,
    ),
]


def bytes_of_values(context: typer.Context, gradients: str, *, known: bool) -> int:
    """Of an element of ``gradients``. Raises ``BadParameter``, also for a step that is not ``known`` by its model."""
    widths = {"float32": 4, "bfloat16": 2, "float16": 2}
    if gradients not in widths:
        raise typer.BadParameter(f"{gradients!r} is not {', '.join(widths)}", param_hint="--gradients")
    if not known:
        refuse_given(context, ("gradients",), "the recorded or counted bytes of gradients are used")
    return widths[gradients]


def chosen_device(name: str) -> Device:
    """Raises ``BadParameter`` for a name that is not known."""
    with blaming("--device"):
        return device_of(name)


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
    if trace is None and ":" in model:
        return _counted(model, samples, device, compute_ms, fixed_ms)
    if trace is None:
        if model not in ARCHITECTURES:
            raise typer.BadParameter(
                f"{model!r} is not known: use one of {', '.join(ARCHITECTURES)}, name a function that makes yours, as "
                "package.module:function, or give a recorded profile with --trace",
                param_hint="--model",
            )
        compute_s = None if compute_ms is None else compute_ms / 1e3
        try:
            return of_model(model, device, samples=samples, compute_s=compute_s, fixed_s=fixed_ms / 1e3)
        except ValueError as error:
            raise _blaming(error, samples) from error
    refuse_given(context, ("model",), "--trace says what a step computes")
    return _of_trace(_read(trace), trace.stem, samples, compute_ms, fixed_ms, source=str(trace))


def _of_trace(
    found: Trace, name: str, samples: float | None, compute_ms: float | None, fixed_ms: float, *, source: str
) -> Workload:
    """A recorded or counted step: of as many samples as it says, or, if it does not, as it is told."""
    if compute_ms is not None:
        if not found.compute_s:
            raise typer.BadParameter(
                f"all times of {source} are 0, and nothing says how to divide {compute_ms:g} ms: leave this out, or "
                "record another profile",
                param_hint="--compute-ms",
            )
        about = f"{found.about or name}, scaled to {compute_ms:g} ms by --compute-ms"
        found = replace(scaled(found, compute_ms / 1e3 / found.compute_s), about=about)
    own = found.samples if compute_ms is None else samples  # whose time --compute-ms is
    made_of = own or samples or found.samples or 1.0
    try:
        made = Workload(name, found, made_of, fixed_ms / 1e3, found.accumulate)
        return made if samples is None else made.of(samples)
    except ValueError as error:
        raise _blaming(error, samples) from error


def _counted(target: str, samples: float | None, device: Device, compute_ms: float | None, fixed_ms: float) -> Workload:
    """The step of the model that a function makes, from its shapes."""
    try:
        from telegrad.tools.bench import model_profile
    except ImportError as error:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[torch]'") from error
    with as_bad_parameter("--model"):
        factory = model_profile.open_factory(target)
        found = model_profile.profile_on_meta(factory, None, device)
        own = model_profile.samples_of(factory, None)
    about = f"{target}, counted for {device.name}"
    return _of_trace(replace(found, about=about, samples=own), target, samples, compute_ms, fixed_ms, source=target)


@contextmanager
def as_bad_parameter(option: str) -> Iterator[None]:
    """Raises ``BadParameter`` of ``option`` for a ``FactoryError``."""
    from telegrad.tools.bench.model_profile import FactoryError

    try:
        yield
    except FactoryError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


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
