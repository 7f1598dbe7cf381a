"""What a Synchronizer refuses: misuse, and ranks that differ."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from synchronised_net import NAMED, OnRanks, loss_of, model_of, sgd
from torch import nn
from varied_options import objects_of

import telegrad
from telegrad import AutoPlan, Communicator, PeerFailed, Synchronizer, TransportError


@pytest.mark.parametrize(
    ("of_rank", "what"),
    [
        (lambda rank: {"plan": [NAMED, NAMED[::-1]][rank]}, "plan"),
        (lambda rank: {"plan": ["wfbp", "single"][rank]}, "plan"),
        (lambda rank: {"plan_after": 5 + rank}, "after"),
        (lambda rank: {"delay": rank}, "delay"),
        (lambda rank: {"clip_norm": 1.0 + rank}, "clip_norm"),
        (lambda rank: {"replan_factor": 2.0 + rank}, "replan_factor"),
    ],
    ids=["groups in another order", "plan", "plan_after", "delay", "clip_norm", "replan_factor"],
)
def test_ranks_that_differ_are_told_on_all(
    on_ranks: OnRanks, of_rank: Callable[[int], dict[str, Any]], what: str
) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=f"{what} of rank 1 and rank 0 differ: give all ranks the same"):
            Synchronizer(model_of(0), comm, **objects_of(**{"compress": None, **of_rank(comm.rank)}))

    on_ranks(2, run)


def test_it_is_said_who_has_what(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"give all ranks the same \(rank 1: 6, rank 0: 5\)$"):
            Synchronizer(model_of(0), comm, plan=AutoPlan(after=5 + comm.rank))
        plan = [
            ["body.weight", "scale", "tail.bias", "tail.weight"],
            ["body.weight", "scale", "tail.weight", "tail.bias"],
        ]
        with pytest.raises(
            ValueError, match=r"\(rank 1: …[^…]*\"tail.weight\", \"tail.bias\"\]\]\], rank 0: …[^…]*\)$"
        ):
            Synchronizer(model_of(0), comm, plan=[plan[comm.rank]])

    on_ranks(2, run)


def test_models_that_differ_are_told_on_all(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        if comm.rank == 1:
            model.scale.requires_grad_(False)
        with pytest.raises(ValueError, match="parameters that require a gradient of rank 1 and rank 0 differ"):
            Synchronizer(model, comm, plan="wfbp")

    on_ranks(2, run)


def _misuses() -> Iterable[tuple[Callable[[Communicator], Any], type[Exception], str]]:
    def of(error: type[Exception], said: str, **options: Any) -> tuple[Any, type[Exception], str]:
        return (
            (lambda comm: Synchronizer(model_of(0), comm, **objects_of(**{"compress": None, **options}))),
            error,
            said,
        )

    yield (lambda comm: Synchronizer(3, comm)), TypeError, "model is a int"  # type: ignore[arg-type]
    yield (lambda _: Synchronizer(model_of(0), 3)), TypeError, "comm is a int"  # type: ignore[arg-type]
    yield of(ValueError, "plan='best' does not exist: use one of auto, optimal, greedy", plan="best")
    yield of(ValueError, "clip_norm=0 must be above 0", clip_norm=0)
    yield of(ValueError, "wait_in='never' does not exist: use one of backward, step, forward", wait_in="never")
    yield of(ValueError, "wait_in needs optimizer=, and none is given that trains 'scale'", wait_in="forward")
    yield of(ValueError, "delay=2 must be 0 or 1", delay=2)
    yield of(ValueError, "delay=True must be 0 or 1", delay=True)
    yield of(ValueError, "plan='greedy' is decided by when backward.. ends, for which delay=1", plan="greedy", delay=1)
    yield of(ValueError, "compress=Cheapest.. is decided by when", compress="cheapest", delay=1)
    yield of(ValueError, "plan names 'x', which is no parameter", plan=[["x"]])
    yield of(ValueError, "must be a name or lists of names", plan=["tail.weight"])
    yield of(ValueError, "must be a name or lists of names", plan=[[]])
    yield of(ValueError, "plan names a parameter twice", plan=[["scale", "scale"]])
    yield of(ValueError, "plan leaves 'scale' out", plan=[["body.weight", "tail.weight", "tail.bias"]])
    frozen = nn.Linear(2, 2).requires_grad_(False)
    yield (lambda comm: Synchronizer(frozen, comm)), ValueError, "nothing to synchronise"
    strange = nn.Linear(2, 2)
    strange.register_buffer("sparse", torch.eye(2).to_sparse())
    yield (lambda comm: Synchronizer(strange, comm)), ValueError, "buffer 'sparse' is torch.sparse_coo on cpu"
    shared = nn.Linear(2, 2)
    shared.register_buffer("ones", torch.ones(1).expand(4))
    yield (lambda comm: Synchronizer(shared, comm)), ValueError, r"buffer 'ones' of shape \(4,\) is expanded"
    row = nn.ParameterList([nn.Parameter(torch.ones(1, 3).expand(2, 3), requires_grad=False), torch.ones(2)])
    yield (lambda comm: Synchronizer(row, comm)), ValueError, r"parameter '0' of shape \(2, 3\) is expanded"
    yield of(ValueError, "plan=3 must be a name or lists", plan=3)
    elsewhere = nn.Linear(2, 2, device="meta")
    yield (lambda comm: Synchronizer(elsewhere, comm)), ValueError, "parameter 'weight' is torch.float32 on meta"


@pytest.mark.parametrize(("make", "error", "said"), [*_misuses()], ids=[said for _, _, said in _misuses()])
def test_misuse_is_refused(
    local: Callable[..., list[Communicator]], make: Callable[[Communicator], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make(local(1)[0])


def test_a_constructor_that_fails_leaves_the_model_alone(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TransportError("a rank has died")

    monkeypatch.setattr("telegrad.synchronizer.synchronizer.copy_model_from_rank_0", fail)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        with pytest.raises(TransportError):
            Synchronizer(model, comm)
        loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert not any(one._post_accumulate_grad_hooks for one in model.parameters())

    on_ranks(2, run)


@pytest.mark.parametrize("what", ["ParameterWatch", "StepPlanning", "StepWait"])
def test_one_that_fails_late_leaves_it_alone_too(
    local: Callable[..., list[Communicator]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    model, comm = model_of(0), local(1)[0]
    with monkeypatch.context() as patched:
        patched.setattr(f"telegrad.synchronizer.synchronizer.{what}", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            Synchronizer(model, comm, wait_in="step", optimizer=sgd(model))
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    loss_of(model, 0, 0).backward()  # type: ignore[no-untyped-call]
    assert all(one.grad is None or one.grad._base is None for one in model.parameters())
    Synchronizer(model, comm)


def test_one_that_fails_on_one_rank_is_heard_of_by_the_others(on_ranks: OnRanks) -> None:
    other_has_one = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        if comm.rank == 1:

            def refuse(*_: Any, **__: Any) -> None:
                other_has_one.wait(60)  # who fails ends also what the other has not finished
                raise MemoryError("planted")

            model.register_forward_pre_hook = refuse  # type: ignore[method-assign]
            with pytest.raises(MemoryError):
                Synchronizer(model, comm, plan="single")
            comm.barrier()
            return
        Synchronizer(model, comm, plan="single")
        other_has_one.wait(60)
        with pytest.raises(PeerFailed, match="rank 1 .*closed its communicator"):
            loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        comm.barrier()

    on_ranks(2, run)


def test_an_optimizer_that_takes_no_hook_leaves_nothing(local: Callable[..., list[Communicator]]) -> None:
    class OfThisTest(nn.Linear): ...

    model = OfThisTest(4, 2)
    optimizer = sgd(model)

    def refuse(*_: Any) -> None:
        raise RuntimeError("planted")

    optimizer.register_step_post_hook = refuse  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            Synchronizer(model, local(1)[0], plan="single", wait_in="step", optimizer=optimizer)
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert OfThisTest not in copyreg.dispatch_table


def test_an_end_that_is_interrupted_has_come_to_its_end(local: Callable[..., list[Communicator]]) -> None:
    comm, model = local(1)[0], model_of(0)
    sync = Synchronizer(model, comm, plan="single")

    def interrupt() -> None:
        raise KeyboardInterrupt

    sync._undo.callback(interrupt)  # the first that is called
    with pytest.raises(KeyboardInterrupt):
        sync.close()
    sync.close()
    Synchronizer(model, comm, plan="single").close()


def test_a_model_has_one(local: Callable[..., list[Communicator]]) -> None:
    model, comm = model_of(0), local(1)[0]
    first = Synchronizer(model, comm, plan="single")
    with pytest.raises(ValueError, match=r"has a Synchronizer already: close\(\) that one first"):
        Synchronizer(model, comm)
    with pytest.raises(
        ValueError, match=r"parameter .* has a Synchronizer already"
    ):  # a part, or what has it as a part
        Synchronizer(nn.ModuleList([model]), comm)
    first.close()
    Synchronizer(model, comm)


def test_gradients_with_a_graph_are_refused(local: Callable[..., list[Communicator]]) -> None:
    model = model_of(0)
    Synchronizer(model, local(1)[0], plan="single")
    loss = loss_of(model, 0, 0)
    with pytest.raises(RuntimeError, match="create_graph"):
        loss.backward(create_graph=True)  # type: ignore[no-untyped-call]


def test_sparse_gradients_are_refused(local: Callable[..., list[Communicator]]) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    Synchronizer(model, local(1)[0], plan="single")
    out = model(torch.tensor([1, 2])).sum()
    with pytest.raises(TypeError, match=r"a gradient of shape \(5, 3\) is sparse: make its layer with sparse=False"):
        out.backward()


def test_it_is_part_of_the_package() -> None:
    assert telegrad.Synchronizer is Synchronizer


def test_a_plan_of_bad_values_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme='fixed' does not exist: use one of auto, optimal, greedy"):
        AutoPlan("fixed")
    with pytest.raises(ValueError, match="after=2 must be at least 3"):
        AutoPlan(after=2)
    with pytest.raises(ValueError, match="replan_factor=1 must be above 1"):
        AutoPlan(replan_factor=1)
    with pytest.raises(TypeError, match="replan_factor='2' must be a number, or None"):
        AutoPlan(replan_factor="2")  # type: ignore[arg-type]
