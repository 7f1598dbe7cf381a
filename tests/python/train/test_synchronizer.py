"""Synchronizer: on ranks in threads, against averages that are computed by hand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import telegrad
from telegrad import Communicator, Synchronizer, TransportError

OnRanks = Callable[..., list[Any]]
NAMED = [["tail.weight", "tail.bias"], ["scale"], ["body.weight"]]
PLANS: list[Any] = ["auto", "greedy", "fixed", "wfbp", "single", NAMED]

_SEEDING = threading.Lock()  # torch has one generator, and ranks are threads


class Net(nn.Module):
    """``scale`` is used by some passes only; ``spare`` by none; one layer is used twice; one parameter is frozen."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.tail = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        if spare:
            self.spare = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, *, scaled: bool = True) -> Tensor:
        x = self.body(torch.tanh(self.body(x))) * self.frozen
        return self.tail(x * self.scale if scaled else x)  # type: ignore[no-any-return]


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def model_of(seed: int, **options: Any) -> Net:
    with _SEEDING:
        torch.manual_seed(seed)
        return Net(**options)


def loss_of(model: Net, step: int, rank: int, **options: Any) -> Tensor:
    return model(data(step, rank), **options).square().mean()  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def reference(
    ranks: int, steps: int, loss: Callable[[Net, int, int], Tensor] = loss_of, clip: float | None = None
) -> Net:
    """One process that has the gradients of all ranks, one after another."""
    model = model_of(0)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(model, step, rank) / ranks).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan if isinstance(plan, str) else "named")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_is_that_of_one_process_with_all_data(on_ranks: OnRanks, ranks: int, plan: Any) -> None:
    expected = reference(ranks, 8)

    def run(comm: Communicator) -> list[Tensor]:
        model = model_of(comm.rank)  # rank 0's values are copied to all
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=plan, warmup_steps=4)
        for step in range(8):
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert_same(model, expected)
        assert sorted(name for group in sync.groups for name in group) == sorted(
            name for name, one in model.named_parameters() if one.requires_grad
        )
        assert (sync.plan is not None) == (plan in ("auto", "greedy"))
        if sync.plan is not None:
            assert [len(group) for group in sync.groups] == [len(group) for group in sync.plan.groups]
        sync.close()
        sync.close()
        return [one.detach().clone() for one in model.parameters()]

    results = on_ranks(ranks, run)
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


def test_steps_of_the_optimizer_wait_where_it_is_given(on_ranks: OnRanks) -> None:
    expected = reference(2, 5)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="wfbp", optimizer=optimizer)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            if step == 2:
                sync.wait()
            optimizer.step()
        assert_same(model, expected)

    on_ranks(2, run)


def test_gradients_are_views_of_flat_memory_and_own_theirs_after_close(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="single")
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        assert len({one.untyped_storage().data_ptr() for one in gradients}) == 1
        sync.close()
        own = [one.grad for one in model.parameters() if one.grad is not None]
        assert len({one.untyped_storage().data_ptr() for one in own}) == len(own) == len(gradients)
        assert all(map(torch.equal, own, gradients))
        own[0].zero_()
        loss_of(model, 1, comm.rank).backward()  # type: ignore[no-untyped-call]
        total = own[0].clone()
        comm.all_reduce(total)
        assert not torch.equal(total, own[0] * comm.world_size)  # nobody averages any more

    on_ranks(2, run)


def test_accumulation(on_ranks: OnRanks) -> None:
    def loss(model: Net, step: int, rank: int) -> Tensor:
        return sum(loss_of(model, 3 * step + part, rank, scaled=part != 2) for part in range(3))  # type: ignore[return-value]

    expected = reference(2, 4, loss)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="wfbp")
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                with sync.no_sync() if part < 2 else contextlib.nullcontext():
                    loss_of(model, 3 * step + part, comm.rank, scaled=part != 2).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert_same(model, expected)

    on_ranks(2, run)


def test_what_some_or_no_ranks_use(on_ranks: OnRanks) -> None:
    def loss(model: Net, step: int, rank: int) -> Tensor:
        return loss_of(model, step, rank, scaled=step == 1 and rank == 1)

    expected = reference(2, 4, loss)

    def run(comm: Communicator) -> None:
        model = model_of(0, spare=True)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="wfbp")
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            assert model.spare.grad is None
            assert (model.scale.grad is None) == (step != 1)
            optimizer.step()
        assert torch.equal(model.spare, torch.ones(7))
        del model.spare
        assert_same(model, expected)
        sync.close()

    on_ranks(2, run)


