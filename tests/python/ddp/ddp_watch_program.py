"""What the ranks of test_ddp.py do where DDP does not average all that is trained, or somebody steps before it has.

Each function is one scenario, as in ddp_program.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
from ddp_program import assert_equal
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad import Communicator, DDPState, TopK
from telegrad.errors import TransportError

Hook = Callable[[Tensor], None]


def model_of(**frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if frozen.get("frozen"):
        model[0].weight.requires_grad_(False)
    return model


@contextlib.contextmanager
def hooked(model: nn.Module, comm: Communicator, **options: Any) -> Iterator[tuple[DistributedDataParallel, DDPState]]:
    """With a Communicator of its own, which an error ends."""
    with contextlib.closing(Communicator.from_torch()) as own:
        ddp = DistributedDataParallel(model, **options)
        state = DDPState(own, ddp, compress=TopK(density=0.1, small_elements=10))
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        comm.barrier()  # else one rank refuses, and aborts, before the other has joined
        yield ddp, state


def backward(ddp: nn.Module, step: int, rank: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    ddp(x).square().mean().backward()


def assert_alike(comm: Communicator, model: nn.Module) -> None:
    flat = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    for other in comm.all_gather(flat):
        assert_equal(other, flat)


def assert_gradients_alike(comm: Communicator, model: nn.Module) -> None:
    flat = torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None])
    for other in comm.all_gather(flat):
        assert_equal(other, flat)


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


STEPS = "SGD steps inside the backward pass, before the DDP hook has averaged the gradient of 'module.1.bias'"
CHANGED = "parameter 'module.*' was changed in place inside the backward pass.* before the DDP hook has averaged it"


def an_optimizer_in_the_backward_pass(comm: Communicator) -> None:
    model = model_of()
    ddp = DistributedDataParallel(model)
    if comm.rank == 1:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(
        ValueError, match=r"'module.0.weight' has an optimizer that steps inside .*: make the optimizer"
    ):
        DDPState(comm, ddp)


def and_later(comm: Communicator) -> None:
    model = model_of()
    with hooked(model, comm) as (ddp, state):
        backward(ddp, 0, comm.rank)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with pytest.raises(RuntimeError, match=STEPS):
            backward(ddp, 1, comm.rank)
        assert state.failure is not None
    assert_alike(comm, model)


def a_hook_that_steps(comm: Communicator) -> None:
    for of_all in (True, False):
        model = model_of()
        with hooked(model, comm) as (ddp, state):
            backward(ddp, 0, comm.rank)
            if of_all or comm.rank == 1:
                for one in model.parameters():
                    one.register_post_accumulate_grad_hook(step_of(one))
            with pytest.raises(RuntimeError, match=STEPS):
                backward(ddp, 1, comm.rank)
            assert of_all or isinstance(state.failure, TransportError) == (comm.rank == 0)
        assert_alike(comm, model)


def a_hook_that_updates_by_itself(comm: Communicator) -> None:
    """Of hooks that were there before the state the first pass knows, of later ones the second."""
    for of_all in (True, False):
        for first in (True, False):
            model = model_of()
            one = model[1].weight
            if first and (of_all or comm.rank == 1):
                one.register_post_accumulate_grad_hook(update_of(one))
            with hooked(model, comm) as (ddp, _):
                if not first:
                    if of_all or comm.rank == 1:
                        one.register_post_accumulate_grad_hook(update_of(one))
                    backward(ddp, 0, comm.rank)
                with pytest.raises(RuntimeError, match=CHANGED):
                    backward(ddp, 1, comm.rank)


def steps_on_averages(comm: Communicator) -> None:
    """A callback on a bucket's future has the average: its optimizers may step inside the backward pass."""
    whole, apart = model_of(), model_of()
    optimizers = {id(one): torch.optim.SGD([one], lr=0.1) for one in apart.parameters()}

    def step_then(state: DDPState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        def step(future: torch.futures.Future[Tensor]) -> Tensor:
            for one, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                one.grad = gradient
                optimizers[id(one)].step()
            return future.value()

        outcome = telegrad.ddp_hook(state, bucket)
        outcome.wait()  # so that the callback runs here, inside the backward pass
        return outcome.then(step)

    step_then.__annotations__.clear()  # DDP compares them, and here they are postponed
    usual = torch.optim.SGD(whole.parameters(), lr=0.1)
    with hooked(whole, comm) as (ddp, _), contextlib.closing(Communicator.from_torch()) as own:
        other = DistributedDataParallel(apart, bucket_cap_mb=0.0001)
        state = DDPState(own, other, compress=TopK(density=0.1, small_elements=10))
        other.register_comm_hook(state, step_then)
        for step in range(3):
            for each in (ddp, other):
                each.zero_grad()
                backward(each, step, comm.rank)
            usual.step()
    assert_alike(comm, whole)
    for one, same in zip(whole.parameters(), apart.parameters(), strict=True):
        assert_equal(same, one)


def changes_between_steps(comm: Communicator) -> None:
    """Hooks that only look, and weights that are clamped after each step, as before."""
    model = model_of()
    with hooked(model, comm, gradient_as_bucket_view=True) as (ddp, state):
        seen: list[int] = []
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda one: seen.append(one._version))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            for part in range(2):
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)
                with ddp.no_sync() if not part else contextlib.nullcontext():
                    backward(ddp, 2 * step + part, comm.rank)
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == 4 * 4 * 2
        assert state.step == 4
    assert_alike(comm, model)


