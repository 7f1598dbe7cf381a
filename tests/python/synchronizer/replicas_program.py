"""What the ranks of test_replicas.py do: a mesh of 2 replicas by 2 shards on the CPU."""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from typing import Any

import ddp_program
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_program import data
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from varied_options import objects_of

from telegrad import Communicator, TopK
from telegrad.communicator.texts import all_gather_text
from telegrad.ddp import RankState, load_resharded
from telegrad.errors import NonFiniteGradient, TransportError
from telegrad.synchronizer import ReplicaSynchronizer

STEPS = 5
CLIP = 0.1


class Net(nn.Module):
    """With a parameter of one element, whose second shard is empty, one that does not require a gradient, a buffer and
    a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 65), nn.Linear(65, 64)
        self.norm = nn.BatchNorm1d(64)
        self.branch, self.last = nn.Linear(64, 64), nn.Linear(64, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x + self.branch(x) if branch else x) * self.scale


def mesh_of() -> DeviceMesh:
    if not hasattr(mesh_of, "made"):
        mesh_of.made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))  # type: ignore[attr-defined]
    return mesh_of.made  # type: ignore[attr-defined]


class Training:
    """``how``: ``"ddp"``, over all ranks; ``"hsdp"``, torch's own; or options of a ReplicaSynchronizer of ``comm``."""

    def __init__(self, how: str | dict[str, Any], comm: Communicator | None = None, momentum: float = 0.0) -> None:
        torch.manual_seed(0 if isinstance(how, str) else mesh()["replica"].get_local_rank())  # replica 0's must win
        self.network = network = Net()
        self.model: nn.Module = network
        self.replicas: ReplicaSynchronizer | None = None
        if how == "ddp":
            self.model = DistributedDataParallel(network, find_unused_parameters=True)
        else:
            sharded(network, mesh() if how == "hsdp" else mesh()["shard"])
        if isinstance(how, dict):
            assert comm is not None
            self.replicas = ReplicaSynchronizer(network, comm, **objects_of(**how))
        self.trained = [one for one in network.parameters() if one.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.05, momentum=momentum)

    def step(self, step: int, *, parts: int = 1, clip: bool = False, branch: bool = True) -> float:
        total = 0.0
        for part in range(parts):
            x, y = data(parts * step + part, dist.get_rank())
            is_last = part == parts - 1
            if isinstance(self.network, FSDPModule):
                self.network.set_requires_gradient_sync(is_last)
            accumulates = isinstance(self.model, DistributedDataParallel) and not is_last
            with self.model.no_sync() if accumulates else contextlib.nullcontext():
                loss = nn.functional.mse_loss(self.model(x, branch), y)
                loss.backward()
            total += loss.item()
        if self.replicas is not None:
            self.replicas.average()
        if clip:
            norm = nn.utils.clip_grad_norm_(self.trained, CLIP)
            assert float(whole(norm)) > CLIP, "there must be something to clip"
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def run(self, first: int, last: int, **options: Any) -> list[float]:
        return [self.step(step, **options) for step in range(first, last)]

    def flat(self) -> torch.Tensor:
        return torch.cat([whole(one).detach().reshape(-1) for one in self.network.parameters()])

    def residuals(self) -> dict[str, torch.Tensor]:
        assert self.replicas is not None
        entries = self.replicas.state_dict()["compressor"]["parameters"]
        return {name: entry["residual"] for name, entry in entries.items()}


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def sharded(network: Net, on: DeviceMesh) -> Net:
    for layer in (network.first, network.second):
        fully_shard(layer, mesh=on)
    return fully_shard(network, mesh=on)  # type: ignore[return-value]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replica_comm() -> Communicator:
    return Communicator.from_torch(mesh()["replica"].get_group())


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def assert_same_on_all_ranks(world: Communicator, training: Training) -> None:
    for other in world.all_gather(training.flat()):
        assert torch.equal(other, training.flat())


def dense_is_ddp_and_hsdp(world: Communicator) -> None:
    with replica_comm() as comm:
        ddp, hsdp = Training("ddp", momentum=0.5), Training("hsdp", momentum=0.5)
        dense, everything = (Training(one, comm, momentum=0.5) for one in ({"compress": None}, {"density": 1.0}))
        for options in ({}, {"clip": True}, {"parts": 3}, {"branch": False}):
            for training in (ddp, hsdp, dense, everything):
                training.run(0, STEPS, **options)
                assert_close(training.flat(), ddp.flat())
        for training in (ddp, dense):  # a gradient of one replica's alone
            training.step(STEPS, branch=mesh()["replica"].get_local_rank() == 0)
        assert_close(dense.flat(), ddp.flat())
        assert dense.network.norm.weight.grad is None
        dense.network(*data(0, 0)[:1]).sum().backward()
        assert dense.replicas is not None
        dense.replicas.average()
        assert dense.network.norm.weight.grad is None, "a parameter that no replica uses keeps none"
        assert dense.network.branch.weight.grad is not None
        assert_same_on_all_ranks(world, dense)


