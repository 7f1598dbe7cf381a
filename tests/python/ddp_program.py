"""What the ranks of test_ddp.py do.

Each function is one scenario; it asserts, and all ranks run the same ones in the same order.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from varied_options import objects_of

import telegrad
from telegrad import Communicator, DDPState, TopK
from telegrad.errors import NonFiniteGradient, TransportError

STEPS = 6
WIDTH = 600  # one weight fills DDP's first bucket of 1 MiB


class Net(torch.nn.Module):
    """Several buckets, small tensors, and a branch that some steps do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(24, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.branch = torch.nn.Linear(WIDTH, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, take_branch: bool = True) -> torch.Tensor:
        x = torch.relu(self.middle(self.norm(self.inner(x))))
        return self.outer(x + self.branch(x) if take_branch else x)


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 24, generator=generator)
    return x, x[:, :5].abs()


class Training:
    """A model, its optimiser and, unless ``mode`` is None (DDP alone), a telegrad hook."""

    def __init__(
        self, comm: Communicator, mode: str | None = "sparse", dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        torch.manual_seed(0)
        ddp_options = options.pop("ddp", {})
        self.model = Net().to(dtype)
        options.pop("prepare", lambda model: None)(self.model)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=1, **ddp_options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.02, momentum=0.5)
        self.state: DDPState | None = None
        self.rank, self.dtype = dist.get_rank(), dtype
        if mode is not None:
            self.state = DDPState(
                comm, self.ddp, **objects_of(**{"compress": None if mode == "dense" else "topk", **options})
            )
            self.ddp.register_comm_hook(self.state, telegrad.ddp_hook)

    def backward(self, step: int, take_branch: bool = True) -> float:
        x, y = data(step, self.rank)
        loss = torch.nn.functional.mse_loss(self.ddp(x.to(self.dtype), take_branch), y.to(self.dtype))
        loss.backward()
        return loss.item()

    def step(self, step: int, take_branch: bool = True) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(step, take_branch)
        self.optimizer.step()
        return loss

    def run(self, first: int = 0, last: int = STEPS) -> list[float]:
        return [self.step(step) for step in range(first, last)]

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def memory(self) -> dict[str, Any]:
        assert self.state is not None
        return self.state.state_dict()["compressor"]["parameters"]


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a, b), f"differ in {(a != b).sum()} of {a.numel()}, by up to {(a - b).abs().max()}"


def assert_replicas_agree(comm: Communicator, training: Training) -> None:
    for other in comm.all_gather(training.flat()):
        assert_equal(other, training.flat())


def dense_equals_ddp(comm: Communicator) -> None:
    plain, dense = Training(comm, None), Training(comm, "dense")
    assert plain.run() == dense.run()
    assert_equal(plain.flat(), dense.flat())  # bitwise: two ranks, and halving is exact
    assert dense.state is not None
    assert dense.state.step == STEPS


def density_one_equals_dense(comm: Communicator) -> None:
    dense, sparse = Training(comm, "dense"), Training(comm, "sparse", density=1.0)
    assert dense.run() == sparse.run()
    assert_equal(dense.flat(), sparse.flat())
    assert sparse.state is not None
    assert sparse.state.stats.selected == sparse.state.stats.wanted > 0


def gradient_as_bucket_view(comm: Communicator) -> None:
    plain = Training(comm, None)
    sparse = Training(comm, "sparse", density=1.0, ddp={"gradient_as_bucket_view": True})
    assert plain.run() == sparse.run()
    assert_equal(plain.flat(), sparse.flat())


def sparse_learns_and_replicas_agree(comm: Communicator) -> None:
    for selection in ("reused", "topk"):
        training = Training(comm, "sparse", density=0.02, select=selection)
        losses = training.run(0, 30)
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
        assert_replicas_agree(comm, training)
        assert training.state is not None
        stats = training.state.stats
        assert stats.buckets >= 3 * 29, "the model must fill several buckets"
        assert 0.5 < stats.selected_to_wanted < 2
        assert all(entry["residual"].abs().sum() > 0 for entry in training.memory().values())


