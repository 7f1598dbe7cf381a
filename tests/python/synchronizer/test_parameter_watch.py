"""A model that has other parameters than those whose gradients are averaged is refused, and no other."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronised_net import OnRanks, loss_of, model_of, sgd
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from varied_options import objects_of

from telegrad import Communicator, Synchronizer
from telegrad.synchronizer import parameter_watch

X = torch.ones(2, 4)
REFUSED = r"parameter '0.weight' was unfrozen, added or replaced after its Synchronizer was made.* close\(\)"


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Others, with the same values."""
    return {name: nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}


def replace_all(model: nn.Module) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


def test_a_layer_that_was_replaced_is_refused_at_once(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="wfbp")
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        loss_of(model, 1, comm.rank, scaled=False).backward()  # type: ignore[no-untyped-call]
        model.tail = nn.Linear(4, 2)
        with pytest.raises(RuntimeError, match="parameter 'tail.weight' was unfrozen, added or replaced after its"):
            loss_of(model, 2, comm.rank)
        sync.close()
        Synchronizer(model, comm, plan="wfbp")
        loss_of(model, 2, comm.rank).backward()  # type: ignore[no-untyped-call]

    on_ranks(2, run)


def test_a_parameter_that_was_replaced_is_refused_in_the_backward_pass(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        Synchronizer(model, comm, plan="wfbp")
        model.tail.weight = nn.Parameter(torch.ones(2, 4))
        loss = loss_of(model, 0, comm.rank)
        with pytest.raises(RuntimeError, match="parameter 'tail.weight' was unfrozen, added or replaced after its"):
            loss.backward()  # type: ignore[no-untyped-call]

    on_ranks(2, run)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_all_of_whose_parameters_were_replaced_is_refused(on_ranks: OnRanks, compiled: bool) -> None:
    """A pass without any of those that it had calls no hook of theirs. What is compiled is not looked at."""

    def run(comm: Communicator) -> None:
        model = layers()
        sync = Synchronizer(model, comm, plan="wfbp")
        model(X).sum().backward()
        replace_all(model)
        with torch.no_grad():
            model(X)  # an evaluation trains nothing
        called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        loss = called(X).sum()
        if not compiled:
            with pytest.raises(RuntimeError, match=REFUSED.replace("0.weight", ".*")):
                loss.backward()
        sync.close()
        model(X).sum().backward()

    on_ranks(2, run)


@pytest.mark.parametrize("first", ["no_sync", "a pass with others"])
def test_it_is_refused_whatever_was_before(local: Callable[..., list[Communicator]], first: str) -> None:
    model = layers()
    sync = Synchronizer(model, local(1)[0], plan="wfbp")
    others = parameters_of(model)
    torch.func.functional_call(model, others, X).sum().backward()
    if first == "no_sync":
        replace_all(model)
        with sync.no_sync(), pytest.raises(RuntimeError, match=REFUSED.replace("0.weight", ".*")):
            model(X).sum().backward()
    else:  # the same that were harmless before
        model[0].weight, model[0].bias = others["0.weight"], others["0.bias"]
        model[1].weight, model[1].bias = others["1.weight"], others["1.bias"]
        with pytest.raises(RuntimeError, match=REFUSED.replace("0.weight", ".*")):
            model(X).sum().backward()


@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_pass_with_others_in_between_hides_nothing(
    local: Callable[..., list[Communicator]], teacher_first: bool
) -> None:
    model = layers()
    Synchronizer(model, local(1)[0], plan="wfbp")
    teacher = parameters_of(model)
    replace_all(model)
    if teacher_first:
        taught = torch.func.functional_call(model, teacher, X)
        learnt = model(X)
    else:
        learnt = model(X)
        taught = torch.func.functional_call(model, teacher, X)
    with pytest.raises(RuntimeError, match=REFUSED.replace("0.weight", ".*")):
        (learnt - taught.detach()).square().sum().backward()


def test_a_place_that_was_changed_harmlessly_is_looked_at_once(
    local: Callable[..., list[Communicator]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes milliseconds in a large model."""
    looks: list[None] = []
    check = parameter_watch.check_same_parameters
    monkeypatch.setattr(parameter_watch, "check_same_parameters", lambda *given: [looks.append(None), check(*given)][1])
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), frozen, nn.Linear(4, 2))
    Synchronizer(model, local(1)[0], plan="wfbp")
    model[1], model[2] = nn.Identity(), nn.Linear(4, 4).requires_grad_(False)
    model(X).sum().backward()
    assert looks
    looks.clear()
    model(X)
    assert not looks
    model[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=REFUSED.replace("0.weight", "2.*")):
        model(X).sum().backward()


def test_what_was_there_for_a_pass_is_forgotten_with_it(local: Callable[..., list[Communicator]]) -> None:
    model = layers()
    sync = Synchronizer(model, local(1)[0], plan="wfbp")
    for _ in range(3):
        torch.func.functional_call(model, parameters_of(model), X).sum().backward()
    gc.collect()
    assert not sync._watch._strangers


def test_a_pass_with_tensors_made_of_the_parameters_is_none_without_them(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        Synchronizer(model, comm, plan="single")
        doubled = {name: 2 * one for name, one in model.named_parameters()}
        torch.func.functional_call(model, doubled, torch.full((1, 2), comm.rank + 1.0)).sum().backward()
        assert model.weight.grad is not None
        return [*model.weight.grad.flatten().tolist()]

    assert on_ranks(2, run) == [[3.0, 3.0]] * 2


def _of_a_teacher(model: nn.Module, teacher: dict[str, nn.Parameter]) -> Tensor:
    taught = torch.func.functional_call(model, teacher, X)
    return (model(X) - taught.detach()).square().sum()  # type: ignore[no-any-return]


def _of_fast_weights(model: nn.Module, fast: dict[str, nn.Parameter]) -> Tensor:
    """Some steps of an inner loop in place, with gradients asked for, and accumulated."""
    for _ in range(2):
        gradients = torch.autograd.grad(torch.func.functional_call(model, fast, X).sum(), [*fast.values()])
        with torch.no_grad():
            for one, gradient in zip(fast.values(), gradients, strict=True):
                one.sub_(gradient, alpha=0.1)
        torch.func.functional_call(model, fast, X).sum().backward()
        assert all(one.grad is not None for one in fast.values())
    return model(X).sum()  # type: ignore[no-any-return]


def _of_fake_parameters(model: nn.Module, _: object) -> Tensor:
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(one) for name, one in model.named_parameters()}
        torch.func.functional_call(model, fake, torch.ones(2, 4))
    return model(X).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["single", "auto"])
@pytest.mark.parametrize(
    "loss", [_of_a_teacher, _of_fast_weights, _of_fake_parameters], ids=["teacher", "fast weights", "fake"]
)
def test_passes_with_other_parameters_for_a_while_are_harmless(
    on_ranks: OnRanks, loss: Callable[..., Tensor], plan: str
) -> None:
    def run(comm: Communicator) -> None:
        model = layers()
        sync = Synchronizer(model, comm, plan=plan)
        others = parameters_of(model)
        for _ in range(3):
            loss(model, others).backward()  # type: ignore[no-untyped-call]
        sync.close()
        assert not any(one._post_accumulate_grad_hooks for one in others.values())
        replace_all(model)
        loss(model, others).backward()  # type: ignore[no-untyped-call]

    on_ranks(2, run)


def test_a_layer_that_was_added_is_refused_soon(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> int:
        model = nn.Sequential(nn.Linear(4, 4))
        Synchronizer(model, comm, plan="wfbp")
        model(X).sum().backward()
        model.append(nn.Linear(4, 4))
        for step in range(20):
            loss = model(X).sum()
            if step < 19:
                loss.backward()
        with pytest.raises(RuntimeError, match=r"parameter '1.weight' was unfrozen, added or replaced"):
            loss.backward()
        return 20

    assert on_ranks(2, run) == [20, 20]


@pytest.mark.parametrize("options", [{"plan": "single"}, {"plan": "auto"}, {"plan": "single", "wait_in": sgd}])
def test_one_that_is_closed_holds_no_model(local: Callable[..., list[Communicator]], options: dict[str, Any]) -> None:
    model = layers()
    sync = Synchronizer(
        model,
        local(1)[0],
        **objects_of(
            **{
                "compress": None,
                **{name: value(model) if callable(value) else value for name, value in options.items()},
            }
        ),
    )
    model(X).sum().backward()
    model[1] = copy.deepcopy(model[1])
    with pytest.raises(RuntimeError, match=r"parameter '1.weight' was unfrozen, added or replaced"):
        model(X)
    sync.close()
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None
    assert sync.groups
    sync.close()
