"""Synchronizer(wait_in="forward") steps a parameter when it is used next; Synchronizer(delay=1) has the averages of the
backward pass before."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronised_net import Broken, Net, OnRanks, loss_of, model_of, sgd
from torch import Tensor, nn
from varied_options import objects_of

from telegrad import Communicator, LowRank, Synchronizer, TransportError
from telegrad.synchronizer.optimizer_step import _ELEMENTWISE, AwaitedParameter, _Step

OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"small_elements": 1, "density": 0.3},
    "quantised": {"small_elements": 1, "formats": "int8"},
}


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.02)


def _values(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def _trained(comm: Communicator, wait_in: str, make: Any, look: Any) -> list[Any]:
    """What ``look`` has seen after each step, and the weights."""
    model = model_of(0)
    optimizer = make(model)
    sync = Synchronizer(model, comm, plan="wfbp", wait_in=wait_in, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen: list[Any] = []
    for step in range(7):
        loss_of(model, step, comm.rank, scaled=step != 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if wait_in == "forward":
            assert type(model.body.weight) is AwaitedParameter
        scheduler.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        seen.append(look(model, optimizer))
    seen.append(_values(model))
    sync.close()
    assert all(type(one) is nn.Parameter for one in model.parameters())
    return seen


def _flat(seen: Any) -> list[Tensor]:
    if isinstance(seen, (Tensor, float)):
        return [torch.as_tensor(seen).detach().clone()]
    if isinstance(seen, dict):
        seen = [*seen.values()]
    return [one for of in seen for one in _flat(of)] if isinstance(seen, (list, tuple)) else []


def _saved(model: nn.Module, _: Any) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _evaluated(model: Net, _: Any) -> float:
    with torch.inference_mode():
        return loss_of(model, 50, 0).item()


LOOKS: dict[str, Callable[..., Any]] = {
    "nothing": lambda *_: None,
    "state_dict": _saved,
    "copy": lambda model, _: _values(copy.deepcopy(model)),
    "evaluation": _evaluated,
    "optimizer": lambda _, optimizer: [
        one for _, one in sorted(copy.deepcopy(optimizer.state_dict()["state"]).items())
    ],
    "one": lambda model, _: model.tail.bias.data.clone(),
    "norm": lambda model, _: torch.cat([one.flatten() for one in model.parameters()]).norm(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("make", [sgd, _adam])
def test_forward_has_the_bits_of_a_step(on_ranks: OnRanks, make: Any, look: Any) -> None:
    def run(comm: Communicator) -> None:
        late, plain = (_flat(_trained(comm, one, make, look)) for one in ("forward", "step"))
        assert len(late) == len(plain)
        assert all(map(torch.equal, late, plain))

    on_ranks(2, run)


def test_only_the_layer_that_is_used_is_stepped(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="wfbp", wait_in="forward", optimizer=optimizer)
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.body(torch.ones(1, 4))
        kinds = {name: type(one) for name, one in model.named_parameters()}
        assert kinds["body.weight"] is nn.Parameter
        assert kinds["tail.weight"] is kinds["tail.bias"] is AwaitedParameter
        sync.close()
        assert type(model.tail.weight) is nn.Parameter

    on_ranks(2, run)


def test_a_scripted_part_is_stepped_before_the_pass(on_ranks: OnRanks) -> None:
    one_at_a_time = threading.Lock()

    def run(comm: Communicator) -> list[Tensor]:
        found = []
        for wait_in in ("forward", "step"):
            with one_at_a_time:  # TorchScript compiles a class once for all threads
                torch.manual_seed(0)
                model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
            optimizer = sgd(model)
            sync = Synchronizer(model, comm, plan="wfbp", wait_in=wait_in, optimizer=optimizer)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((2, 4), float(step + comm.rank))).square().mean().backward()
                optimizer.step()
            found.append(_values(model))
            sync.close()
        assert all(map(torch.equal, *found))
        return found[0]

    on_ranks(2, run)


def test_a_weight_that_was_used_too_early_is_an_error(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="wfbp", wait_in="forward", optimizer=optimizer)
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        with torch._C.DisableTorchFunctionSubclass():  # as an extension that is not Python
            loss = model.scale.sum() + model.tail.bias.sum()
        with pytest.raises((RuntimeError, TransportError), match="was used before its step was made"):
            loss.backward()
        with contextlib.suppress(TransportError):
            sync.close()

    on_ranks(2, run)


def test_groups_that_the_backward_pass_cannot_hide_leave_after_it(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> Any:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="wfbp", wait_in="forward", optimizer=optimizer)
        assert sync._order == [*range(8)]
        sync._timeline.totals = lambda _: (1.0 + comm.rank, 2.0)  # type: ignore[method-assign]
        for step in range(7):
            model(torch.full((2, 6), float(step + comm.rank))).tanh().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        order = sync._order
        found = _values(model)
        sync.close()
        return order, found

    (order, found), (other, same) = on_ranks(2, run)
    assert order == other == [0, 2, 4, 6, 7, 5, 3, 1]
    assert all(map(torch.equal, found, same))


def test_a_failed_sum_is_an_error_of_the_use(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="single", wait_in="forward", optimizer=optimizer)
        comm.barrier()
        if comm.rank == 1:
            sync.comm.abort("no more")
            return
        with contextlib.suppress(TransportError):
            loss_of(model, 0, 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with pytest.raises(TransportError):
                model.state_dict()
        sync.close()

    on_ranks(2, run)


class _Norm(torch.optim.SGD):
    """Scales by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 1.0)
        return super().step(closure)


