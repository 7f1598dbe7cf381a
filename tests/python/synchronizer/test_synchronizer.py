"""Synchronizer: on ranks in threads, against averages that are computed by hand."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronised_net import NAMED, Broken, Net, OnRanks, assert_same, data, loss_of, model_of, reference, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from varied_options import objects_of

from telegrad import AutoPlan, Communicator, Synchronizer, TopK, TransportError

PLANS: list[Any] = ["auto", "greedy", "fixed", "wfbp", "single", NAMED]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan if isinstance(plan, str) else "named")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_is_that_of_one_process_with_all_data(on_ranks: OnRanks, ranks: int, plan: Any) -> None:
    expected = reference(ranks, 8)

    def run(comm: Communicator) -> list[Tensor]:
        model = model_of(comm.rank)  # rank 0's values are copied to all
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, **objects_of(None, plan=plan, plan_after=4))
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


@pytest.mark.parametrize("thawed_at", [6, 9])
def test_a_layer_is_frozen_while_groups_are_planned(on_ranks: OnRanks, thawed_at: int) -> None:
    steps, planned_at = 10, 4

    def frozen_loss(model: Net, step: int, rank: int) -> Tensor:
        model.tail.requires_grad_(not planned_at - 2 <= step < thawed_at)
        return loss_of(model, step, rank)

    expected = reference(2, steps, frozen_loss)

    def run(comm: Communicator) -> None:
        model = model_of(comm.rank)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=AutoPlan("greedy", after=planned_at))
        for step in range(steps):
            optimizer.zero_grad()
            frozen_loss(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert sync.plan is not None
        assert_same(model, expected)
        sync.close()

    on_ranks(2, run)


@pytest.mark.parametrize("plan", PLANS[:-1])
def test_parameters_without_elements(on_ranks: OnRanks, plan: str) -> None:
    """Wherever they are among the others: first, in the middle, last, and alone."""

    def run(comm: Communicator) -> None:
        for sizes in ([0, 3, 0, 2, 0], [0, 0], [0, 1 << 17]):
            model = nn.ParameterList([nn.Parameter(torch.zeros(size, 2)) for size in sizes])
            sync = Synchronizer(nn.ModuleList([model]), comm, plan=plan)
            for _ in range(2):
                sum((one * (comm.rank + 1)).sum() for one in model).backward()  # type: ignore[union-attr]
            for one in model:
                assert one.grad is not None
                assert one.grad.shape == one.shape
                assert (one.grad == 3.0).all()
            sync.close()

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
        Synchronizer(model, comm, plan="single").close()

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


@pytest.mark.parametrize("options", [{}, {"compress": "topk", "clip_norm": 1.0}], ids=["dense", "topk"])
def test_gradients_that_zero_grad_has_dropped_were_not_used(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> None:
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        sync = Synchronizer(model, comm, **objects_of(**{"compress": None, "plan": "single", **options}))
        with sync.no_sync():
            model["b"](torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        model["a"](torch.ones(2, 4)).sum().backward()
        assert model["b"].weight.grad is None
        assert model["a"].weight.grad is not None
        with sync.no_sync():
            model["b"](torch.ones(2, 4)).sum().backward()
        model["a"](torch.ones(2, 4)).sum().backward()
        assert model["b"].weight.grad is not None
        sync.close()

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
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3))
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


def test_an_exception_on_one_rank_only_is_told_on_all(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> str:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        Synchronizer(model, comm, plan="wfbp")
        middle = model[0](data(0, comm.rank))
        if comm.rank == 0:
            with pytest.raises(ArithmeticError):
                model[1](Broken.apply(middle)).sum().backward()  # type: ignore[no-untyped-call]
        said = []
        for step in range(2):
            model.zero_grad()
            try:
                model(data(step, comm.rank)).sum().backward()
            except TransportError as error:
                said.append(str(error))
        return said[0]

    assert any("an exception has ended a pass on some ranks only" in said for said in on_ranks(2, run, timeout_s=20))


def test_passes_that_no_forward_hook_sees_are_averaged_too(on_ranks: OnRanks) -> None:
    """After one that was broken off, and with a model whose ``forward`` is not called."""
    expected = reference(2, 4)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        Synchronizer(model, comm, plan="wfbp")
        with pytest.raises(ArithmeticError):
            model.tail(Broken.apply(model.body(data(5, 0)))).sum().backward()  # type: ignore[no-untyped-call]
        for step in range(4):
            optimizer.zero_grad()
            Net.forward(model, data(step, comm.rank)).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert_same(model, expected)

    on_ranks(2, run)


def test_without_times_groups_stay_as_they_are(local: Callable[..., list[Communicator]]) -> None:
    model = model_of(0)
    sync = Synchronizer(model, local(1)[0], plan=AutoPlan(after=3))
    for step in range(2):
        Net.forward(model, data(step, 0)).sum().backward()  # type: ignore[no-untyped-call]
    loss = Net.forward(model, data(3, 0)).sum()
    with pytest.warns(
        RuntimeWarning, match=r"groups stay as they are, because no times were taken.*, or use model.compile\(\)"
    ):
        loss.backward()  # type: ignore[no-untyped-call]
    assert sync.plan is None


def test_fused_optimizers_and_parameters_of_other_layouts(on_ranks: OnRanks) -> None:
    def transposed() -> nn.Module:
        model = nn.Module()
        model.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t() / 10)
        model.kernel = nn.Parameter(
            (torch.arange(2.0 * 3 * 2 * 2) / 20).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
        )
        return model

    def loss(model: Any, rank: int) -> Tensor:
        x = torch.arange(3.0 * 4).view(3, 4) / (3 + rank)
        image = torch.arange(3.0 * 4 * 4).view(1, 3, 4, 4) / (20 + rank)
        return (x @ model.weight).square().sum() + nn.functional.conv2d(image, model.kernel).square().sum()

    alone = transposed()
    adam = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(4):
        adam.zero_grad()
        for rank in range(2):
            (loss(alone, rank) / 2).backward()  # type: ignore[no-untyped-call]
        adam.step()

    def run(comm: Communicator) -> None:
        model = transposed()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        Synchronizer(model, comm, plan="single")
        for _ in range(4):
            optimizer.zero_grad()
            loss(model, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert_same(model, alone)

    on_ranks(2, run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(on_ranks: OnRanks, reentrant: bool) -> None:
    """A reentrant one is a backward pass inside of another: what has left before goes once more."""
    expected = reference(2, 3)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        Synchronizer(model, comm, plan="wfbp")
        for step in range(3):
            optimizer.zero_grad()
            x = checkpoint(model.body, data(step, comm.rank).requires_grad_(), use_reentrant=reentrant)
            x = checkpoint(lambda x: model.body(torch.tanh(x)), x, use_reentrant=reentrant)
            model.tail(x * model.frozen * model.scale).square().mean().backward()
            optimizer.step()
        assert_same(model, expected)

    on_ranks(2, run)


def test_two_on_one_communicator(on_ranks: OnRanks) -> None:
    """In one backward pass, one rank of which leaves a parameter out."""
    first, second = reference(2, 1), reference(2, 1)

    def run(comm: Communicator) -> None:
        models = [model_of(0), model_of(0)]
        optimizers = [sgd(one) for one in models]
        syncs = [Synchronizer(one, comm, plan="wfbp") for one in models]
        loss = loss_of(models[0], 0, comm.rank) + loss_of(models[1], 0, comm.rank)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        assert_same(models[0], first)
        assert_same(models[1], second)
        for sync in syncs:
            sync.close()

    on_ranks(2, run)


def test_gradients_that_do_not_come_stay_none(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="wfbp")
        torch.autograd.grad(loss_of(model, 0, comm.rank), [model.body.weight])
        model(data(1, comm.rank))
        assert all(one.grad is None for one in model.parameters())
        with sync.no_sync():
            loss_of(model, 0, comm.rank, scaled=False).backward()  # type: ignore[no-untyped-call]
        assert model.scale.grad is None
        model.frozen.requires_grad_(True)
        with pytest.raises(
            RuntimeError, match="parameter 'frozen' was unfrozen, added or replaced after its Synchronizer"
        ):
            loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]

    on_ranks(2, run)


def test_a_copy_of_the_model_is_its_own(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        Synchronizer(model, comm, plan="wfbp")
        twin = copy.deepcopy(model)
        if comm.rank == 0:  # nobody waits for the other ranks
            loss_of(twin, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert pickle.loads(pickle.dumps(model.state_dict())).keys() == model.state_dict().keys()
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]

    on_ranks(2, run)


def test_a_rank_that_fails_ends_the_backward_pass_of_the_others(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> str:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="wfbp")
        comm.barrier()  # both have rank 0's weights
        if comm.rank == 1:
            sync._comm.abort("out of memory")
            return ""
        loss = loss_of(model, 0, comm.rank)
        with pytest.raises(TransportError) as caught:
            loss.backward()  # type: ignore[no-untyped-call]
        return str(caught.value)

    assert "out of memory" in on_ranks(2, run)[0]


@pytest.mark.parametrize("compress", [None, TopK(0.05, small_elements=0)], ids=["dense", "topk"])
def test_the_jobs_counters_include_the_synchronizers(on_ranks: OnRanks, compress: TopK | None) -> None:
    """Also after it is closed, and those of a second one."""

    def run(comm: Communicator) -> int:
        before, sent = comm.stats()["bytes_sent"], 0
        for _ in range(2):
            model = nn.Linear(1000, 10)
            with contextlib.closing(Synchronizer(model, comm, plan="single", compress=compress)) as sync:
                own = sync.comm.stats()["bytes_sent"]
                weights = 4 * (10 * 1000 + 10)
                assert own >= (weights if comm.rank == 0 else 0)  # rank 0's are copied to the other
                for _ in range(3):
                    model(torch.ones(1, 1000)).sum().backward()
                sent += sync.comm.stats()["bytes_sent"]
                assert sync.comm.stats()["bytes_sent"] > own
                counted = comm.stats()["bytes_sent"]
                assert counted == comm.stats(own=True)["bytes_sent"] + sent
            assert comm.stats()["bytes_sent"] == counted
        return int(counted - before)

    assert min(on_ranks(2, run)) > 2 * 3 * (4 * 10 * 1000 if compress is None else 500)