def a_parameter_that_is_unfrozen(comm: Communicator) -> None:
    for of_all in (True, False):
        model = model_of(frozen=True)
        with hooked(model, comm) as (ddp, state):
            backward(ddp, 0, comm.rank)
            if of_all or comm.rank == 1:
                model[0].weight.requires_grad_(True)
            with pytest.raises(RuntimeError, match=r"'module.0.weight' was unfrozen after its DDPState .* wrap the"):
                backward(ddp, 1, comm.rank)
            assert of_all or isinstance(state.failure, TransportError) == (comm.rank == 0)
        assert_alike(comm, model)


def a_parameter_that_ddp_does_not_know(comm: Communicator) -> None:
    model = model_of(frozen=True)
    ddp = DistributedDataParallel(model)
    model[0].weight.requires_grad_(True)
    with contextlib.closing(Communicator.from_torch()) as own:
        ddp.register_comm_hook(DDPState(own, ddp), telegrad.ddp_hook)
        comm.barrier()
        with pytest.raises(RuntimeError, match=r"'module.0.weight' is in no bucket of .* set requires_grad before"):
            backward(ddp, 0, comm.rank)


def a_parameter_that_ddp_is_to_ignore(comm: Communicator) -> None:
    model = model_of()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    with hooked(model, comm) as (ddp, state):
        for step in range(3):
            backward(ddp, step, comm.rank)
        assert state.step == 3