def test_what_cannot_wait_in_forward_is_refused(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        lbfgs = torch.optim.LBFGS([one for one in model.parameters() if one.requires_grad])
        for options, said in (
            ({"clip_norm": 1.0}, "clip_norm=1.0 is not for wait_in='forward'"),
            (objects_of("topk"), r"compress=TopK\(.* is not for wait_in='forward'"),
            (objects_of(None, plan="optimal"), "plan='optimal' is decided by when backward"),
            (
                {"optimizer": _Norm(model.parameters(), lr=0.1)},
                "optimizer is a _Norm, and wait_in=.forward. ",
            ),
            ({"optimizer": lbfgs}, "optimizer is a LBFGS, and wait_in='forward' steps each"),
        ):
            with pytest.raises(ValueError, match=said):
                Synchronizer(model, comm, wait_in="forward", **{"optimizer": sgd(model), **options})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="delay=1 has the averages of the step before, and wait_in='step' waits"):
            Synchronizer(model, comm, wait_in="step", optimizer=sgd(model), delay=1)
        for delay in (2, True, 0.5):
            with pytest.raises(ValueError, match=f"delay={delay} must be 0 or 1"):
                Synchronizer(model, comm, delay=delay)  # type: ignore[arg-type]
        steps = objects_of("topk", feedback="steps", small_elements=1, optimizer=sgd(model))
        with pytest.raises(ValueError, match="feedback='steps' holds steps of the learning rate of their pass"):
            Synchronizer(model, comm, delay=1, **steps)

    on_ranks(2, run)


