"""Whether a model still has the parameters whose gradients are averaged, and whether nobody steps before they are: what
was added, replaced or unfrozen since, or stepped early, would be trained by each rank alone, and replicas would drift
apart without an error. Averages nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from telegrad.communicator import Communicator
from telegrad.ddp.backward_watch import BackwardSteps, changed_error
from telegrad.synchronizer.forward_hooks import ForwardHooks, takes_hooks
from telegrad.synchronizer.gradient_group import GradientGroup, first_changed


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
    its modules must be where they were, else ``RuntimeError``: a backward pass without any of the parameters would call
    no hook of theirs. Another parameter may be there for this pass only, as a teacher's or fast weights that
    ``torch.func.functional_call`` puts there: it must have left when a gradient comes to it.

    What is compiled is not looked at before a pass, as Dynamo would compile the look; nor is TorchScript.

    A step inside the backward pass is a ``RuntimeError`` too, of which the other ranks of ``comm`` hear: of an
    optimizer before it changes anything, of another hook at the end of the pass.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], comm: Communicator) -> None:
        self._model: nn.Module | None = model
        self._comm = comm
        self._steps = BackwardSteps(parameters, "the Synchronizer", self._fail)
        self._names = {id(one): name for name, one in parameters.items()}
        self._parameters = [*parameters.values()]
        self._known = {id(one) for one in self._parameters}
        self._places: list[tuple[dict[str, Any], str, object]] = []
        self._frozen: list[nn.Parameter] = []
        self._see_places(model)
        # With their hooks, by where they were found and which they are, as long as they are.
        self._strangers: dict[tuple[int, str, int], tuple[weakref.ref[nn.Parameter], Any]] = {}
        self._hooks = ForwardHooks(model, before=self._before_forward) if takes_hooks(model) else None

    def look(self, groups: Sequence[GradientGroup], *, everywhere: bool, unstepped: Set[int] = frozenset()) -> None:
        """At the end of a backward pass, whose gradients are in ``groups``. ``everywhere``: walks through the model, as
        long as tens of hooks take. ``unstepped``: of parameters whose step was not made before, by id: none may have a
        gradient."""
        if used := unstepped & set[int]().union(*(group.came() for group in groups if unstepped)):
            error = RuntimeError(
                f"parameter {self._names[min(used)]!r} was used before its step was made, by code that is not "
                "Python's, such as an extension: use wait_in='step', and go on from a checkpoint"
            )
            self._fail(error)
            raise error
        changed = first_changed(run for group in groups for run in group.runs)
        if changed is not None:
            error = changed_error(self._names[id(changed)], "the Synchronizer")
            self._fail(error)
            raise error
        if self._model is not None and (everywhere or any(one.requires_grad for one in self._frozen)):
            check_same_parameters(self._model, self._parameters)

    def close(self) -> None:
        """Removes the hooks, and lets go of the model."""
        self._steps.close()
        if self._hooks is not None:
            self._hooks.close()
        for _, handle in [*self._strangers.values()]:
            handle.remove()
        self._model = None
        self._parameters, self._frozen, self._places, self._strangers = [], [], [], {}

    def _fail(self, error: Exception) -> None:
        self._comm.abort(f"{type(error).__name__}: {error}")

    def _before_forward(self) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._model is None:
            return
        if all(names.get(name) is one for names, name, one in self._places):
            return
        strangers, is_for_one_pass = [], False
        for names, name, one in self._places:
            found = names.get(name)
            if found is one or not isinstance(found, torch.Tensor):
                continue
            is_for_one_pass = True
            if isinstance(found, nn.Parameter):
                strangers.append(found)
                self._remember(names, name, found)
        check_same_parameters(self._model, [*self._parameters, *strangers])
        if not is_for_one_pass:
            self._see_places(self._model)

    def _see_places(self, model: nn.Module) -> None:
        self._places = _places_in(model)
        self._frozen = [one for one in model.parameters() if not one.requires_grad]

    def _remember(self, names: dict[str, Any], name: str, stranger: nn.Parameter) -> None:
        """The ``stranger`` is in that place. Others that were there may still get a gradient."""
        key = id(names), name, id(stranger)
        if key in self._strangers or not stranger.requires_grad or not stranger.is_leaf or id(stranger) in self._known:
            return
        hook = functools.partial(self._arrived, names, name)
        handle = stranger.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        held = self._strangers
        self._strangers[key] = weakref.ref(stranger, lambda _: held.pop(key, None)), handle

    def _arrived(self, names: dict[str, Any], name: str, stranger: torch.Tensor) -> None:
        """A gradient has come to what was in that place."""
        if self._model is not None and names.get(name) is stranger:
            check_same_parameters(self._model, self._parameters)


def _places_in(model: nn.Module) -> list[tuple[dict[str, Any], str, object]]:
    """Where every module and parameter is, so that a look takes a comparison for each; but not in TorchScript, whose
    names are in no dict."""
    return [
        (names, name, one)
        for module in model.modules()
        for names in (module._modules, module._parameters)
        if isinstance(names, dict)
        for name, one in names.items()
    ]
