"""Hooks on the forward passes of one model, which are no part of what is copied or saved of it. Does not know what they
are for."""

from __future__ import annotations

import contextlib
import copyreg
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_KINDS = ("_forward_pre_hooks", "_forward_hooks")
_lock = threading.RLock()  # a collection inside may close another's
_hooked: Counter[type[nn.Module]] = Counter()  # models with hooks, by class


class ForwardHooks:
    """Until ``close()`` calls ``before()`` before each forward pass of ``model``, and ``after(outputs)`` after it.

    A copy of the model has none of it, and what is saved is loaded without telegrad: meanwhile ``copyreg``, which
    ``pickle`` and ``copy`` ask, has a way for its class that leaves these hooks out. Where it has one already, or the
    model copies itself, copies have hooks that do nothing. The class is kept until ``close()``, also where the model is
    gone. Raises ``ValueError`` as ``check_takes_hooks``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        check_takes_hooks(model)
        self._handles: list[Any] = []
        self._kind = type(model)
        with _lock:
            _hooked[self._kind] += 1
            if self._kind not in copyreg.dispatch_table:
                copyreg.pickle(self._kind, _without_hooks)
        self._is_open = True
        try:
            if before is not None:
                self._handles.append(model.register_forward_pre_hook(_Hook(model, before)))
            if after is not None:
                self._handles.append(model.register_forward_hook(_Hook(model, after)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the hooks. Called twice it does nothing."""
        while self._handles:
            self._handles.pop().remove()
        with _lock:
            if not self._is_open:
                return
            self._is_open = False
            _hooked[self._kind] -= 1
            if not _hooked[self._kind]:
                del _hooked[self._kind]
                if copyreg.dispatch_table.get(self._kind) is _without_hooks:
                    del copyreg.dispatch_table[self._kind]


def takes_hooks(model: nn.Module) -> bool:
    """Whether its forward passes can be seen; those of what ``torch.jit.script`` or ``torch.jit.load`` has made can
    not."""
    return not isinstance(model, getattr(torch.jit, "RecursiveScriptModule", ()))


def check_takes_hooks(model: nn.Module, remedy: str = "give it as it was before torch.jit.script()") -> None:
    """Raises ``ValueError`` for a model that does not."""
    if not takes_hooks(model):
        raise ValueError(f"model is TorchScript, and its forward passes cannot be seen: {remedy}")


class _Hook:
    """Calls ``call`` with what a hook gets besides the model and its inputs. Not for a twin that shares the model's
    attributes, as one thread's of DataParallel."""

    def __init__(self, model: nn.Module, call: Callable[..., None]) -> None:
        self._model, self._call = model, call

    def __call__(self, module: nn.Module, _: Any, *outputs: Any) -> None:
        if module is self._model:
            self._call(*outputs)

    @property
    def __name__(self) -> str:
        # TorchScript asks each hook for it, and would compile what has one.
        raise AttributeError(
            "TorchScript cannot compile hooks that telegrad has on this model: script copy.deepcopy(model), or close() "
            "what watches it before"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, and does nothing


def _without_hooks(model: nn.Module) -> Any:
    """For ``copyreg``: what the model itself says, but for these hooks."""
    reduced = model.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    kept = {
        kind: OrderedDict((number, hook) for number, hook in reduced[2][kind].items() if not isinstance(hook, _Hook))
        for kind in _KINDS
        if kind in reduced[2]
    }
    return *reduced[:2], {**reduced[2], **kept}, *reduced[3:]
