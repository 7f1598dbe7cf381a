"""The times of a model that a function makes: what ``telegrad profile`` runs. It sends nothing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from telegrad.synchronizer import StepProfile
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.workload import DEVICES, Device

# A step without running it: shapes from torch's ``meta`` device, and a model of what each operation takes. Nothing is
# allocated. The same count bounds what other programs' noise gives a gradient of a measured backward pass.

_WITHIN = 4.0
"""By how much a measured share of the backward pass may differ from the counted one, as a factor."""


class _CountedClock:
    """Stands until an operation is counted, and then moves on by the seconds that a device takes for it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def is_known(self, mark: float) -> bool:
        return True

    def between_s(self, before: float, after: float) -> float:
        return after - before


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each operation takes as long as its arithmetic or its memory traffic, whichever is longer."""

    def __init__(self, clock: _CountedClock, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock, self._device = clock, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            return found  # a view
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **given, out_val=found)
        size = sum(
            one.numel() * one.element_size() for one in tree_leaves((args, given, found)) if isinstance(one, Tensor)
        )
        self._clock.now_s += max(flops / self._device.flops_per_s, size / self._device.memory_bytes_per_s)
        return found


class _FusedAttention(torch.autograd.Function):
    """Attention as kernels compute it that keep no matrix of all positions by all positions. The ``meta`` device has
    none of them: torch decomposes attention there, and the matrix's memory traffic would count."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, clock: _CountedClock, flops_per_s: float
    ) -> Tensor:
        *_, positions, width = query.shape
        macs = query.shape[:-2].numel() * positions * key.shape[-2] * (width + value.shape[-1])
        context.save_for_backward(query, key, value)
        context.clock, context.seconds = clock, 2 * macs / flops_per_s
        clock.now_s += context.seconds
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        context.clock.now_s += _ATTENTION_BACKWARD * context.seconds
        return (*(torch.empty_like(one) for one in context.saved_tensors), None, None)


_ATTENTION_BACKWARD = 2.5  # five products for two, as the scores are computed again


class _Fusing(TorchFunctionMode):
    def __init__(self, clock: _CountedClock, device: Device) -> None:
        super().__init__()
        self._clock, self._device = clock, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            if query.is_meta:
                return _FusedAttention.apply(query, key, value, self._clock, self._device.flops_per_s)  # type: ignore[no-untyped-call]
        return func(*args, **given)


def counted(model: nn.Module, loss: Callable[[nn.Module], Tensor], device: Device) -> Trace:
    """One forward and backward pass of ``model``, as ``device`` would take for it; what ``loss`` raises."""
    clock = _CountedClock()
    with StepProfile(model, skip=0, clock=clock) as watched, _Counting(clock, device), _Fusing(clock, device):
        loss(model).backward()  # type: ignore[no-untyped-call]
    return watched.trace()


@contextmanager
def on_meta() -> Iterator[None]:
    """New tensors have a shape and no memory."""
    with torch.device("meta"):
        yield


def steadied(measured: Trace, counted_: Trace) -> Trace:
    """``measured`` without noise: each gradient takes a quarter to four times its counted share of the backward pass,
    and the whole pass takes as long as before.

    Another program that runs for some milliseconds, or memory that is allocated, then lengthens the pass, and not the
    one gradient that came next. Gradients that were not counted keep their times.
    """
    shares = dict(zip(counted_.names, counted_.backward_times, strict=True))
    total_s, all_s = measured.backward_s, counted_.backward_s
    if not (total_s > 0 and all_s > 0):
        return measured
    times = []
    for name, seconds in zip(measured.names, measured.backward_times, strict=True):
        share_s = shares.get(name, math.nan) / all_s * total_s
        times.append(seconds if math.isnan(share_s) else min(max(seconds, share_s / _WITHIN), share_s * _WITHIN))
    if not sum(times) > 0:
        return measured
    factor = total_s / sum(times)
    return replace(measured, backward_times=tuple(one * factor for one in times))


_RATE = 1e-4
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=_RATE),
    "adam": functools.partial(torch.optim.Adam, lr=_RATE),
    "sgd": functools.partial(torch.optim.SGD, lr=_RATE),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=_RATE, momentum=0.9),
}
"""Whose step counts, by the names that ``advise`` has."""


class FactoryError(ValueError):
    """A factory cannot be found, or does not give what it must; the message says what to do."""


Loss = Callable[[nn.Module], Tensor]


