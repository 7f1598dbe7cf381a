"""An optimiser that steps inside the backward pass is refused on all ranks; other changes of parameters are not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronised_net import OnRanks, assert_same, loss_of, model_of, reference, sgd
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from varied_options import objects_of

from telegrad import AutoPlan, Communicator, Synchronizer, TransportError
from telegrad.ddp import backward_watch as steps_in_backward

Hook = Callable[[Tensor], None]
STEPS = (
    r"SGD steps inside the backward pass, before the Synchronizer has averaged the gradient of 'tail.bias'.* call step"
)
CHANGED = (
    r"parameter '.*' was changed in place inside the backward pass, .* before the Synchronizer has averaged it.* call"
)


def step_of(one: nn.Parameter) -> Hook:
    optimizer = torch.optim.SGD([one], lr=0.1)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def update_of(one: nn.Parameter) -> Hook:
    def update(_: Tensor) -> None:
        assert one.grad is not None
        with torch.no_grad():
            one.sub_(one.grad, alpha=0.1)

    return update


def backward_twice(model: Any, rank: int) -> None:
    """A rank may have all averages of the pass in which another is found to have changed a parameter by itself."""
    for step in range(2):
        loss_of(model, step, rank).backward()  # type: ignore[no-untyped-call]


def hook_all(model: nn.Module, hook_of: Callable[[nn.Parameter], Hook]) -> None:
    for one in model.parameters():
        if one.requires_grad:
            one.register_post_accumulate_grad_hook(hook_of(one))


@pytest.mark.parametrize("plan", ["wfbp", "single"])
@pytest.mark.parametrize("hooks_first", [False, True])
def test_a_hook_that_steps_is_refused_before_it_has(on_ranks: OnRanks, plan: str, hooks_first: bool) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        if hooks_first:
            hook_all(model, step_of)
        Synchronizer(model, comm, plan=plan)
        if not hooks_first:
            hook_all(model, step_of)
        comm.barrier()
        with pytest.raises((RuntimeError, TransportError), match=STEPS):
            loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert_same(model, model_of(0))

    on_ranks(3, run)


def test_an_optimizer_that_torch_puts_there_is_refused_at_once(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        if comm.rank == 1:
            _apply_optimizer_in_backward(torch.optim.SGD, [model.tail.bias], {"lr": 0.1})
        with pytest.raises(ValueError, match=r"'tail.bias' has an optimizer that steps inside .*: make the opt"):
            Synchronizer(model, comm)

    on_ranks(2, run)


@pytest.mark.parametrize("plan", ["wfbp", "single"])
def test_and_later(on_ranks: OnRanks, plan: str) -> None:
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        Synchronizer(model, comm, plan=plan)
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        trained = [one for one in model.parameters() if one.requires_grad]
        _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1})
        both_trained.wait(60)  # an abort ends also what another rank has not finished
        with pytest.raises((RuntimeError, TransportError), match="SGD steps inside the backward pass, before the Sync"):
            loss_of(model, 1, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert_same(model, model_of(0))

    on_ranks(2, run)


@pytest.mark.parametrize("hook_of", [step_of, update_of])
@pytest.mark.parametrize("hooks_first", [False, True])
def test_one_rank_that_does_so_tells_the_others(
    on_ranks: OnRanks, hook_of: Callable[[nn.Parameter], Hook], hooks_first: bool
) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        if comm.rank == 1 and hooks_first:
            hook_all(model, hook_of)
        Synchronizer(model, comm, plan="single")
        if comm.rank == 1 and not hooks_first:
            hook_all(model, hook_of)
        comm.barrier()  # else one rank aborts before another has its Synchronizer
        error = RuntimeError if comm.rank == 1 else TransportError
        with pytest.raises(error, match=STEPS if hook_of is step_of else CHANGED):
            backward_twice(model, comm.rank)

    on_ranks(3, run)


@pytest.mark.parametrize("options", [{"plan": "wfbp"}, {"plan": "single"}, {"plan": "single", "wait_in": sgd}])
@pytest.mark.parametrize("name", ["tail.bias", "body.weight", "scale"], ids=["first", "last", "middle"])
@pytest.mark.parametrize("hooks_first", [False, True])
def test_a_hook_that_changes_one_parameter_by_itself_is_refused(
    on_ranks: OnRanks, options: dict[str, Any], name: str, hooks_first: bool
) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        one = model.get_parameter(name)
        if hooks_first:
            one.register_post_accumulate_grad_hook(update_of(one))
        Synchronizer(
            model,
            comm,
            **objects_of(
                **{
                    "compress": None,
                    **{key: value(model) if callable(value) else value for key, value in options.items()},
                }
            ),
        )
        if not hooks_first:
            one.register_post_accumulate_grad_hook(update_of(one))
        comm.barrier()
        with pytest.raises((RuntimeError, TransportError), match=CHANGED.replace("'.*'", f"'{name}'")):
            backward_twice(model, comm.rank)

    on_ranks(2, run)


def test_a_hook_is_followed_from_group_to_group(on_ranks: OnRanks) -> None:
    """Groups that are planned anew have their hooks behind those of others."""
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> int:
        model = model_of(0)
        Synchronizer(model, comm, plan=AutoPlan(after=3))
        counts: list[int] = []
        model.tail.bias.register_post_accumulate_grad_hook(lambda _: counts.append(1))
        optimizer = sgd(model)
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.tail.bias.register_post_accumulate_grad_hook(update_of(model.tail.bias))
        both_trained.wait(60)  # an abort ends also what another rank has not finished
        with pytest.raises((RuntimeError, TransportError), match=CHANGED):
            loss_of(model, 20, comm.rank).backward()  # type: ignore[no-untyped-call]
        return len(counts)

    assert on_ranks(2, run) == [21, 21]


class Several(nn.Module):
    """What changes in place in forward passes, or is made anew there: each layer's parameters must be left in peace."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, max_norm=1.0)
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.weighed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.tied = nn.Linear(4, 10)
        self.tied.weight = self.head.weight
        self.reentrant = reentrant

    def inner(self, words: Tensor, x: Tensor) -> Tensor:
        return self.weighed(torch.tanh(self.spectral(self.words(words) + x)))  # type: ignore[no-any-return]

    def forward(self, words: Tensor) -> Tensor:
        x = torch.zeros(len(words), 4, requires_grad=True)
        if self.reentrant is None:
            x = self.inner(words, x)
        else:
            x = checkpoint(self.inner, words, x, use_reentrant=self.reentrant)
        return self.tied(self.head(self.norm(x)) @ self.head.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["wfbp", "single"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_what_changes_in_forward_passes_and_between_steps_is_let_be(
    on_ranks: OnRanks, plan: str, reentrant: bool | None
) -> None:
    def run(comm: Communicator) -> None:
        torch.manual_seed(0)
        model = Several(reentrant=reentrant)
        average = copy.deepcopy(model)
        sync = Synchronizer(model, comm, plan=plan)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        counts: list[int] = []
        hook_all(model, lambda one: lambda _: counts.append(one._version))
        for step in range(4):
            for part in range(2):
                with torch.no_grad():
                    model.tied.bias.clamp_(-0.01, 0.01)
                words = torch.randint(10, (5,), generator=torch.Generator().manual_seed(10 * step + part))
                if part:
                    model(words).square().sum().backward()
                else:
                    with sync.no_sync():
                        model(words).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.no_grad():
                for mean, one in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(one, 0.5)
        assert counts
        sync.close()

    on_ranks(1, run)


def test_an_optimizer_of_other_parameters_may_step_in_a_hook(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model, other = model_of(0), nn.Linear(2, 2)
        sync = Synchronizer(model, comm, plan="single")
        optimizer, inner = sgd(model), sgd(other)

        def train_other(_: Tensor) -> None:
            inner.zero_grad()
            with torch.enable_grad():
                other(torch.ones(1, 2)).sum().backward()
            inner.step()

        model.tail.bias.register_post_accumulate_grad_hook(train_other)
        before = other.bias.detach().clone()
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert not torch.equal(other.bias, before)
        assert_same(model, reference(2, 3))
        sync.close()

    on_ranks(2, run)


def test_a_backward_pass_inside_a_step_is_none_the_other_way_round(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> Tensor:
        model = model_of(0)
        Synchronizer(model, comm, plan="single")
        optimizer = torch.optim.LBFGS([one for one in model.parameters() if one.requires_grad], max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, comm.rank)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return model.body.weight.detach()

    first, second = on_ranks(2, run)
    assert torch.equal(first, second)
    assert not torch.equal(first, model_of(0).body.weight)


def test_after_close_anything_goes(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="single")
        sync.close()
        hook_all(model, step_of)
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert not torch.equal(model.tail.bias, model_of(0).tail.bias)
        assert sync._watch._steps not in steps_in_backward._watches

    on_ranks(2, run)
