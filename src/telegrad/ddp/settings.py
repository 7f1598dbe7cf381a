"""From the options of DDPState and Synchronizer to a compressor."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import TypedDict, cast

import torch

from telegrad.compress import BySize, Compressor, Momentum, Policy, Tensor, WarmUp
from telegrad.compress.arguments import checked_count
from telegrad.compress.treatment import check_selections, treatments
from telegrad.ddp.bucket import COMPRESSIBLE
from telegrad.ddp.units import check_without_momentum


def policy_of(
    policy: Policy | None,
    *,
    density: float,
    selection: str,
    interval: int | None,
    small_tensor_elements: int,
    large_tensor_elements: int | None,
    large_selection: str,
    same_sign: bool,
) -> Policy:
    """``policy``, or one made of the simple options, which are checked in any case."""
    if large_tensor_elements is not None:
        large_tensor_elements = checked_count(large_tensor_elements, "large_tensor_elements")
    check_selections(
        {"selection": selection, "large_selection": large_selection},
        ("large_tensor_elements", large_tensor_elements),
        interval,
        same_sign=same_sign,
    )
    made = BySize(
        density=density,
        small_elements=checked_count(small_tensor_elements, "small_tensor_elements"),
        middle=selection,
        large_elements=large_tensor_elements,
        large=large_selection,
        interval=interval,
        same_sign=same_sign,
    )
    if policy is None:
        return made
    if not callable(policy):
        raise TypeError(f"policy is a {type(policy).__name__}: give a BySize, or a function from Tensor to Treatment")
    if made != BySize():
        raise ValueError(
            "policy says how each tensor is sent: leave density, selection and what belongs to them to it, and out here"
        )
    return policy


class SelectionOptions(TypedDict, total=False):
    """What is chosen of gradients, and how it is sent. As for DDPState."""

    density: float
    selection: str
    interval: int | None
    small_tensor_elements: int
    large_tensor_elements: int | None
    large_selection: str
    same_sign: bool
    output: Iterable[str] | None
    policy: Policy | None
    wire: str
    collective: str


class SparseOptions(SelectionOptions, total=False):
    """How gradients are compressed: what plain averaging has no use for. As for DDPState."""

    feedback: str


SPARSE_DEFAULTS: SparseOptions = {
    "density": 0.01,
    "selection": "reused",
    "interval": None,
    "small_tensor_elements": 2048,
    "large_tensor_elements": None,
    "large_selection": "reused",
    "same_sign": False,
    "output": None,
    "policy": None,
    "wire": "auto",
    "collective": "allreduce",
    "feedback": "gradients",
}
_NOT_DENSE: dict[str, object] = {**SPARSE_DEFAULTS, "warmup_steps": 0, "warmup": "dense"}
"""What plain averaging does not use, and the defaults, which are as good as not given."""


def check_dense(options: Mapping[str, object]) -> None:
    """Raises ``ValueError`` for options that plain averaging does not use."""
    for name, value in options.items():
        if value is not _NOT_DENSE[name] and value != _NOT_DENSE[name]:
            raise ValueError(
                f"{name}={value!r} is not used with mode='dense', which sums all values as they are: leave it out, or "
                "use mode='sparse'"
            )


def plain_options(options: Mapping[str, object]) -> dict[str, object]:
    """Options as a checkpoint may hold them, alike for equal numbers of another type."""
    plain: dict[str, object] = {}
    for name, value in options.items():
        if value is None or isinstance(value, (str, bool)):
            plain[name] = value
        elif name in ("density", "momentum"):
            plain[name] = float(cast(float, value))
        elif isinstance(value, numbers.Integral):
            plain[name] = int(value)
        else:
            plain[name] = float(value) if isinstance(value, numbers.Real) else repr(value)
    return plain


def warm_up_of(steps: int, kind: str, *, prefix: str = "") -> WarmUp:
    """``prefix``: of the options' names, ``warmup_steps`` and ``warmup``."""
    made = WarmUp(checked_count(steps, f"{prefix}warmup_steps"), kind)
    if made.steps == 0 and kind != WarmUp().kind:
        raise ValueError(f"{prefix}warmup={kind!r} is not used without {prefix}warmup_steps=: give both, or neither")
    return made


