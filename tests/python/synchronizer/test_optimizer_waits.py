"""Synchronizer(wait_in=optimizer): backward passes end before their sums, and gradients are no averages until then."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from given_gradients import Rank, gradients_of
from synchronised_net import OnRanks, assert_same, loss_of, model_of, reference, sgd
from torch import Tensor, nn
from varied_options import objects_of

from telegrad import Communicator, Synchronizer, TransportError


@pytest.mark.parametrize("plan", ["auto", "single", "wfbp"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_is_that_of_one_process(on_ranks: OnRanks, plan: str, clip: float | None) -> None:
    expected = reference(2, 9, clip=clip)

    def run(comm: Communicator) -> None:
        model = model_of(comm.rank)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, clip_norm=clip, **objects_of(None, plan=plan, plan_after=3, wait_in=optimizer))
        for step in range(9):
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            assert all(one.grad is not None and one.grad.isnan().all() for one in model.tail.parameters())
            optimizer.step()
        assert_same(model, expected)
        assert (sync.plan is not None) == (plan == "auto")
        assert plan == "auto" or sync.report().passes > 0  # "auto" has just begun to try other groups
        sync.close()

    on_ranks(2, run)


def _weights(comm: Communicator, wait_in: str, act: Any) -> list[Tensor]:
    model = model_of(0)
    optimizer = sgd(model)
    given = None if wait_in == "backward" else [optimizer]
    sync = Synchronizer(model, comm, plan="wfbp", wait_in=wait_in, optimizer=given)
    for step in range(3):
        optimizer.zero_grad()
        act(model, optimizer, sync, 4 * step, comm.rank)
    sync.wait()
    found = [one.detach().clone() for one in model.parameters()]
    sync.close()
    return found


def _accumulates(model: Any, optimizer: Any, sync: Any, step: int, rank: int) -> None:
    loss_of(model, step, rank).backward()  # type: ignore[no-untyped-call]
    loss_of(model, step + 1, rank).backward()  # type: ignore[no-untyped-call]
    with sync.no_sync():
        loss_of(model, step + 2, rank, scaled=False).backward()  # type: ignore[no-untyped-call]
    loss_of(model, step + 3, rank).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _drops_some(model: Any, optimizer: Any, sync: Any, step: int, rank: int) -> None:
    loss_of(model, step, rank).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad(set_to_none=step != 4)
    optimizer.step()
    loss_of(model, step + 1, rank).backward()  # type: ignore[no-untyped-call]
    model.scale.grad = None
    optimizer.step()


def _steps_with_closures(model: Any, optimizer: Any, sync: Any, step: int, rank: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)


def _looks_at_gradients(model: Any, optimizer: Any, sync: Any, step: int, rank: int) -> None:
    loss_of(model, step, rank, scaled=step != 0).backward()  # type: ignore[no-untyped-call]
    sync.wait()
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


@pytest.mark.parametrize("act", [_accumulates, _drops_some, _steps_with_closures, _looks_at_gradients])
def test_as_where_backward_waits(on_ranks: OnRanks, act: Any) -> None:
    def run(comm: Communicator) -> None:
        plain, *others = (_weights(comm, one, act) for one in ("backward", "step", "forward"))
        assert all(all(map(torch.equal, one, plain)) for one in others)

    on_ranks(2, run)


def test_with_compression(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        found = []
        for deferred in (True, False):
            rank = Rank(comm, plan="single", waits=deferred)
            for step in range(4):
                rank.step(gradients_of(comm.rank, step))
                if step == 2:
                    rank.trains.step()
            found.append((rank.waiting(), rank.averages()))
            rank.sync.close()
        for with_it, without in zip(*found, strict=True):
            assert all(torch.equal(with_it[name], one) for name, one in without.items())

    on_ranks(2, run)


def test_what_uses_gradients_too_early_fails(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="single", wait_in="step", optimizer=sgd(model))
        losses = [loss_of(model, step, comm.rank) for step in range(2)]
        losses[0].backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="single memory location"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match="single memory location"):
            losses[1].backward()  # type: ignore[no-untyped-call]
        sync.wait()
        sync.wait()
        assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)
        sync.close()

    on_ranks(2, run)


def test_a_failed_sum_is_an_error_of_the_step(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan="single", wait_in="step", optimizer=optimizer)
        comm.barrier()  # both have one
        if comm.rank == 1:
            sync.comm.abort("no more")
            return
        before = [one.detach().clone() for one in model.parameters()]
        with contextlib.suppress(TransportError):
            loss_of(model, 0, 0).backward()  # type: ignore[no-untyped-call]
            with pytest.raises(TransportError):
                optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        sync.close()

    on_ranks(2, run)


def test_refused(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        with pytest.raises(TypeError, match="optimizer has a Net: give the torch.optim.Optimizer"):
            Synchronizer(model, comm, wait_in="step", optimizer=[sgd(model), model])  # type: ignore[list-item]
        some = torch.optim.SGD([*model.parameters()][1:], lr=0.1)
        with pytest.raises(ValueError, match="wait_in needs optimizer=, and none is given that trains 'scale'"):
            Synchronizer(model, comm, wait_in="step", optimizer=some)
        with pytest.raises(ValueError, match="wait_in of rank 1 and rank 0 differ"):
            Synchronizer(model, comm, wait_in="forward" if comm.rank else "step", optimizer=sgd(model))

    on_ranks(2, run)
