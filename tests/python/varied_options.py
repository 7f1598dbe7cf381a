"""The objects that training takes, from the single values that a test varies: TopK, Momentum, Warmup and their like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from telegrad import AutoPlan, Cheapest, Momentum, Quantised, TopK, Warmup

_OF_PLAN = {"plan_after": "after", "replan_factor": "replan_factor"}
_OF_TOPK = {one.name for one in fields(TopK)}


def objects_of(compress: Any = "topk", **varied: Any) -> dict[str, Any]:
    """Options of DDPState or Synchronizer. ``compress``: ``"topk"``, ``"quantised"``, ``"cheapest"`` (both with
    ``formats``), an object, or None. TopK's fields are taken by their names; ``momentum`` with ``nesterov`` and
    ``masking`` makes a Momentum, ``warmup_steps`` with ``warmup`` a Warmup, ``plan_after`` and ``replan_factor`` an
    AutoPlan of a ``plan`` that is timed; an optimizer in ``wait_in`` is waited in; all others are passed on."""
    of_topk = {name: varied.pop(name) for name in list(varied) if name in _OF_TOPK}
    formats = [varied.pop("formats")] if "formats" in varied else []
    flags = {name: varied.pop(name) for name in ("nesterov", "masking") if name in varied}
    if "momentum" in varied or flags:
        varied["momentum"] = Momentum(varied.get("momentum", 0.0), **flags)
    if "warmup_steps" in varied:
        varied["warmup"] = Warmup(varied.pop("warmup_steps"), varied.pop("warmup", "dense"))
    times = {new: varied.pop(old) for old, new in _OF_PLAN.items() if old in varied}
    if times and varied.get("plan", "auto") in ("auto", "optimal", "greedy"):
        varied["plan"] = AutoPlan(varied.get("plan", "auto"), **times)
    if varied.get("wait_in", "") is None:
        del varied["wait_in"]
    elif isinstance(varied.get("wait_in", ""), torch.optim.Optimizer):
        varied |= {"optimizer": varied["wait_in"], "wait_in": "step"}
    if compress == "quantised":
        return {"compress": Quantised(*formats, **of_topk), **varied}
    if compress == "cheapest":
        return {"compress": Cheapest(TopK(**of_topk), *formats), **varied}
    assert not formats, f"{formats} have no place in {compress}"
    if compress == "topk":
        return {"compress": TopK(**of_topk), **varied}
    assert not of_topk, f"{of_topk} have no place in {compress}"
    return {"compress": compress, **varied}


def module_of(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module of parameters that a test has made, in their order."""
    module = nn.Module()
    for name, one in parameters.items():
        module.register_parameter(name, one)
    return module