def compressor_of(
    parameters: Mapping[str, torch.nn.Parameter],
    policy: Policy,
    output: Iterable[str] | None,
    *,
    feedback: str,
    density: float,
) -> Compressor:
    """A compressor of those ``parameters`` that ``policy`` does not leave dense. Those of other dtypes than float32 and
    bfloat16 always are."""
    outputs = _outputs(parameters, output)
    if isinstance(policy, BySize) and parameters and (unknown := sorted(set(policy.dense) - parameters.keys())):
        raise ValueError(f"dense names {unknown[0]!r}, which named_parameters does not have: use its names")
    compressible = {name: one for name, one in parameters.items() if one.dtype in COMPRESSIBLE}
    sizes = {name: parameter.numel() for name, parameter in compressible.items() if parameter.numel()}
    tensors = (Tensor(name, size, parameters[name].dim(), name in outputs) for name, size in sizes.items())
    chosen = {name: one for name, one in treatments(policy, tensors).items() if one.selection is not None}
    return Compressor(
        {name: sizes[name] for name in chosen},
        density=density,
        densities={name: one.density for name, one in chosen.items()},
        selections={name: one.selection for name, one in chosen.items() if one.selection is not None},
        feedback=feedback,
    )


def compressed_by(compressor: Compressor) -> dict[str, tuple[int, str, bool]]:
    """Of each compressed parameter what its messages depend on, which all ranks must have alike."""
    policies = {one.name: (one.k, compressor.policy_of(one)) for one in compressor.residuals}
    return {
        name: (k, type(policy).__name__, getattr(policy, "same_sign", False)) for name, (k, policy) in policies.items()
    }


def correct_momentum(
    compressor: Compressor,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    momentum: float,
    nesterov: bool,
    masking: bool,
) -> None:
    """Gives the compressor velocities of all ``parameters``, if there is a momentum."""
    for name, flag in (("nesterov", nesterov), ("masking", masking)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} must be True or False")
    if nesterov and momentum == 0:
        raise ValueError("nesterov=True needs momentum=, as 0.9, and an optimizer without momentum of its own")
    if not masking and momentum == 0:
        raise ValueError("masking=False needs momentum=, as 0.9: without it no entry has a velocity that it could keep")
    if isinstance(momentum, bool) or momentum != 0:
        sizes = {name: parameter.numel() for name, parameter in parameters.items() if parameter.numel()}
        for name, parameter in parameters.items():
            if parameter.dtype not in COMPRESSIBLE:
                raise TypeError(
                    f"momentum= has float32 velocities, and parameter {name!r} is {parameter.dtype}: leave momentum to "
                    "the optimizer, or leave that parameter out of the model that is averaged"
                )
        made = Momentum(sizes, momentum, nesterov=nesterov, masking=masking)
        check_without_momentum(optimizer)
        compressor.momentum = made


def _outputs(parameters: Mapping[str, torch.nn.Parameter], output: Iterable[str] | None) -> set[str]:
    if output is None:
        weights = [name for name, parameter in parameters.items() if parameter.dim() > 1]
        return set(weights[-1:])
    if isinstance(output, str):
        raise TypeError(f"output={output!r} must be a list of names: output=[{output!r}]")
    if not isinstance(output, Iterable):
        raise TypeError(f"output={output!r} must be a list of names, as named_parameters gives them")
    names = set(output)
    unknown = sorted(names - parameters.keys())
    if unknown and parameters:
        raise ValueError(f"output names {unknown[0]!r}, which named_parameters does not have: use its names")
    return names
