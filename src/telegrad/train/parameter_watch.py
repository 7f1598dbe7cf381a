"""Whether a model still has the parameters whose gradients are averaged: what was added, replaced or unfrozen since
would be trained by each rank alone, and replicas would drift apart without an error. Averages nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def check_same_parameters(
    model: nn.Module,
    held: Iterable[torch.Tensor],
    *,
    owner: str = "Synchronizer",
    remedy: str = "close() the Synchronizer and make another one",
) -> None:
    """Raises ``RuntimeError`` for a parameter of ``model`` that is trained and is none of those ``held``. Other tensors
    in the place of one, as ``torch.func.functional_call`` puts there for a forward pass, may be made of those."""
    known = {id(one) for one in held}
    for name, one in model.named_parameters():
        if one.requires_grad and id(one) not in known and isinstance(one, nn.Parameter):
            raise RuntimeError(
                f"parameter {name!r} was unfrozen, added or replaced after its {owner} was made, which does not "
                f"average it: {remedy}"
            )


class ParameterWatch:
    """Of a Synchronizer's ``model``, whose ``parameters`` are averaged. Before a forward pass with gradients all of
    them must be where they were: a backward pass without any would call no hook. Raises ``RuntimeError``.

    What is compiled is not looked at before a pass, as Dynamo would compile the look.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model, self._parameters = model, [*parameters.values()]
        self._frozen = [one for one in model.parameters() if not one.requires_grad]
        self._places = _places_in(model)
        self._handle = model.register_forward_pre_hook(_BeforeForward(self))

    def look(self, *, everywhere: bool) -> None:
        """At the end of a backward pass. ``everywhere``: walks through the model, as long as tens of hooks take."""
        if everywhere or any(one.requires_grad for one in self._frozen):
            check_same_parameters(self._model, self._parameters)

    def before_forward(self, module: nn.Module) -> None:
        """As a hook of the model."""
        if module is self._model and any(names.get(name) is not one for names, name, one in self._places):
            check_same_parameters(self._model, self._parameters)

    def close(self) -> None:
        """Removes the hook."""
        self._handle.remove()


def _places_in(model: nn.Module) -> list[tuple[Mapping[str, Any], str, object]]:
    """Where every module and parameter is, so that a look takes a comparison for each."""
    return [
        (names, name, one)
        for module in model.modules()
        for names in (module._modules, module._parameters)
        for name, one in names.items()
    ]


class _BeforeForward:
    """A model with this hook can be copied and pickled; the copy's does nothing."""

    def __init__(self, watch: ParameterWatch | None = None) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self._watch is not None:
            self._watch.before_forward(module)

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()