def a_parameter_that_is_frozen(comm: Communicator) -> None:
    """DDP takes it for unused, if it looks for such."""
    model = model_of()
    with hooked(model, comm, find_unused_parameters=True) as (ddp, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model[0].weight.requires_grad_(step != 2)
            optimizer.zero_grad()
            backward(ddp, step, comm.rank)
            optimizer.step()
    assert_alike(comm, model)


def the_python_reducer(comm: Communicator) -> None:
    """Refused where it calls the hook. Torch 2.6 has DDP's own reducer outside of compiled functions, as by default."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < (2, 7):
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"), hooked(model_of(), comm) as (ddp, state):
            backward(ddp, 0, comm.rank)
            assert state.stats.buckets > 0
            assert_gradients_alike(comm, ddp)
    said = "optimize_ddp='python_reducer' gives hooks .*: leave it at its default"
    patched = torch._dynamo.config.patch(optimize_ddp="python_reducer")
    with patched, hooked(model_of(), comm) as (ddp, _), pytest.raises(TypeError, match=said):
        backward(ddp if release >= (2, 7) else torch.compile(ddp, backend="aot_eager"), 0, comm.rank)


def uneven_inputs(comm: Communicator) -> None:
    """``join()``: averages are over all ranks. DDP alone does the same, for bitwise the same weights."""
    found = []
    for mode in (None, "dense", "sparse"):
        model = model_of()
        ddp = DistributedDataParallel(model)
        with contextlib.closing(Communicator.from_torch()) as own:
            if mode is not None:
                state = DDPState(own, ddp, compress=None if mode == "dense" else TopK())
                ddp.register_comm_hook(state, telegrad.ddp_hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with ddp.join():
                for step in range(2 + 2 * comm.rank):
                    optimizer.zero_grad()
                    backward(ddp, step, comm.rank)
                    optimizer.step()
        assert_alike(comm, model)
        found.append(torch.cat([one.detach().reshape(-1) for one in model.parameters()]))
    assert_equal(found[1], found[0])


def train_unevenly(ddp: DistributedDataParallel, rank: int) -> None:
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            backward(ddp, step, rank)


def uneven_inputs_of_those_that_are_left(comm: Communicator) -> None:
    said = "divide_by_initial_world_size=False has no effect with telegrad's hook.*: leave it out"
    with hooked(model_of(), comm) as (ddp, _), pytest.raises((ValueError, RuntimeError), match=said):
        train_unevenly(ddp, comm.rank)


def states_of_different_steps(comm: Communicator) -> None:
    """Each rank loads its own state, but one an older one."""
    with hooked(model_of(), comm) as (ddp, state):
        saved = []
        for step in range(2):
            backward(ddp, step, comm.rank)
            saved.append(state.state_dict())
    with hooked(model_of(), comm) as (ddp, state):
        state.load_state_dict(saved[1])
        backward(ddp, 2, comm.rank)  # alike
        state.load_state_dict(saved[comm.rank])
        with pytest.raises(
            Exception, match="step of the loaded state of rank 1 and rank 0 differ.*rank 1: 2, rank 0: 1"
        ):
            backward(ddp, 3, comm.rank)
        assert isinstance(state.failure, ValueError)


class Told(io.StringIO):
    """Lets the other rank know that something was written."""

    def __init__(self, store: torch.distributed.Store) -> None:
        super().__init__()
        self.store = store

    def write(self, text: str) -> int:
        self.store.set("telegrad test: told", text)
        return super().write(text)


def a_rank_that_comes_late_to_the_broadcast_of_buffers(comm: Communicator) -> None:
    """The one that waits there says so: it would wait for ever for a rank with fewer batches."""
    store = torch.distributed.distributed_c10d._get_default_store()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_STALL_S", "2")
        with hooked(model, comm) as (ddp, _):
            backward(ddp, 0, comm.rank)
            backward(ddp, 0, comm.rank)  # before which DDP makes its buckets anew, once
            if comm.rank == 1:  # rank 0 only sends
                with contextlib.redirect_stderr(Told(store)) as said:
                    backward(ddp, 1, comm.rank)
                assert "rank 1: has waited 2 s for DistributedDataParallel's broadcast" in said.getvalue()
            else:
                store.wait(["telegrad test: told"], timedelta(seconds=60))
                backward(ddp, 1, comm.rank)
            assert_alike(comm, model)


SCENARIOS: list[Callable[[Communicator], None]] = [
    an_optimizer_in_the_backward_pass,
    and_later,
    a_hook_that_steps,
    a_hook_that_updates_by_itself,
    steps_on_averages,
    changes_between_steps,
    a_parameter_that_is_unfrozen,
    a_parameter_that_ddp_does_not_know,
    a_parameter_that_ddp_is_to_ignore,
    a_parameter_that_is_frozen,
    a_rank_that_comes_late_to_the_broadcast_of_buffers,
    uneven_inputs,
    uneven_inputs_of_those_that_are_left,
    states_of_different_steps,
    the_python_reducer,  # last, as it leaves other options of torch changed
]