def sparse_learns_and_resumes(world: Communicator) -> None:
    with replica_comm() as comm:
        ddp = Training("ddp")
        plain = ddp.run(0, 40)
        options = {"density": 0.05, "small_elements": 64, "select": "topk"}
        first = Training(options, comm)
        losses = first.run(0, 20)
        assert_same_on_all_ranks(world, first)
        held = first.residuals()
        assert {*held} == {f"{name}.weight" for name in ("first", "second", "branch", "last")}
        assert all(one.any() for one in held.values())
        assert held["second.weight"].numel() == 32 * 65, "a residual is of a shard"
        assert first.replicas is not None
        assert first.replicas.stats.selected == first.replicas.stats.wanted > 0

        folder = all_gather_text(world, tempfile.mkdtemp())[0]
        saved = {"model": get_model_state_dict(first.network), "telegrad": RankState(first.replicas)}
        dcp.save(saved, checkpoint_id=folder)
        second = Training(options, comm)
        assert second.replicas is not None
        read = {"model": get_model_state_dict(second.network), "telegrad": RankState(second.replicas)}
        dcp.load(read, checkpoint_id=folder)
        set_model_state_dict(second.network, read["model"])  # type: ignore[arg-type]
        for name, residual in second.residuals().items():
            assert torch.equal(residual, held[name])
        later = first.run(20, 40)
        assert later == second.run(20, 40)
        assert torch.equal(first.flat(), second.flat())
        losses += later
        assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
        assert abs(sum(losses[-8:]) - sum(plain[-8:])) < 0.2 * sum(plain[-8:]), (losses[-8:], plain[-8:])

        # One replica goes on alone: its residuals are the sum of both.
        sums = {name: residual.clone() for name, residual in held.items()}
        for residual in sums.values():
            comm.all_reduce(residual)
        with contextlib.closing(comm.split(comm.rank)) as alone:
            only = Training(options, alone)
            assert only.replicas is not None
            load_resharded(only.replicas, folder)
            for name, residual in only.residuals().items():
                torch.testing.assert_close(residual, sums[name], rtol=1e-6, atol=1e-7)
            shard = mesh()["shard"].get_local_rank()
            assert only.replicas.state_dict()["shard"] == [shard, 2]
            with pytest.raises(ValueError, match=rf"state is of shard \[{1 - shard}, 2\].*rank holds \[{shard}, 2\]"):
                only.replicas.load_state_dict({**only.replicas.state_dict(), "shard": [1 - shard, 2]})
            with pytest.raises(ValueError, match=rf"holds nothing of shard {shard} of 2 under 'other'"):
                load_resharded(only.replicas, folder, key="other")


def refusals(world: Communicator) -> None:
    def refused(error: type[Exception], match: str, network: Any, of: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            ReplicaSynchronizer(network, of, **objects_of(**options))

    with replica_comm() as comm:
        shards = mesh()["shard"]
        good = sharded(Net(), shards)
        refused(TypeError, "model is a int", 1, comm)
        refused(TypeError, "comm is a NoneType", good, None)
        refused(TypeError, "compress=3 must be a telegrad.TopK", good, comm, compress=3)
        refused(ValueError, "nonfinite='skip' does not exist", good, comm, nonfinite="skip")
        refused(ValueError, "parameter 'scale' is not sharded: call fully_shard", Net(), comm)
        refused(ValueError, "on a mesh of 2 dimensions.*mesh\\['shard'\\]", sharded(Net(), mesh()), comm)
        refused(ValueError, "is on another mesh than those before", mixed(), comm)
        refused(ValueError, "no parameter that requires a gradient", sharded(Net().requires_grad_(False), shards), comm)
        refused(TypeError, "dtype torch.float8_e5m2", sharded(Net().to(torch.float8_e5m2), shards), comm)
        # Other ranks than those of one shard.
        refused(ValueError, "comm's rank 1 holds shard 1 of 2, and its rank 0 shard 0 of 2", good, world)
        refused(ValueError, "density of rank 1 and rank 0 differ", good, comm, density=0.1 + 0.1 * comm.rank)
        policy, said = [("skip", "nonfinite='skip'"), ("raise", "on rank 0: nonfinite='skip'")][comm.rank]
        refused(ValueError, said, good, comm, nonfinite=policy)
    with replica_comm() as comm:
        training = Training({"density": 0.1}, comm)
        training.step(0)
        training.network(*data(0, 0)[:1]).sum().backward()
        if comm.rank == 1:
            whole_gradient = training.network.last.weight.grad
            assert isinstance(whole_gradient, DTensor)
            whole_gradient.to_local()[0, 0] = math.nan
        assert training.replicas is not None
        place, shards = training.replicas.shard
        said = (
            rf"rank 1 of the replicas of shard {place} of {shards}, step 1: .*'last.weight'.* choose nonfinite='send'"
        )
        with pytest.raises(NonFiniteGradient if comm.rank == 1 else TransportError, match=said):
            training.replicas.average()


def models_that_change_are_refused(world: Communicator) -> None:
    def unfreeze(model: Net) -> None:
        model.second.weight.requires_grad_(True)

    def replace(model: Net) -> None:
        model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)

    def add(model: Net) -> None:
        model.more = fully_shard(nn.Linear(4, 4), mesh=mesh()["shard"])

    def convert(model: Net) -> None:
        model.double()

    for change, said in (
        (unfreeze, "parameter 'second.weight' was unfrozen, added or replaced after its ReplicaSynchronizer was made"),
        (replace, "parameter '.*' was unfrozen, added or replaced .*: make another one"),
        (add, "parameter 'more.weight' was unfrozen, added or replaced"),
        (convert, "was torch.float32 of shape .* and is torch.float64"),
    ):
        network = Net()
        network.frozen.requires_grad_(True)  # fully_shard takes all or nothing of a module
        network.second.requires_grad_(False)
        model = sharded(network, mesh()["shard"])
        with replica_comm() as comm:
            model(torch.ones(3, 24))  # what it has gathered is no obstacle
            synchronizer = ReplicaSynchronizer(model, comm, compress=None)
            model(torch.ones(3, 24)).sum().backward()
            synchronizer.average()
            change(model)
            with pytest.raises(RuntimeError, match=said):
                synchronizer.average()


