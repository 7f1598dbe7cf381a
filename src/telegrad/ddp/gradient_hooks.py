"""Hooks that are called when a backward pass has left a parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``register_post_accumulate_grad_hook``, also of a parameter that is frozen for now: torch refuses the hook
    then, but keeps that of one that is frozen later. Gives the handle, whose ``remove()`` takes the hook away."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(is_trained)


def before_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``register_hook``, which is called before the gradient is accumulated, also of a parameter that is frozen for
    now."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(is_trained)