def small_tensors_stay_dense(comm: Communicator) -> None:
    plain, sparse = Training(comm, None), Training(comm, "sparse", density=0.001)
    plain.backward(0)
    sparse.backward(0)
    names = set(sparse.memory())
    assert names == {f"module.{name}.weight" for name in ("inner", "middle", "branch", "outer")}
    for (name, a), b in zip(plain.ddp.named_parameters(), sparse.ddp.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        if name in names:
            assert 0 < torch.count_nonzero(b.grad) <= 4 * 0.001 * b.numel() + 2
        else:
            assert_equal(a.grad, b.grad)


def accumulation_with_no_sync(comm: Communicator) -> None:
    trainings = [Training(comm, None), Training(comm, "dense"), Training(comm, "sparse", density=1.0)]
    for training in trainings:
        for step in range(4):
            training.optimizer.zero_grad()
            for part in range(3):
                with training.ddp.no_sync() if part < 2 else contextlib.nullcontext():
                    training.backward(3 * step + part)
            training.optimizer.step()
        assert_equal(training.flat(), trainings[0].flat())
        assert training.state is None or training.state.step == 4


def unused_parameters(comm: Communicator) -> None:
    find = {"find_unused_parameters": True}
    plain = Training(comm, None, ddp=find)
    others = [Training(comm, "dense", ddp=find), Training(comm, "sparse", density=1.0, ddp=find)]
    for step in range(STEPS):
        # on both ranks, on rank 0 only, on none
        takes = step % 3 == 0 or (step % 3 == 1 and comm.rank == 0)
        for training in (plain, *others):
            training.step(step, takes)
    for training in others:
        assert_equal(training.flat(), plain.flat())
    sparse = Training(comm, "sparse", density=0.02, ddp=find)
    sparse.step(0)
    before = sparse.memory()["module.branch.weight"]["residual"]
    sparse.step(1, take_branch=False)
    assert_equal(sparse.memory()["module.branch.weight"]["residual"], before)
    sparse.step(2)
    assert not torch.equal(sparse.memory()["module.branch.weight"]["residual"], before)
    assert_replicas_agree(comm, sparse)


def warm_up(comm: Communicator) -> None:
    plain, sparse = Training(comm, None), Training(comm, "sparse", warmup_steps=3)
    assert plain.run(0, 3) == sparse.run(0, 3)
    assert_equal(plain.flat(), sparse.flat())
    assert not any(entry["residual"].any() for entry in sparse.memory().values())
    plain.step(3)
    sparse.step(3)
    assert not torch.equal(plain.flat(), sparse.flat())


def resume(comm: Communicator) -> None:
    for selection in ("reused", "topk"):
        first = Training(comm, "sparse", density=0.05, select=selection)
        first.run(0, 5)
        assert first.state is not None
        file = io.BytesIO()
        torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.state.state_dict()], file)
        second = Training(comm, "sparse", density=0.05, select=selection)
        file.seek(0)
        model, optimizer, state = torch.load(file, weights_only=True)
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        assert second.state is not None
        second.state.load_state_dict(state)
        # first has rebuilt its buckets and second has not: residuals must not depend on it
        assert first.run(5, 15) == second.run(5, 15)
        assert_equal(first.flat(), second.flat())
        assert second.state.step == first.state.step == 15


def bfloat16(comm: Communicator) -> None:
    dtype = torch.bfloat16
    dense, full = Training(comm, "dense", dtype), Training(comm, "sparse", dtype, density=1.0)
    assert dense.run() == full.run()
    assert_equal(dense.flat(), full.flat())
    sparse = Training(comm, "sparse", dtype, density=0.05)
    losses = sparse.run(0, 20)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert_replicas_agree(comm, sparse)


def frozen_parameter(comm: Communicator) -> None:
    def freeze(model: Net) -> None:
        model.middle.requires_grad_(False)

    plain = Training(comm, None, prepare=freeze)
    sparse = Training(comm, "sparse", density=1.0, prepare=freeze)
    assert plain.run() == sparse.run()
    assert_equal(plain.flat(), sparse.flat())
    assert "module.middle.weight" not in sparse.memory()


def static_graph(comm: Communicator) -> None:
    static = {"static_graph": True}
    plain, sparse = Training(comm, None, ddp=static), Training(comm, "sparse", density=1.0, ddp=static)
    assert plain.run() == sparse.run()
    assert_equal(plain.flat(), sparse.flat())


