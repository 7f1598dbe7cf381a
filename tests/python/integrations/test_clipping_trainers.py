"""Which averages a trainer must not clip: those that hold gradients of several steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import telegrad
from telegrad.ddp import choices
from telegrad.integrations import trainers


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_told", set())
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@pytest.mark.parametrize(
    "options", [{"compress": telegrad.TopK(0.01)}, {"momentum": telegrad.Momentum(0.9)}], ids=["topk", "momentum"]
)
def test_sparse_averages_are_told(options: dict[str, Any]) -> None:
    with pytest.warns(
        telegrad.ChoiceWarning, match=r"clips averaged gradients to a norm of 1, .*use none.*clip_norm=1"
    ):
        trainers.warn_of_clipping(options, 1.0, "none")


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({}, 1.0),
        ({"compress": telegrad.LowRank(4)}, 1.0),
        ({"compress": None}, 1.0),
        ({"compress": telegrad.TopK()}, 0),
    ],
)
def test_others_and_trainers_that_do_not_clip_are_not(options: dict[str, Any], norm: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainers.warn_of_clipping(options, norm, "none")
