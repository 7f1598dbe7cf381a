"""StepProfile: times of a live model, by a clock that the model itself moves."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_clock import HandClock
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.synchronizer import StepProfile
from telegrad.synchronizer.clocks import PausedClock
from telegrad.synchronizer.trace import Trace

OnRanks = Callable[..., list[Any]]


class Slow(torch.autograd.Function):
    """The identity; its backward pass takes ``seconds`` of the clock."""

    @staticmethod
    def forward(context: Any, x: Tensor, clock: HandClock, seconds: Callable[[], float]) -> Tensor:
        context.clock, context.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        context.clock.now += context.seconds()
        return gradient, None, None


class Model(nn.Module):
    """Three layers, of which each takes a time that the test says; one parameter is frozen and one is never used."""

    def __init__(self, clock: HandClock, seconds: dict[str, float], forward_s: float = 2.0) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.clock, self.seconds, self.forward_s = clock, seconds, forward_s

    def forward(self, x: Tensor, wrap: Callable[[Tensor], Any] = lambda x: x) -> Any:
        for name in ("first", "second", "third"):
            weight = Slow.apply(getattr(self, name).weight, self.clock, lambda name=name: self.seconds[name])  # type: ignore[no-untyped-call]
            x = nn.functional.linear(x, weight) * self.frozen
        self.clock.now += self.forward_s
        return wrap(x)


SECONDS = {"first": 1.0, "second": 0.25, "third": 0.5}


def train(model: Model, steps: int, **forward: Any) -> None:
    for _ in range(steps):
        out = model(torch.ones(2, 3), **forward)
        while not isinstance(out, Tensor):
            out = out["out"] if isinstance(out, dict) else out[0]
        model.clock.now += 4.0  # the loss
        out.sum().backward()
        model.clock.now += 100.0  # the optimiser


def profiled(steps: int = 5, **forward: Any) -> Trace:
    clock = HandClock()
    model = Model(clock, SECONDS)
    with StepProfile(model, clock=clock) as profile:
        train(model, steps, **forward)
    return profile.trace()


def test_times_are_those_of_the_model() -> None:
    trace = profiled()
    assert trace.names == ("third.weight", "second.weight", "first.weight")
    assert trace.sizes == (36, 36, 36)
    assert trace.backward_times == (0.5, 0.25, 1.0)
    assert trace.forward_s == 6.0
    assert trace.about == "Model, medians"


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, 3), lambda x: [[x]], lambda x: {"out": (x, "text")}], ids=["tuple", "nested", "dictionary"]
)
def test_the_backward_pass_begins_at_the_outputs_wherever_they_are(wrap: Callable[[Tensor], Any]) -> None:
    assert profiled(wrap=wrap) == profiled()


def test_medians_forget_what_is_rare() -> None:
    clock = HandClock()
    model = Model(clock, dict(SECONDS))
    with StepProfile(model, skip=1, clock=clock) as profile:
        for step in range(8):
            model.seconds["second"] = 50.0 if step in (0, 3, 6) else 0.25
            train(model, 1)
    assert profile.samples == 7
    assert profile.trace().backward_times == (0.5, 0.25, 1.0)


def test_only_passes_that_train_count() -> None:
    clock = HandClock()
    model = Model(clock, SECONDS)
    with StepProfile(model, skip=0, clock=clock) as profile:
        train(model, 1)
        with torch.no_grad():
            model(torch.ones(2, 3))
        out = model(torch.ones(2, 3)) + model(torch.ones(2, 3))  # both before one backward pass
        out.sum().backward()
        assert profile.samples == 2
    train(model, 3)  # outside of the with statement
    assert profile.samples == 2
    assert profile.trace().forward_s == (6.0 + 4.0) / 2


def test_training_is_the_same_with_and_without() -> None:
    def weights(watch: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profile = StepProfile(model, skip=0)
        if watch:
            profile.__enter__()
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        if watch:
            profile.__exit__(None, None, None)
            trace = profile.trace()
            assert set(trace.names) == {"0.weight", "0.bias", "2.weight", "2.bias"}
            assert trace.compute_s > 0
            assert not model._forward_hooks
            assert not model._forward_pre_hooks
        return [*model.parameters()]

    assert all(map(torch.equal, weights(True), weights(False)))


def test_a_profile_that_is_forgotten_stops() -> None:
    clock = HandClock()
    model = Model(clock, SECONDS)
    with StepProfile(model, clock=clock) as profile:
        train(model, 210)
    assert profile.samples == 200


def test_a_gradient_counts_when_the_last_rank_has_it(on_ranks: OnRanks) -> None:
    """Which rank is last differs from pass to pass and from gradient to gradient."""

    def run(comm: Communicator) -> Trace:
        clock = HandClock()
        model = Model(clock, dict(SECONDS))
        with StepProfile(model, clock=clock) as profile:
            train(model, 2 + (comm.rank == 2))  # one more that the others do not have
            for step in range(3):
                model.seconds = {**SECONDS, "second": 0.25 + (comm.rank == step)}
                train(model, 1)
            return profile.trace(comm)

    traces = on_ranks(3, run)
    assert traces[0] == traces[1] == traces[2]
    assert traces[0].backward_times == (0.5, 1.25, 1.0)
    assert traces[0].forward_s == 6.0


class _Timed(torch.optim.SGD):
    """Its step takes ``seconds`` of the clock."""

    def __init__(self, model: nn.Module, clock: HandClock, seconds: float) -> None:
        super().__init__(model.parameters(), lr=1e-3)
        self.clock, self.seconds = clock, seconds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.now += self.seconds
        super().step(closure)


def _accumulated(profile: StepProfile, model: Model, optimizer: _Timed, passes: int, steps: int = 4) -> None:
    with profile:
        for _ in range(steps):
            train(model, passes)
            optimizer.step()


@pytest.mark.parametrize("passes", [1, 4])
def test_passes_of_an_optimizer_step_and_its_time_are_recorded(passes: int) -> None:
    clock = HandClock()
    model = Model(clock, SECONDS)
    optimizer = _Timed(model, clock, 3.0)
    with StepProfile(model, skip=2, clock=clock, optimizer=optimizer) as profile:
        for number in range(4):
            train(model, passes)
            _Timed(model, clock, 50.0).step()  # another one
            optimizer.seconds = 9.0 if number == 0 else 3.0
            optimizer.step()
    trace = profile.trace()
    assert trace.accumulate == passes
    assert trace.rest_s == 3.0
    assert trace.backward_times == (0.5, 0.25, 1.0)


def test_without_an_optimizer_there_is_one_pass_and_no_time() -> None:
    trace = profiled()
    assert (trace.accumulate, trace.rest_s, trace.samples) == (1, 0.0, None)
    clock = HandClock()
    model = Model(clock, SECONDS)
    with StepProfile(model, clock=clock, optimizer=_Timed(model, clock, 3.0)) as profile:  # which never steps
        train(model, 5)
    assert (profile.trace().accumulate, profile.trace().rest_s) == (1, 0.0)


def test_hooks_of_optimizers_are_removed() -> None:
    clock = HandClock()
    model = Model(clock, SECONDS)
    optimizer = _Timed(model, clock, 3.0)
    profile = StepProfile(model, skip=0, clock=clock, optimizer=optimizer)
    _accumulated(profile, model, optimizer, 2, steps=1)
    before = profile.trace()
    optimizer.seconds = 100.0
    train(model, 5)
    optimizer.step()
    assert profile.trace() == before
    assert (before.accumulate, before.rest_s) == (2, 3.0)


def test_a_profile_that_is_entered_again_goes_on() -> None:
    clock = HandClock()
    model = Model(clock, SECONDS)
    optimizer = _Timed(model, clock, 3.0)
    profile = StepProfile(model, skip=0, clock=clock, optimizer=optimizer)
    for _ in range(3):
        _accumulated(profile, model, optimizer, 4, steps=2)
    assert (profile.trace().accumulate, profile.trace().rest_s, profile.samples) == (4, 3.0, 24)


def test_ranks_agree_on_passes_and_time_of_a_step(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> Trace:
        clock = HandClock()
        model = Model(clock, dict(SECONDS))
        optimizer = _Timed(model, clock, 1.0 + comm.rank)
        profile = StepProfile(model, skip=0, clock=clock, optimizer=optimizer)
        _accumulated(profile, model, optimizer, 2)
        return profile.trace(comm)

    traces = on_ranks(3, run)
    assert traces[0] == traces[1] == traces[2]
    assert (traces[0].accumulate, traces[0].rest_s) == (2, 3.0)


def test_an_optimizer_that_does_not_train_the_model_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TypeError, match="optimizer is a float: give the torch"):
        StepProfile(model, optimizer=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer has no parameter of the model: give the one that trains it"):
        StepProfile(model, optimizer=torch.optim.SGD(other.parameters()))


@pytest.mark.parametrize("steps", [[0, 3], [3, 2]], ids=["the first rank", "only skipped ones"])
def test_a_rank_without_samples_is_told_on_all(on_ranks: OnRanks, steps: list[int]) -> None:
    def run(comm: Communicator) -> None:
        clock = HandClock()
        model = Model(clock, SECONDS)
        with StepProfile(model, clock=clock) as profile:
            train(model, steps[comm.rank])
            with pytest.raises(RuntimeError, match="more are needed"):
                profile.trace(comm)

    on_ranks(2, run)


def test_models_of_other_sizes_are_refused(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(comm.rank + 1)))
        with StepProfile(model, skip=0) as profile:
            model(torch.ones(1, 2)).sum().backward()
            with pytest.raises(ValueError, match=r"have \[2, 4\] parameters"):
                profile.trace(comm)

    on_ranks(2, run)


def test_misuse_is_refused() -> None:
    with pytest.raises(TypeError, match="model is a int: give the torch"):
        StepProfile(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to profile"):
        StepProfile(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="skip=-1"):
        StepProfile(nn.Linear(2, 2), skip=-1)
    profile = StepProfile(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"0 passes of the model's forward\(\) were watched.* and 2 are left out"):
        profile.trace()
    with profile, pytest.raises(RuntimeError, match="in use already"):
        profile.__enter__()


def test_a_paused_clock_leaves_out_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 13.0, 14.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = PausedClock()
    before = clock.mark()
    clock.leave_out(2.5)
    after = clock.mark()
    assert clock.between_s(before, after) == 0.5
    assert clock.between_s(after, clock.mark()) == 1.0


def test_a_copy_of_the_model_is_not_watched() -> None:
    model = nn.Linear(3, 2)
    with StepProfile(model, skip=0) as profile:
        model(torch.ones(1, 3)).sum().backward()
        twin = copy.deepcopy(model)
        for _ in range(3):
            twin(torch.ones(1, 3)).sum().backward()
        assert profile.samples == 1
