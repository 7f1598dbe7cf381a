"""The times of a model that a function makes: what ``telegrad profile`` runs. It sends nothing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from telegrad.synchronizer import StepProfile
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.workload import DEVICES, Device
from telegrad.tools.bench.meta_profile import counted, on_meta, steadied


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def _small() -> tuple[nn.Module, Tensor]:
    """48 narrow layers: 194 gradients, none above 36 KiB; 1.8 MB."""
    blocks = [_Residual(96) for _ in range(48)]
    return nn.Sequential(*blocks, nn.Linear(96, 10)), torch.randn(192, 96)


def _large() -> tuple[nn.Module, Tensor]:
    """Four wide layers: 8 gradients, the largest 3 MiB; 8.4 MB."""
    layers = [nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(768, 256)), torch.randn(96, 512)


def _mixed() -> tuple[nn.Module, Tensor]:
    """Convolutions with normalisation, then wide layers, as in VGG: 42 gradients from 40 bytes to 2 MiB; 3.9 MB."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 16, 32, 32, 64, 64, 64, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        if width != channels and channels != 3:
            layers.append(nn.MaxPool2d(2))
        channels = width
    wide = [nn.Flatten(), nn.Linear(64 * 16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *wide), torch.randn(8, 3, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"small": _small, "large": _large, "mixed": _mixed}
"""By name: what makes a model and its input, by torch's generator."""


DEMO = "demo"
"""``demo:small``, ``demo:large`` and ``demo:mixed`` are models of this package."""

_RATE = 1e-4


class FactoryError(ValueError):
    """A factory cannot be found, or does not give what it must; the message says what to do."""


Loss = Callable[[nn.Module], Tensor]


def open_factory(target: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` or ``folder/file.py:function`` names, or a demonstration. Modules
    are looked for in the current folder too. Raises ``FactoryError``."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise FactoryError(f"{target!r} names no function: write module:function or file.py:function")
    if place == DEMO:
        if name not in MODELS:
            raise FactoryError(f"there is no {target!r}: use {', '.join(f'{DEMO}:{one}' for one in MODELS)}")
        return _demonstration(name)
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
    model: nn.Module, loss: Loss, *, steps: int, skip: int, on_step: Callable[[], None] = lambda: None
) -> Trace:
    """The medians over ``steps`` steps of training with SGD, after ``skip`` that are left out; ``on_step`` is called
    after each of them. No gradient gets another program's time: see ``steadied``. Raises ``FactoryError`` where there
    is nothing to train, and where ``loss`` gives no finite scalar that depends on the model, or does not call it."""
    trained = _trained(model)
    optimizer = torch.optim.SGD(trained, lr=_RATE)
    with StepProfile(model, skip=skip, optimizer=optimizer) as watched:
        for _ in range(skip + steps):
            optimizer.zero_grad()
            value = _checked(loss(model))
            if not math.isfinite(value.item()):
                raise FactoryError(f"the loss is {value.item()}: give the model other inputs, or other weights")
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
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


def _demonstration(name: str) -> Callable[[], tuple[nn.Module, Loss]]:
    def made() -> tuple[nn.Module, Loss]:
        torch.manual_seed(1)
        model, x = MODELS[name]()
        return model, lambda model: model(x).square().mean()

    return made


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
