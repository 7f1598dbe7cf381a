"""What exchanges for trainers that wrap models themselves have in common: their options, and what waits from one fit to
the next, each of which has a DDPState of its own. No trainer is known here."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from telegrad.communicator import Communicator
from telegrad.ddp.choices import tell_of_clipping
from telegrad.ddp.hook import DDPState
from telegrad.ddp.options import AUTO, TopK, averages_are_whole, resolved_compress
from telegrad.ddp.rank_state import GROUPS
from telegrad.errors import NonFiniteGradient, TransportError


def divided_options(owner: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of ``Communicator.from_torch`` and those of DDPState. Raises ``TypeError`` for one of neither, as an
    argument that ``owner`` does not have."""
    of_state, of_comm = _keywords_of(DDPState), _keywords_of(Communicator.from_torch)
    for name in options:
        if name not in of_state | of_comm:
            meant = next((one for one in of_state | of_comm if name.startswith(one)), None)
            raise TypeError(
                f"{owner} has no argument {name!r}: its options are those of DDPState and of Communicator.from_torch"
                + (f", such as {meant}=" if meant else "")
            )
    joining = {name: value for name, value in options.items() if name in of_comm}
    return joining, {name: value for name, value in options.items() if name in of_state}


def with_found(options: Mapping[str, Any], optimizers: Sequence[Any], scaler: Any) -> dict[str, Any]:
    """``options`` of DDPState, with the optimizer and the scaler of a trainer where they are needed and not given.

    Raises ``ValueError`` where momentum correction or ``feedback="steps"`` would have to choose among optimizers."""
    found = dict(options)
    compress = options.get("compress")
    if options.get("momentum") is not None or (isinstance(compress, TopK) and compress.feedback == "steps"):
        if len(optimizers) != 1:
            raise ValueError(f"the model has {len(optimizers)} optimizers: feedback='steps' and momentum are for one")
        found = {"optimizer": optimizers[0], **found}
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and "scaler" not in options:
        found = {"nonfinite": "skip", **found, "scaler": scaler}
    return found


def may_wait(options: Mapping[str, Any]) -> bool:
    """Whether a DDPState with these options has a residual or a velocity to lose."""
    return _compresses(options) or options.get("momentum") is not None


def warn_of_clipping(options: Mapping[str, Any], norm: float | None, remedy: str) -> None:
    """Where a trainer clips averages to ``norm``, which hold gradients of several steps where they are sparse.
    Those of low rank hold little of them.

    Hugging Face's Trainer does so by default: docs/how-to/clipping.md says what that costs.
    """
    compress = resolved_compress(options.get("compress", AUTO), options.get("momentum"), options.get("warmup"))
    if norm and not averages_are_whole(compress):
        what = f"the trainer clips averaged gradients to a norm of {norm:g}"
        tell_of_clipping(what, f"use {remedy}", norm=f"{norm:g}", rank=torch.distributed.get_rank())


def _compresses(options: Mapping[str, Any]) -> bool:
    return "compress" not in options or options["compress"] is not None


def close_for_next(state: DDPState) -> dict[str, Any] | None:
    """Closes the communicator of a fit that is over. What was not sent there, for ``go_on``; nothing, with a
    ``RuntimeWarning``, where that cannot be known any more."""
    try:
        return state.state_dict()
    except (TransportError, NonFiniteGradient) as error:  # of sums on a device
        warnings.warn(f"the gradients that the fit before had not sent are lost ({error})", RuntimeWarning, 3)
        return None
    finally:
        state.comm.close()


def go_on(state: DDPState, waiting: dict[str, Any]) -> None:
    """``state``, which is new, takes over what is ``waiting`` for parameters that it has; a ``RuntimeWarning`` says how
    much that leaves."""
    here = state.state_dict()["compressor"]
    held = waiting["compressor"]
    fitting, left = {**held}, {**held}
    for group in GROUPS:
        ours, theirs = here.get(group, {}), held.get(group, {})
        if ours:
            fitting[group] = {name: theirs.get(name, entry) for name, entry in ours.items()}
        left[group] = {name: entry for name, entry in theirs.items() if name not in ours}
    warn_of_loss({**waiting, "compressor": left}, "these parameters are frozen now, or not in the model")
    state.load_state_dict({**waiting, "compressor": fitting})


def warn_of_loss(waiting: dict[str, Any], why: str) -> None:
    """Says how much it was, if it was anything."""
    for group, kind in GROUPS.items():
        norms = {
            name: float(entry[kind].double().norm()) * entry["unit"]
            for name, entry in waiting["compressor"].get(group, {}).items()
        }
        if any(norms.values()):
            warnings.warn(
                f"a {kind} of norm {math.hypot(*norms.values()):.3g}, of {len(norms)} parameters, such as "
                f"{next(iter(norms))!r}, does not go on: {why}",
                RuntimeWarning,
                3,
            )


def _keywords_of(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