def test_what_no_pass_has_used_is_planned_too(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0, spare=True)
        sync = Synchronizer(model, comm, warmup_steps=3)
        for step in range(5):
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert sync.plan is not None
        assert sync.groups[-1][-1] == "spare"
        assert model.spare.grad is None

    on_ranks(2, run)


def test_clipping_is_of_the_averages(on_ranks: OnRanks) -> None:
    expected = reference(2, 5, clip=0.05)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        Synchronizer(model, comm, plan="fixed", clip_norm=0.05)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert_same(model, expected)

    on_ranks(2, run)


def test_gradients_of_two_dtypes_and_zero_grad_between_forward_and_backward(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[Tensor]:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16)])
        sync = Synchronizer(model, comm, plan="single")
        x = torch.full((2, 3), 1.0 + comm.rank)
        out = model[1](model[0](x).to(torch.bfloat16)).float().sum()
        model.zero_grad()
        out.backward()
        assert len(sync.groups) == 1
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    (first, second) = on_ranks(2, run)
    assert len(first) == 4
    assert all(map(torch.equal, first, second))
    assert first[0].dtype == torch.float32
    assert torch.equal(first[3], torch.full((3,), 2.0, dtype=torch.bfloat16))


def test_a_pass_that_was_broken_off_is_forgotten(on_ranks: OnRanks) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise ArithmeticError("half way")

    expected = reference(2, 1)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        Synchronizer(model, comm, plan="wfbp")
        with pytest.raises(ArithmeticError, match="half way"):
            model.tail(Broken.apply(model.body(data(5, 0)))).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert_same(model, expected)

    on_ranks(2, run)


def test_a_rank_that_dies_ends_the_backward_pass_of_the_others(local: Callable[..., list[Communicator]]) -> None:
    def run(comm: Communicator) -> str:
        model = model_of(0)
        Synchronizer(model, comm, plan="wfbp")
        if comm.rank == 1:
            comm.abort("out of memory")
            return ""
        loss = loss_of(model, 0, comm.rank)
        with pytest.raises(TransportError) as caught:
            loss.backward()  # type: ignore[no-untyped-call]
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        said = [one.result(60) for one in [pool.submit(run, comm) for comm in local(2)]]
    assert "out of memory" in said[0]


def _misuses() -> Iterable[tuple[Callable[[Communicator], Any], type[Exception], str]]:
    def of(error: type[Exception], said: str, **options: Any) -> tuple[Any, type[Exception], str]:
        return (lambda comm: Synchronizer(model_of(0), comm, **options)), error, said

    yield (lambda comm: Synchronizer(3, comm)), TypeError, "model is a int"  # type: ignore[arg-type]
    yield (lambda _: Synchronizer(model_of(0), 3)), TypeError, "comm is a int"  # type: ignore[arg-type]
    yield of(TypeError, "optimizer is a int", optimizer=3)
    yield of(ValueError, "plan='best' does not exist: use one of auto, optimal, greedy", plan="best")
    yield of(ValueError, "warmup_steps=2 must be at least 3", warmup_steps=2)
    yield of(ValueError, "clip_norm=0 must be above 0", clip_norm=0)
    yield of(ValueError, "plan names 'x', which is no parameter", plan=[["x"]])
    yield of(ValueError, "must be lists of names", plan=["tail.weight"])
    yield of(ValueError, "must be lists of names", plan=[[]])
    yield of(ValueError, "plan names a parameter twice", plan=[["scale", "scale"]])
    yield of(ValueError, "plan leaves 'scale' out", plan=[["body.weight", "tail.weight", "tail.bias"]])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    yield (lambda comm: Synchronizer(frozen, comm)), ValueError, "nothing to synchronise"
    elsewhere = nn.Linear(2, 2, device="meta")
    yield (lambda comm: Synchronizer(elsewhere, comm)), ValueError, "parameter 'weight' is torch.float32 on meta"


@pytest.mark.parametrize(("make", "error", "said"), [*_misuses()], ids=[said for _, _, said in _misuses()])
def test_misuse_is_refused(
    local: Callable[..., list[Communicator]], make: Callable[[Communicator], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make(local(1)[0])


def test_sparse_gradients_are_refused(local: Callable[..., list[Communicator]]) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    Synchronizer(model, local(1)[0], plan="single")
    out = model(torch.tensor([1, 2])).sum()
    model.zero_grad()
    with pytest.raises(TypeError, match=r"a gradient of shape \(5, 3\) is sparse: make its layer with sparse=False"):
        out.backward()


def test_it_is_part_of_the_package() -> None:
    assert telegrad.Synchronizer is Synchronizer
