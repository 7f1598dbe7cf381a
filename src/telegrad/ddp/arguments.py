"""What DDPState accepts: each check names the argument, what was given, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from telegrad import _core
from telegrad.communicator.operands import formats_named, on_device
from telegrad.ddp.backward_watch import check_no_optimizer_in_backward
from telegrad.ddp.bucket import COMPRESSIBLE, check_dtype

Named = dict[str, torch.nn.Parameter]


def checked_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[Named, Named]:
    """Those that require a gradient, and the others, by name. Raises ``TypeError`` and ``ValueError`` for what is no
    such list."""
    if isinstance(named, torch.nn.Module) or not isinstance(named, Iterable):
        raise TypeError(
            f"named_parameters is a {type(named).__name__}: pass ddp.named_parameters(), which gives pairs of a name "
            "and a parameter"
        )
    parameters: Named = {}
    frozen: Named = {}
    owners: dict[int, str] = {}
    for item in named:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise TypeError(
                f"named_parameters gives a {type(item).__name__}: pass ddp.named_parameters(), not ddp.parameters()"
            )
        name, parameter = item
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"parameter {name!r} is a {type(parameter).__name__}: it must be a torch tensor")
        if not parameter.requires_grad:
            frozen[name] = parameter
            continue
        if name in parameters:
            raise ValueError(
                f"named_parameters names {name!r} twice: names must be unique, residuals are stored under them"
            )
        if id(parameter) in owners:
            raise ValueError(
                f"parameters {owners[id(parameter)]!r} and {name!r} are the same tensor: name a shared parameter "
                "once, as named_parameters() does by default"
            )
        check_dtype(parameter.dtype, name, on_device=on_device(parameter))
        parameters[name] = parameter
        owners[id(parameter)] = name
    if not parameters:
        raise ValueError(
            "named_parameters has no parameter that requires a gradient: pass ddp.named_parameters() of the model"
        )
    check_no_optimizer_in_backward(parameters, "the DDP hook")
    return parameters, frozen


def encoding_of_wire(wire: str, parameters: Mapping[str, torch.nn.Parameter]) -> _core.ValueEncoding:
    """How ``wire`` holds the values of gradients: native if it rounds none of them.

    Raises ``ValueError`` for a wire that does not exist, ``TypeError`` for one that a gradient cannot take.
    """
    if wire is None:  # for all_reduce it means the default
        raise ValueError("wire=None does not exist: use 'auto', or leave it out")
    encodings = set()
    for name, parameter in parameters.items():
        if parameter.dtype not in COMPRESSIBLE:
            continue  # it is sent densely, as it is
        dtype = "f32" if parameter.dtype == torch.float32 else "bf16"
        try:
            encodings.add(formats_named(wire, dtype).values)
        except TypeError as error:
            raise TypeError(
                f"wire={wire!r} does not fit parameter {name!r} of {parameter.dtype}: only float32 gradients can be "
                "encoded; use 'auto'"
            ) from error
    return next((one for one in encodings if one != _core.ValueEncoding.native), _core.ValueEncoding.native)


def check_choice(value: str, argument: str, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{argument}={value!r} does not exist: use one of {', '.join(choices)}")
