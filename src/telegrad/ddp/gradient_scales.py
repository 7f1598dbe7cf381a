"""What 1 in a gradient is worth in this step: the optimizer's learning rates and the scale of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from telegrad.compress import Compressor


class GradientScales:
    """Asked at the first bucket of each backward pass.

    ``compressor``: whose residuals and velocities have these units. ``parameters``: by name. ``optimizer``: whose
    learning rates count, or ``None``. ``scaler``: torch's GradScaler by which the loss is multiplied, or ``None``.
    Raises ``TypeError``, and ``ValueError`` as ``rates``: an optimizer of other parameters is refused now."""

    def __init__(
        self,
        compressor: Compressor,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give the torch.optim.Optimizer that will step")
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler is a {type(scaler).__name__}: give the torch.amp.GradScaler that scales the loss")
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._optimizer = None if optimizer is None else unwrapped(optimizer)
        self._scaler, self._compressor = scaler, compressor
        self.rates()

    @property
    def can_change(self) -> bool:
        """False where ``gradient_unit`` is always 1."""
        return self._scaler is not None

    def gradient_unit(self) -> float:
        """1 / scale. Raises ``ValueError`` for a scale that is no number above 0."""
        if self._scaler is None:
            return 1.0
        return 1 / check_scale(float(self._scaler.get_scale()))

    def step_sizes(self) -> dict[str, float]:
        """Learning rates by parameter, those of the optimizer's groups at this moment.

        Raises ``ValueError`` for a parameter that the optimizer does not have, and for a rate that is below 0 or not
        finite."""
        assert self._optimizer is not None
        self._check_has_all(self._optimizer)
        found = {}
        for group in self._optimizer.param_groups:
            rate = float(group["lr"])
            if not 0 <= rate < math.inf:
                raise ValueError(f"optimizer has the learning rate {rate}: it must be at least 0 and finite")
            for parameter in group["params"]:
                if (name := self._names.get(id(parameter))) is not None:
                    found[name] = rate
        return found

    def rates(self) -> dict[str, float] | None:
        """The learning rates that residuals of steps hold; ``None`` where they hold gradients.

        Raises ``ValueError`` as ``step_sizes``, and with momentum correction unless all parameters are an optimizer's
        that has no momentum at this moment: schedulers and ``load_state_dict`` may give it one."""
        if self._compressor.momentum is not None:
            check_without_momentum(self._optimizer)
            assert self._optimizer is not None
            self._check_has_all(self._optimizer)
        return self.step_sizes() if self._compressor.feedback == "steps" else None

    def _check_has_all(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for one, name in self._names.items() if one not in stepped]
        if missing:
            raise ValueError(
                f"optimizer does not have parameter {missing[0]!r}: give the optimizer that steps all parameters "
                "that are averaged, or freeze what it leaves out before"
            )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The SGD in a trainer's wrapper that is an Optimizer too, as Accelerate's; else what was given."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.SGD) else optimizer


def check_scale(scale: float) -> float:
    """Raises ``ValueError`` for what is no scale of a loss."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scaler has the scale {scale}: it must be above 0 and finite; make a new GradScaler")
    return scale


def check_without_momentum(optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ``ValueError`` unless it is an optimizer without momentum of its own, as momentum correction needs it."""
    if optimizer is None:
        raise ValueError(
            "momentum needs optimizer=: an SGD with momentum=0, since telegrad applies the momentum itself"
        )
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(f"optimizer is {type(optimizer).__name__}: momentum= is for SGD with momentum=0, leave it out")
    for group in optimizer.param_groups:
        if group.get("momentum"):
            raise ValueError(
                f"optimizer has momentum={group['momentum']} of its own, which would be applied twice: make it with "
                "momentum=0, since momentum= takes its place; OneCycleLR needs cycle_momentum=False, and after "
                "load_state_dict() of one with momentum set that of its groups to 0"
            )
