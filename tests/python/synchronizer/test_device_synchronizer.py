"""A Synchronizer of parameters on a device whose streams compute (computing_device.py): each rank is a thread with a
stream, and what would make its host wait for the device raises."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, HostWaitError, model_on
from device_ranks import RANKS
from device_synchronizers import Each, Rank
from synchronised_net import NAMED, Net, loss_of, model_of, reference, sgd
from torch import nn
from varied_options import objects_of

from telegrad import Communicator, Synchronizer
from telegrad.errors import MismatchedCall, TransportError
from telegrad.synchronizer import synchronised_model


def assert_trained(rank: Rank, expected: nn.Module, **tolerances: float) -> None:
    rank.stream.synchronize()
    tolerances = tolerances or {"rtol": 1e-4, "atol": 1e-6}
    for one, other in zip(rank.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.memory, other.detach().to(rank.dtype), **tolerances)  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", ["fixed", "single", "wfbp", NAMED])
def test_it_trains_as_one_process_with_all_data(on_each: Each, plan: Any) -> None:
    def train(rank: Rank) -> Rank:
        rank.train(6)
        assert rank.sync.is_settled
        assert rank.sync.plan is None
        return rank

    for rank in on_each(train, plan=plan):
        assert_trained(rank, reference(RANKS, 6))


def test_averaged_gradients_are_clipped(on_each: Each) -> None:
    def train(rank: Rank) -> Rank:
        rank.train(4)
        return rank

    for rank in on_each(train, clip_norm=0.05):
        assert_trained(rank, reference(RANKS, 4, clip=0.05))


def test_bfloat16(on_each: Each) -> None:
    def backward(rank: Rank) -> dict[str, torch.Tensor | None]:
        rank.backward(0)
        return rank.gradients()

    found = on_each(backward, dtype=torch.bfloat16)
    model = reference(1, 0)
    for number in range(RANKS):
        (loss_of(model, 0, number) / RANKS).backward()  # type: ignore[no-untyped-call]
    for gradients in found:
        for name, one in model.named_parameters():
            mine, of_rank_0 = gradients[name], found[0][name]
            if one.grad is None:
                assert mine is None
                continue
            assert mine is not None
            assert mine.dtype == torch.bfloat16
            assert torch.equal(mine, of_rank_0)
            torch.testing.assert_close(mine.float(), one.grad, rtol=0.1, atol=0.02)


def test_steps_are_enqueued_while_the_device_is_far_behind(on_each: Each) -> None:
    held = threading.Event()
    enqueued = threading.Barrier(RANKS)

    def train(rank: Rank) -> Rank:
        rank.stream.synchronize()
        rank.stream.put(held.wait)
        rank.train(3)
        enqueued.wait(60)  # all hosts have come here, and no stream has computed anything
        held.set()
        return rank

    for rank in on_each(train, plan="wfbp"):
        assert_trained(rank, reference(RANKS, 3))


def test_the_test_device_tells_of_a_host_that_waits(on_each: Each) -> None:
    def look(rank: Rank) -> None:
        rank.backward(0)
        gradient = rank.model.body.weight.grad
        assert gradient is not None
        for call in (gradient.sum().item, gradient.isnan().any().__bool__, lambda: torch.zeros(4, 4).copy_(gradient)):
            with pytest.raises(HostWaitError):
                call()

    on_each(look)


def test_parameters_that_not_all_ranks_have_used(on_each: Each) -> None:
    """The host of a rank that has not waits, and hears whether others have."""

    def backward(rank: Rank) -> list[dict[str, torch.Tensor | None]]:
        rank.backward(0, scaled=rank.comm.rank == 1)
        some = rank.gradients()
        rank.optimizer.zero_grad()
        rank.backward(1, scaled=False)
        return [some, rank.gradients()]

    host = model_of(0, spare=True)
    for number in range(RANKS):
        (loss_of(host, 0, number, scaled=number == 1) / RANKS).backward()  # type: ignore[no-untyped-call]
    for some, none in on_each(backward, plan="single", spare=True):
        torch.testing.assert_close(some["scale"], host.scale.grad, rtol=1e-4, atol=1e-6)
        assert some["spare"] is None
        assert none["scale"] is None
        assert none["body.weight"] is not None


def test_passes_that_add_up(on_each: Each) -> None:
    def backward(rank: Rank) -> dict[str, torch.Tensor | None]:
        with rank.sync.no_sync():
            rank.backward(0)
        rank.backward(1)
        return rank.gradients()

    host = model_of(0)
    for number in range(RANKS):
        for step in range(2):
            (loss_of(host, step, number) / RANKS).backward()  # type: ignore[no-untyped-call]
    for gradients in on_each(backward):
        torch.testing.assert_close(gradients["body.weight"], host.body.weight.grad, rtol=1e-4, atol=1e-6)


def test_nan_arrives_on_all_ranks(on_each: Each) -> None:
    def backward(rank: Rank) -> dict[str, torch.Tensor | None]:
        if rank.comm.rank == 1:
            rank.model.tail.bias.register_hook(lambda gradient: gradient * float("nan"))
        rank.backward(0)
        return rank.gradients()

    for gradients in on_each(backward):
        bias, body = gradients["tail.bias"], gradients["body.weight"]
        assert bias is not None
        assert body is not None
        assert torch.isnan(bias).all()
        assert torch.isfinite(body).all()


def test_after_a_failure_gradients_are_nan_and_the_next_pass_raises(on_each: Each) -> None:
    closed, all_have_gradients = threading.Event(), threading.Barrier(RANKS)

    def backward(rank: Rank) -> None:
        rank.backward(0)
        rank.gradients()
        all_have_gradients.wait(60)  # an abort ends also what another rank has not finished
        if rank.comm.rank == 2:
            rank.sync.comm.close()
            closed.set()
            return
        closed.wait(60)
        with contextlib.suppress(TransportError):
            rank.backward(1)
        rank.stream.synchronize()
        with pytest.raises(TransportError, match="rank 2 closed"):
            rank.sync.comm.synchronize()
        with pytest.raises(TransportError, match="rank 2 closed"):
            rank.backward(2)

    on_each(backward, plan="single")


def test_a_large_model_is_copied_in_parts(on_each: Each, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    synchronize = Communicator.synchronize

    def wait(comm: Communicator) -> None:
        waits.append(comm.rank)
        synchronize(comm)

    monkeypatch.setattr(Communicator, "synchronize", wait)
    monkeypatch.setattr(synchronised_model, "STAGED_BYTES", 1)
    tensors = on_each(
        lambda rank: [waits.count(rank.comm.rank), len([*rank.model.parameters(), *rank.model.buffers()])]
    )
    assert all(found == count + 1 for found, count in tensors)


def test_ranks_in_different_passes(on_each: Each) -> None:
    all_trained = threading.Barrier(RANKS)

    def train(rank: Rank) -> None:
        rank.train(1)
        all_trained.wait(60)  # an abort ends also what another rank has not finished
        if rank.comm.rank == 1:
            rank.sync._passes += 1  # as where an exception has ended a pass here only

        def go_on() -> None:
            held = threading.Event()
            rank.stream.put(held.wait)
            try:
                rank.train(1)  # of which the host cannot see anything yet
            finally:
                held.set()
            rank.stream.synchronize()
            rank.train(1)
            rank.sync.comm.synchronize()

        # The pass in which they were apart, whoever says so first, and not the one in which that is seen.
        apart = "rank (0|2) is in backward pass 1,|rank 1 is in backward pass 2, and another rank is"
        with pytest.raises((MismatchedCall, TransportError), match=apart):
            go_on()

    on_each(train)


def test_close_keeps_the_averages(on_each: Each) -> None:
    def train(rank: Rank) -> Rank:
        rank.train(3)
        rank.sync.close()  # while streams are still under way
        return rank

    for rank in on_each(train):
        assert_trained(rank, reference(RANKS, 3))
        assert not any(one._post_accumulate_grad_hooks for one in rank.model.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"compress": "cheapest"},
            TypeError,
            "compress=Cheapest.* chooses by the host's clock, and the parameters are on a device: use TopK, LowR",
        ),
        (
            {"compress": "topk", "plan": "optimal"},
            ValueError,
            "plan='optimal' needs to know what compressed sums cost, .*: use 'auto'",
        ),
        ({"wait_in": sgd}, ValueError, "wait_in and delay are for parameters on the host"),
        ({"delay": 1}, ValueError, "wait_in and delay are for parameters on the host"),
    ],
)
def test_what_is_for_the_host_is_refused(
    device: ComputingRuntime, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    (alone,) = Communicator.local(1)
    with device.on(device.new_stream()), alone:
        model = model_on(device, Net())
        options = {name: sgd(model) if value is sgd else value for name, value in options.items()}
        with pytest.raises(error, match=message):
            Synchronizer(model, alone, **objects_of(**{"compress": None, **options}))


def test_parameters_in_two_places_are_refused(device: ComputingRuntime) -> None:
    (alone,) = Communicator.local(1)
    with device.on(device.new_stream()), alone:
        model = model_on(device, Net())
        model.tail.bias = nn.Parameter(torch.zeros(2))
        with pytest.raises(
            ValueError, match="parameter '.*' is on .* and '.*' on .*: a Synchronizer takes those of one"
        ):
            Synchronizer(model, alone)