def steps_inside_the_backward_pass_are_refused(world: Communicator) -> None:
    """They would use averages over the shards alone."""
    model = sharded(Net(), mesh()["shard"])
    one = model.second.weight
    optimizer = torch.optim.SGD([one], lr=0.1)
    with replica_comm() as comm:
        synchronizer = ReplicaSynchronizer(model, comm, compress=None)
        before = [whole(own.detach()).clone() for own in model.parameters()]
        world.barrier()
        with pytest.raises(
            RuntimeError, match="SGD steps inside .* ReplicaSynchronizer has averaged .* 'second.weight'"
        ):
            step_inside(model, one, optimizer)
        with pytest.raises(TransportError, match="SGD steps inside"):
            synchronizer.average()
    for was, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(was, whole(now.detach()))
    one._in_backward_optimizers = [optimizer]  # what _apply_optimizer_in_backward leaves
    with replica_comm() as comm, pytest.raises(ValueError, match="'second.weight' has an optimizer that steps inside"):
        ReplicaSynchronizer(model, comm, compress=None)


def other_dtypes_are_averaged(world: Communicator) -> None:
    for dtype in (torch.float64, torch.float16, torch.complex64):
        with replica_comm() as comm:
            torch.manual_seed(comm.rank)
            model = nn.Linear(6, 4, bias=False).to(dtype)
            fully_shard(model, mesh=mesh()["shard"])
            replicas = ReplicaSynchronizer(model, comm, compress=TopK(density=0.1, small_elements=1))
            model.weight.grad = torch.full_like(model.weight, 1.0 + comm.rank)
            replicas.average()
            assert isinstance(model.weight.grad, DTensor)
            assert torch.equal(model.weight.grad.to_local(), torch.full_like(model.weight.to_local(), 1.5))
            weights = model.weight.to_local().detach()
            for other in comm.all_gather(torch.view_as_real(weights) if weights.is_complex() else weights):
                assert torch.equal(torch.view_as_complex(other) if weights.is_complex() else other, weights)


def step_inside(model: Net, one: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.ones(3, 24)).sum().backward()


def mixed() -> Net:
    """One layer on another mesh than the rest."""
    network = Net()
    fully_shard(network.first, mesh=mesh()["replica"])
    fully_shard(network.second, mesh=mesh()["shard"])
    return fully_shard(network, mesh=mesh()["shard"])  # type: ignore[return-value]


def averages_thrown_away(world: Communicator) -> None:
    """Averages that no optimizer uses leave nothing in residuals."""
    options = {"density": 0.1, "small_elements": 16, "select": "topk"}
    with contextlib.closing(replica_comm()) as first, contextlib.closing(replica_comm()) as second:
        discarding, reference = Training(dict(options), first), Training(dict(options), second)
        assert discarding.replicas is not None
        for step in range(4):
            for again in range(step % 3):  # none, one, or two
                x, y = data(100 * again + step, dist.get_rank())
                nn.functional.mse_loss(discarding.model(x, True), y).backward()
                discarding.replicas.average()
                discarding.optimizer.zero_grad()
            assert discarding.step(step) == reference.step(step)
            assert torch.equal(discarding.flat(), reference.flat())
        mine, expected = discarding.residuals(), reference.residuals()
        assert all(torch.equal(mine[name], expected[name]) for name in expected)
        assert any(one.any() for one in expected.values())
        assert discarding.replicas.stats.discarded_passes == 3


SCENARIOS = [
    dense_is_ddp_and_hsdp,
    sparse_learns_and_resumes,
    refusals,
    models_that_change_are_refused,
    steps_inside_the_backward_pass_are_refused,
    other_dtypes_are_averaged,
    averages_thrown_away,
]


def run(init_method: str) -> None:
    ddp_program.run_all(init_method, SCENARIOS)