@pytest.mark.parametrize("kind", _ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_steps_by_parameter_have_the_bits_of_one_step(kind: Any) -> None:
    """Also where a scheduler has changed the rate in between."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    alone = copy.deepcopy(whole)
    one, other = (
        kind([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}], lr=0.1)
        for model in (whole, alone)
    )
    for scale in (1e-3, 1.0, 1e3):
        for own, same in zip(whole.parameters(), alone.parameters(), strict=True):
            own.grad = torch.randn_like(own) * scale
            same.grad = own.grad.clone()
        one.step()
        late = _Step(other)
        for group in (*one.param_groups, *other.param_groups):
            group["lr"] *= 0.5
        with torch.no_grad():
            for same in [*alone.parameters()][::-1]:
                late.make([same])
        assert all(map(torch.equal, whole.parameters(), alone.parameters()))


# One step of delay.


def _delayed_reference(ranks: int, steps: int, clip: float | None) -> list[Tensor]:
    """One process, which applies the averages of each step in the next one."""
    model = model_of(0)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = sgd(model)
    held: list[Tensor | None] = []
    for step in range(steps + 1):
        now = []
        if step < steps:
            optimizer.zero_grad()
            for rank in range(ranks):
                (loss_of(model, step, rank) / ranks).backward()  # type: ignore[no-untyped-call]
            now = [one.grad for one in trained]
        for one, gradient in zip(trained, held, strict=False):
            one.grad = gradient
        if held:
            if clip is not None:
                nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
        held = now
    return _values(model)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("plan", ["auto", "wfbp", "single"])
def test_delay_applies_averages_a_step_later(on_ranks: OnRanks, clip: float | None, plan: str) -> None:
    expected = _delayed_reference(2, 6, clip)

    def run(comm: Communicator) -> list[Tensor]:
        model = model_of(comm.rank)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=plan, clip_norm=clip, delay=1)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            if step == 0:
                assert all(one.grad is None for one in model.parameters())
            optimizer.step()
        sync.finish()
        optimizer.step()
        sync.close()
        return _values(model)

    found, other = on_ranks(2, run)
    assert all(map(torch.equal, found, other))
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["dense", "topk", "quantised", "low_rank"])
def test_delay_resumes_to_the_same_bits(on_ranks: OnRanks, how: str) -> None:
    given: dict[str, Any] = {"delay": 1}
    if how in ("topk", "quantised"):
        given |= objects_of(how, **OPTIONS[how])
    elif how == "low_rank":
        given["compress"] = LowRank(1, 8)

    def run(comm: Communicator) -> None:
        found = []
        for resumes in (False, True):
            model = model_of(0)
            optimizer = sgd(model)
            sync = Synchronizer(model, comm, plan="wfbp", **given)
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if step != 2:
                    continue
                if how != "dense":
                    with pytest.raises(ValueError, match="applied to no weights yet: call finish"):
                        sync.state_dict()
                sync.finish()
                optimizer.step()
                if resumes:
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                    unsent = None if how == "dense" else copy.deepcopy(sync.state_dict())
                    sync.close()
                    model = model_of(9)
                    optimizer = sgd(model)
                    sync = Synchronizer(model, comm, plan="wfbp", **given)
                    for one, state in zip((model, optimizer), saved, strict=True):
                        one.load_state_dict(state)
                    if unsent is not None:
                        sync.load_state_dict(unsent)
            sync.finish()
            optimizer.step()
            found.append(_values(model))
            sync.close()
        assert all(map(torch.equal, *found))

    on_ranks(2, run)


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(40, 1, bias=False), nn.Linear(40, 1, bias=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.always(x) + (self.seldom(x) if step % 3 == 0 else 0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["single", "wfbp"])
def test_what_was_sent_or_waits_is_all_of_it(on_ranks: OnRanks, plan: str) -> None:
    """With top-k and a delay, averages and residuals together are the sum of all gradients, also of a parameter that
    passes leave out on all ranks."""

    def run(comm: Communicator) -> Any:
        model = _Parts()
        sync = Synchronizer(model, comm, plan=plan, delay=1, **objects_of("topk", density=0.1, small_elements=1))
        given, averages = ({name: torch.zeros(1, 40) for name, _ in model.named_parameters()} for _ in range(2))
        for step in range(8):
            x = torch.randn(1, 40, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            model.zero_grad()
            if step < 7:
                model(x, step).sum().backward()
                for name in given:
                    given[name] += x if name.startswith("always") or step % 3 == 0 else 0
            else:
                sync.finish()
            for name, one in model.named_parameters():
                averages[name] += 0 if one.grad is None else one.grad
        left = {name: one["residual"] for name, one in sync.state_dict()["compressor"]["parameters"].items()}
        sync.close()
        return given, {name: torch.as_tensor(left[name]).view(1, 40) for name in given}, averages

    found = on_ranks(2, run)
    for name, average in found[0][2].items():
        given, left = (sum(one[place][name] for one in found) for place in (0, 1))
        torch.testing.assert_close(average * 2 + left, given, rtol=1e-5, atol=1e-5)


def test_averages_that_are_lost_are_said(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> Any:
        model = model_of(0)
        sync = Synchronizer(model, comm, delay=1)
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        return sync

    for sync in on_ranks(2, run):
        with pytest.warns(RuntimeWarning, match="the averages of the last backward pass were applied to no weights"):
            sync.close()


def test_a_pass_that_was_broken_off_cannot_be_taken_back(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, delay=1, plan="wfbp")
        with pytest.raises(ArithmeticError):
            model.tail(Broken.apply(model.body(torch.ones(1, 4)))).sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises((RuntimeError, TransportError), match="which delay=1 cannot take back"):
            loss_of(model, 0, 0).backward()  # type: ignore[no-untyped-call]
        sync.close()

    on_ranks(2, run)