def open_factory(target: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` or ``folder/file.py:function`` names. Modules are looked for in the
    current folder too. Raises ``FactoryError``."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise FactoryError(f"{target!r} names no function: write module:function or file.py:function")
    module = _module_of(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise FactoryError(f"{place} has no function {name!r}: name one that returns a model and its loss")
    return factory  # type: ignore[no-any-return]


def make(factory: Callable[..., Any], batch: int | None) -> tuple[nn.Module, Loss]:
    """What ``factory(batch=batch)`` returns, or ``factory()`` where ``batch`` is None: a module, and what takes the
    module and returns the loss of one batch. Raises ``FactoryError`` where it does not, and what the factory raises."""
    if batch is not None:
        parameters = inspect.signature(factory).parameters
        if "batch" not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            raise FactoryError("the function takes no argument batch: leave --batch out, or give it one")
    given = {} if batch is None else {"batch": batch}
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise FactoryError(f"the function cannot be called so ({error}): give its arguments defaults") from error
    made: Any = factory(**given)
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise FactoryError(
            f"the function returns a {type(made).__name__}: it must return (model, loss), a torch.nn.Module and a "
            "function that takes it and returns the loss of one batch, such as lambda model: model(x).square().mean()"
        )
    model, loss = made
    return model, loss


def profile(
    model: nn.Module,
    loss: Loss,
    *,
    steps: int,
    skip: int,
    optimizer: str = "adamw",
    on_step: Callable[[], None] = lambda: None,
) -> Trace:
    """The medians over ``steps`` steps of training, after ``skip`` that are left out; ``on_step`` is called after each
    of them. ``optimizer``: one of ``OPTIMIZERS``. No gradient gets another program's time: see ``steadied``. Raises
    ``FactoryError`` where there is nothing to train, and where ``loss`` gives no finite scalar that depends on the
    model, or does not call it."""
    trained = _trained(model)
    trains = OPTIMIZERS[optimizer](trained)
    with StepProfile(model, skip=skip, optimizer=trains) as watched:
        for _ in range(skip + steps):
            trains.zero_grad()
            value = _checked(loss(model))
            if not math.isfinite(value.item()):
                raise FactoryError(f"the loss is {value.item()}: give the model other inputs, or other weights")
            value.backward()  # type: ignore[no-untyped-call]
            trains.step()
            on_step()
    if not watched.samples:
        raise FactoryError("the loss does not call the model itself: write loss(model) such that it calls model(x)")
    return steadied(watched.trace(), counted(model, lambda model: _checked(loss(model)), DEVICES["cpu"]))


def profile_on_meta(factory: Callable[..., Any], batch: int | None, device: Device) -> Trace:
    """The step that ``device`` would take, by counting: the model and its inputs have shapes and no memory. Raises
    ``FactoryError`` as ``make`` and ``profile``, and where the factory or the loss needs the values of a tensor."""
    try:
        with on_meta():
            model, loss = make(factory, batch)
            _trained(model)
            return counted(model, lambda model: _checked(loss(model)), device)
    except (RuntimeError, TypeError) as error:
        if isinstance(error, TypeError) and "meta" not in str(error):
            raise  # a mistake of the factory's own
        said = " ".join(str(error).split())
        raise FactoryError(
            f"it does not run without values: {said[:_MOST_SAID]}. Make the model and its inputs inside the function "
            "with torch's functions, and leave out .item(), checkpoints and NumPy; or record times without --meta"
        ) from error


_MOST_SAID = 300


def samples_of(factory: Callable[..., Any], batch: int | None) -> float | None:
    """Of a pass: ``batch``, else the default of the factory's argument of that name; ``None`` if it has none."""
    if batch is not None:
        return float(batch)
    found = inspect.signature(factory).parameters.get("batch")
    given = None if found is None else found.default
    return float(given) if isinstance(given, int) and given > 0 else None


def _trained(model: nn.Module) -> list[nn.Parameter]:
    found = [one for one in model.parameters() if one.requires_grad]
    if not found:
        raise FactoryError("the model has no parameter that requires a gradient: there is nothing to profile")
    return found


def _checked(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise FactoryError(
            f"the loss is {_told(value)}: it must be one number, a tensor that the model's parameters lead to"
        )
    return value


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")


def _module_of(place: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise FactoryError(f"there is no file {place}: name one with the function, or a module")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    if here not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise  # of something that the module imports
        raise FactoryError(f"there is no module {place!r} here: run this where it is, or install it") from error
