"""DDPState: its arguments, its state_dict, and what it says about bad ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from varied_options import objects_of

from telegrad import Cheapest, Communicator, DDPState, Quantised, Warmup

Local = Callable[..., list[Communicator]]


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.ReLU(), torch.nn.Linear(50, 60))


def _state(local: Local, model: torch.nn.Module | None = None, **options: Any) -> DDPState:
    return DDPState(local(1)[0], model or _model(), **objects_of(**options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nonfinite": "ignore"}, ValueError, "nonfinite='ignore' does not exist: use one of raise, skip, send"),
        (
            {"compress": "topk"},
            TypeError,
            "compress='topk' must be a telegrad.TopK or telegrad.LowRank, as TopK",
        ),
        ({"compress": 0.01}, TypeError, r"compress=0.01 must be a telegrad.TopK"),
        ({"compress": Quantised("int8")}, TypeError, "compress is a Quantised, which is for a Synchronizer that plans"),
        ({"compress": Cheapest()}, TypeError, "compress is a Cheapest, which is for a Synchronizer that plans"),
        ({"momentum": 0.9}, TypeError, r"momentum=0.9 must be a telegrad.Momentum, as Momentum\(0.9\), or None"),
        ({"warmup": 500}, TypeError, r"warmup=500 must be a telegrad.Warmup, as Warmup\(steps=500\), or None"),
        ({"compress": None, "warmup": Warmup(3)}, ValueError, "warmup=Warmup.* is not used with compress=None"),
    ],
)
def test_bad_options(local: Local, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DDPState(local(1)[0], _model(), **options)


def test_bad_communicator() -> None:
    with pytest.raises(TypeError, match=r"comm is a NoneType: make one with telegrad.Communicator.from_torch\(\)"):
        DDPState(None, _model())  # type: ignore[arg-type]


def _shared() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    model[1].weight = model[0].weight
    return model


def _frozen() -> torch.nn.Module:
    return _model().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            lambda: _model().named_parameters(),
            TypeError,
            r"model is a generator: give the DistributedDataParallel itself, as DDPState\(comm, ddp\)",
        ),
        (lambda: [("weight", torch.zeros(3))], TypeError, "model is a list: give the Dist"),
        (lambda: None, TypeError, "model is a NoneType: give the Dist"),
        (_frozen, ValueError, "the model has no parameter that requires a gradient"),
        (torch.nn.ReLU, ValueError, "the model has no parameter that requires a gradient"),
        (lambda: _model().to(torch.float8_e4m3fn), TypeError, "'0.weight' has dtype torch.float8_e4m3fn"),
        (lambda: _model().to(torch.float8_e5m2), TypeError, "of '0.weight' has dtype torch.float8_e5m2"),
    ],
)
def test_bad_models(local: Local, model: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DDPState(local(1)[0], model())


def test_shared_and_frozen_parameters_are_fine(local: Local) -> None:
    model = _shared()
    model[0].bias.requires_grad_(False)
    state = _state(local, model, small_elements=0).state_dict()
    assert set(state["compressor"]["parameters"]) == {"0.weight", "1.bias"}


def test_only_large_parameters_have_residuals(local: Local) -> None:
    assert set(_state(local).state_dict()["compressor"]["parameters"]) == {"0.weight", "2.weight"}
    assert set(_state(local, small_elements=3000).state_dict()["compressor"]["parameters"]) == set()
    assert set(_state(local, compress=None).state_dict()["compressor"]["parameters"]) == set()


def test_state_dict_is_safe_to_load_and_has_all_options(local: Local) -> None:
    state = _state(local, density=0.1, warmup_steps=3)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["config"] == {
        "compress": "TopK",
        "density": 0.1,
        "select": "reused",
        "interval": None,
        "small_elements": 2048,
        "same_sign": False,
        "values": "auto",
        "combine": "allreduce",
        "feedback": "gradients",
        "policy": None,
        "momentum": 0.0,
        "warmup_steps": 3,
        "warmup": "dense",
        "clip_norm": None,
        "nonfinite": "raise",
    }
    state.load_state_dict(loaded)


def test_numpy_numbers_are_numbers(local: Local) -> None:
    options = {"density": np.float32(0.25), "interval": np.int64(4)}
    counts = {"small_elements": np.uint16(9), "warmup_steps": np.int32(3)}
    state = _state(local, **options, **counts)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    config = saved["config"]
    assert {name: config[name] for name in (*options, *counts)} == {**options, **counts}
    assert {name: type(config[name]) for name in counts} == dict.fromkeys(counts, int)
    saved["step"] = np.int64(7)
    saved["compressor"]["parameters"]["0.weight"]["calls"] = np.int64(2)
    state.load_state_dict(saved)
    assert type(state.step) is int
    assert type(state.state_dict()["compressor"]["parameters"]["0.weight"]["calls"]) is int
    saved["compressor"]["parameters"]["0.weight"]["calls"] = True
    with pytest.raises(ValueError, match="'calls'.* is True"):
        state.load_state_dict(saved)


def test_a_state_of_the_first_version_is_still_loaded(local: Local) -> None:
    """Written out: what ``state_dict`` gave before steps could be skipped."""
    state = _state(local, nonfinite="skip")
    residual = torch.arange(3000, dtype=torch.float32)
    entry = {"residual": residual, "threshold": 0.5, "calls": 3}
    parameters = {"0.weight": entry, "2.weight": {**entry, "threshold": None, "calls": 0}}
    saved = {"version": 1, "step": 5, "config": {}, "compressor": {"density": 0.01, "parameters": parameters}}
    state.load_state_dict(saved)
    after = state.state_dict()
    assert after["version"] == 1
    assert after.keys() >= saved.keys()
    assert (after["step"], after["compressor"]["parameters"]["0.weight"]["threshold"]) == (5, 0.5)
    assert torch.equal(after["compressor"]["parameters"]["2.weight"]["residual"], residual)
    assert not state.skipped


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.update(version=99), "version 99 and keys.*must come from DDPState.state_dict"),
        (lambda state: state.pop("compressor"), "must come from DDPState.state_dict"),
        (lambda state: state["compressor"]["parameters"].pop("0.weight"), "no residual for '0.weight'"),
        (
            lambda state: state["compressor"]["parameters"]["0.weight"].update(residual=torch.zeros(3)),
            r"\['0.weight'\]\['residual'\] is float32 of shape \(3,\)",
        ),
        (lambda state: state["compressor"]["parameters"]["0.weight"]["residual"].fill_(float("nan")), "holds NaN"),
        (lambda state: state["compressor"]["parameters"]["2.weight"].pop("threshold"), r"\['2.weight'\] must have"),
        (lambda state: state["compressor"]["parameters"]["2.weight"].update(threshold="high"), "'threshold'.*'high'"),
        (lambda state: state["compressor"]["parameters"]["2.weight"].update(calls=-1), r"'calls'\] is -1"),
        (lambda state: state["compressor"].pop("parameters"), "state has no 'parameters'"),
        (lambda state: state.update(step=-1), r"state\['step'\]=-1 must not be negative"),
    ],
)
def test_state_dicts_that_do_not_fit(local: Local, damage: Callable[[Any], Any], message: str) -> None:
    state = _state(local)
    saved = state.state_dict()
    damage(saved)
    before = state.state_dict()
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(saved)
    assert repr(state.state_dict()) == repr(before)


def test_the_public_options_are_what_they_are() -> None:
    """A new option is a decision: it changes this list."""
    import inspect

    assert list(inspect.signature(DDPState).parameters) == [
        "comm",
        "model",
        "compress",
        "momentum",
        "warmup",
        "optimizer",
        "clip_norm",
        "scaler",
        "nonfinite",
        "telemetry",
        "group",
        "node",
    ]


def test_a_model_on_the_host_has_no_device_part(local: Local) -> None:
    assert _state(local)._device is None
