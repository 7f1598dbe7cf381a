"""Which kernels an array gets, with the releases of Triton that there are."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from telegrad.kernels import is_on_gpu


def tensor_on(kind: str) -> SimpleNamespace:
    class Device(SimpleNamespace):
        def __str__(self) -> str:
            return kind

    return SimpleNamespace(device=Device(type=kind.partition(":")[0]))


def triton_of(version: str, **knobs: bool) -> SimpleNamespace:
    with_knobs = {"knobs": SimpleNamespace(runtime=SimpleNamespace(**knobs))} if knobs else {}
    return SimpleNamespace(__version__=version, **with_knobs)


def test_a_numpy_array_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not is_on_gpu(np.zeros(3), "x")
    with pytest.raises(
        ModuleNotFoundError, match="x is a tensor on cuda:0, and kernels there need Triton: pip install"
    ):
        is_on_gpu(tensor_on("cuda:0"), "x")


def test_a_triton_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.9.0", interpret=False))
    assert is_on_gpu(tensor_on("cuda:0"), "x")
    with pytest.raises(ValueError, match=r"x is a torch tensor on the CPU: .* x\.numpy\(\)"):
        is_on_gpu(tensor_on("cpu"), "x")
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.9.0", interpret=True))
    assert is_on_gpu(tensor_on("cpu"), "x")


def test_a_triton_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 brings it."""
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.2.0"))
    with pytest.raises(ImportError, match=r"need Triton 3.4 or newer, not 3.2.0: install torch 2.8 or newer"):
        is_on_gpu(tensor_on("cuda:0"), "x")
    with pytest.raises(ValueError, match="x is a torch tensor on the CPU"):
        is_on_gpu(tensor_on("cpu"), "x")