def channels_last(comm: Communicator) -> None:
    def train(hook: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(20, 40, 3).to(memory_format=torch.channels_last)
        ddp = DistributedDataParallel(model)
        if hook:
            state = DDPState(comm, ddp, compress=TopK(density=1.0))
            ddp.register_comm_hook(state, telegrad.ddp_hook)
        for step in range(3):
            generator = torch.Generator().manual_seed(step * 10 + comm.rank)
            x = torch.randn(2, 20, 5, 5, generator=generator).to(memory_format=torch.channels_last)
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-4 * parameter.grad
        return model.weight.detach()

    assert_equal(train(False), train(True))


def sparse_embedding_gradient(comm: Communicator) -> None:
    ddp = DistributedDataParallel(torch.nn.Embedding(100, 40, sparse=True))
    with contextlib.closing(Communicator.from_torch()) as own:
        state = DDPState(own, ddp)
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        comm.barrier()  # else one rank refuses, and aborts, before the other has joined
        with pytest.raises(TypeError, match=r"torch.nn.Embedding\(sparse=False\)"):
            ddp(torch.tensor([1, 2])).sum().backward()


def nonfinite_gradient(comm: Communicator) -> None:
    with contextlib.closing(Communicator.from_torch()) as own:
        training = Training(own, "sparse")
        training.step(0)
        before = training.memory()
        comm.barrier()
        if comm.rank == 1:
            training.model.outer.weight.register_hook(lambda gradient: gradient * float("nan"))
            with pytest.raises(NonFiniteGradient) as caught:
                training.step(1)
            assert (caught.value.rank, caught.value.parameter) == (1, "module.outer.weight")
            for name, entry in training.memory().items():
                assert_equal(entry["residual"], before[name]["residual"])
        else:
            with pytest.raises(RuntimeError, match="NonFiniteGradient: rank 1.*module.outer.weight"):
                training.step(1)
            assert training.state is not None
            assert isinstance(training.state.failure, TransportError)


def poison_gradient(layer: torch.nn.Linear, here: bool, poisoned: set[int]) -> None:
    rank = dist.get_rank()
    if here:
        layer.weight.register_hook(lambda gradient: gradient * float("inf") if rank in poisoned else gradient)


def skipped_steps(comm: Communicator) -> None:
    bf16, view, unused = torch.bfloat16, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
    cases: list[dict[str, Any]] = [
        {"density": 0.05},
        {"dtype": bf16, "select": "topk", "ddp": view},
        {"warmup_steps": 3, "ddp": unused},
        {"compress": None, "ddp": unused},
    ]
    for case in cases:
        skipping, reference = Training(comm, nonfinite="skip", **case), Training(comm, **case)
        assert skipping.state is not None
        assert reference.state is not None
        poisoned: set[int] = set()  # ranks
        poison_gradient(skipping.model.outer, comm.rank == 1, poisoned)  # in the first bucket
        poison_gradient(skipping.model.inner, comm.rank == 0, poisoned)  # in the last one
        for step in range(6):
            takes_branch = case.get("ddp") is not unused or step % 2 == 0
            for ranks in ({0}, {1}) if step in (0, 3) else ():
                poisoned |= ranks
                skipping.optimizer.zero_grad()
                skipping.backward(step, takes_branch)
                poisoned.clear()
                assert skipping.state.skipped
                assert not any(p.grad.any() for p in skipping.model.parameters() if p.grad is not None)
            assert skipping.step(step, takes_branch) == reference.step(step, takes_branch)
            assert not skipping.state.skipped
            assert_equal(skipping.flat(), reference.flat())
        assert (skipping.state.stats.skipped_steps, skipping.state.step) == (4, 6)
        for name, entry in skipping.memory().items():
            expected = reference.memory()[name]
            assert_equal(entry["residual"], expected["residual"])
            assert (entry["threshold"], entry["calls"]) == (expected["threshold"], expected["calls"])


def sub_groups(comm: Communicator) -> None:
    for ranks in ([0], [1], [1, 0]):
        group = dist.new_group(ranks)
        if comm.rank in ranks:
            with Communicator.from_torch(group) as own:
                assert (own.rank, own.world_size) == (dist.get_rank(group), len(ranks))
                gathered = own.all_gather(torch.tensor(comm.rank)).tolist()
                assert gathered == dist.get_process_group_ranks(group), gathered


def communicator_of_other_ranks(comm: Communicator) -> None:
    with Communicator.local(1)[0] as alone:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
        ddp.register_comm_hook(DDPState(alone, ddp), telegrad.ddp_hook)
        with pytest.raises((ValueError, RuntimeError), match="comm is rank 0 of 1, but this process is rank"):
            ddp(torch.ones(1, 3)).sum().backward()


SCENARIOS: list[Callable[[Communicator], None]] = [
    dense_equals_ddp,
    density_one_equals_dense,
    gradient_as_bucket_view,
    sparse_learns_and_replicas_agree,
    small_tensors_stay_dense,
    accumulation_with_no_sync,
    unused_parameters,
    warm_up,
    resume,
    bfloat16,
    frozen_parameter,
    static_graph,
    channels_last,
    sub_groups,
    communicator_of_other_ranks,
    skipped_steps,
    sparse_embedding_gradient,
    nonfinite_gradient,
]


def run_all(init_method: str, scenarios: list[Callable[[Communicator], None]]) -> None:
    """Prints one line for each scenario: its name and ``ok``, or the error. A failed one ends the program."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    for scenario in scenarios:
        with contextlib.closing(Communicator.from_torch()) as comm:
            try:
                scenario(comm)
            except Exception as error:
                print(f"{scenario.__name__} {type(error).__name__}: {error}".replace("\n", " | "), flush=True)
                traceback.print_exc()
                comm.abort(f"{scenario.__name__} failed")
                sys.exit(1)  # the ranks are out of step
            else:
                print(f"{scenario.__name__} ok", flush=True)
    dist.destroy_process_group()


def die(init_method: str) -> None:
    """Rank 1 dies in the middle of training; rank 0 must say so."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    training = Training(Communicator.from_torch(), "sparse", ddp={"broadcast_buffers": False})
    training.run(0, 3)
    if rank == 1:
        os._exit(9)
    try:
        training.run(3, 5)
    except RuntimeError as error:
        assert training.state is not None
        print(
            type(training.state.failure).__name__,
            "PeerFailed" in str(error),
            getattr(training.state.failure, "peer", None),
        )
        sys.stdout.flush()
        os._exit(0)  # Gloo cannot be torn down without its peer
