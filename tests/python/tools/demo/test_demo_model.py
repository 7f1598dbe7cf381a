"""The demo's model and what a run is told."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import math
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from telegrad.compress import SELECTIONS  # noqa: E402
from telegrad.ddp.options import COMBINE  # noqa: E402
from telegrad.tools.demo.job import SCHEMES, ModelSize, Settings  # noqa: E402
from telegrad.tools.demo.training import ByteGPT, learning_rate_at, loss_of, optimizer_of  # noqa: E402

_TINY = ModelSize(width=64, layers=2, heads=2, context=16)
_SETTINGS = Settings(run="ddp-gloo", corpus="/nowhere", steps=50, interface="lo", validations=7, model=_TINY)


def test_the_default_has_at_least_five_million_parameters() -> None:
    assert sum(parameter.numel() for parameter in ByteGPT(ModelSize()).parameters()) >= 5_000_000


def test_at_first_all_bytes_are_equally_likely() -> None:
    tokens = torch.randint(0, 256, (2, 16))
    logits = ByteGPT(_TINY)(tokens)
    assert logits.shape == (2, 16, 256)
    assert loss_of(logits, tokens).item() == pytest.approx(math.log(256))


def test_no_position_sees_a_later_byte() -> None:
    torch.manual_seed(0)
    model = ByteGPT(_TINY)
    torch.nn.init.normal_(model.head.weight)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    same = (model(tokens) == model(changed)).all(dim=-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = ByteGPT(_TINY)
    optimizer = optimizer_of(model, dataclasses.replace(_SETTINGS, learning_rate=0.01))
    tokens = torch.arange(64).reshape(4, 16) % 7
    for _ in range(20):
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 2


def test_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate_at(step, _SETTINGS) for step in range(50)]
    assert max(rates) == rates[9] == _SETTINGS.learning_rate
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 1.1 * _SETTINGS.final_learning_rate


def test_width_that_heads_do_not_divide() -> None:
    with pytest.raises(ValueError, match="width=65 must be a multiple of heads=2"):
        ByteGPT(ModelSize(width=65, heads=2))


def test_settings_survive_the_way_to_a_rank() -> None:
    assert Settings.from_json(_SETTINGS.to_json()) == _SETTINGS


def test_every_collective_is_a_scheme_and_every_scheme_an_option() -> None:
    for name in COMBINE:
        assert SCHEMES[name] == {"combine": name}
    for options in SCHEMES.values():
        assert options["combine"] in COMBINE
        assert options.get("select", "topk") in SELECTIONS


def test_the_last_step_is_validated() -> None:
    assert _SETTINGS.validation_steps() == {7, 14, 21, 29, 36, 43, 50}
    assert dataclasses.replace(_SETTINGS, steps=2).validation_steps() == {1, 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "ddp-nccl"}, "run='ddp-nccl' does not exist: use ddp-gloo"),
        ({"scheme": "ring"}, "scheme='ring' does not exist: use one of allreduce, oktopk, gtopk"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"density": 0.0}, "density=0.0 must be above 0"),
        ({"density": 1.5}, "density=1.5 must be above 0 and at most 1"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_SETTINGS, **change)


def test_torchft_needs_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", types.ModuleType("torchft"))
    sys.modules["torchft"].__spec__ = importlib.machinery.ModuleSpec("torchft", None)
    with pytest.raises(ValueError, match="steps=10 must be a multiple of 4: torchft's replicas agree only then"):
        dataclasses.replace(_SETTINGS, run="torchft-diloco-4", steps=10)
    assert dataclasses.replace(_SETTINGS, run="torchft-diloco-4", steps=12).steps == 12
