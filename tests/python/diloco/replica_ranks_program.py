"""What the ranks of test_replica_ranks.py do: two replicas of two ranks each, over Gloo inside of a replica."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import ddp_program
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from replicas import batch, network
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from telegrad import Communicator, DiLoCo, Streaming, TopK
from telegrad.compress import BucketTopK
from telegrad.ddp import RankState, load_resharded

STEPS, EVERY = 14, 4


def mesh() -> DeviceMesh:
    if not hasattr(mesh, "made"):
        mesh.made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "rank"))  # type: ignore[attr-defined]
    return mesh.made["rank"]  # type: ignore[attr-defined,no-any-return]


def step(model: Any, optimizer: Any, data: int, number: int) -> None:
    x, y = batch(data, number)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def whole(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    found = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([one.detach().reshape(-1) for one in found]).numpy().copy()


@contextlib.contextmanager
def alone() -> Iterator[Communicator]:
    """Of one rank in each replica, for replicas of one rank."""
    comm = Communicator.from_torch(mesh_of_positions())
    with contextlib.closing(comm):
        yield comm


def mesh_of_positions() -> Any:
    mesh()
    return mesh.made["replica"].get_group()  # type: ignore[attr-defined]


def reference(replica_of: Any, steps: int) -> np.ndarray[Any, Any]:
    """DiLoCo in numpy around two replicas, each of which trains on the mean gradient of its ranks' batches."""
    models = [network() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
    common = whole(models[0]).astype(np.float64)
    velocity = np.zeros_like(common)
    for number in range(steps):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for data in replica_of(replica):
                x, y = batch(data, number)
                (torch.nn.functional.mse_loss(model(x), y) / len(replica_of(replica))).backward()
            optimizer.step()
        if (number + 1) % EVERY == 0:
            move = np.mean([common - whole(model) for model in models], axis=0)
            velocity = 0.9 * velocity + move
            common -= 0.7 * (move + 0.9 * velocity)
            for model in models:
                torch.nn.utils.vector_to_parameters(torch.from_numpy(common.astype(np.float32)), model.parameters())
    return common


def same_on_all(world: Communicator, values: np.ndarray[Any, Any]) -> None:
    told = world.all_gather(values).reshape(world.world_size, -1)
    assert (told.view(np.int32) == told[0].view(np.int32)).all()


def ddp_inside(world: Communicator) -> None:
    """Each rank has a batch of its own; DDP averages gradients, and DiLoCo the replicas."""
    group = mesh().get_group()
    model = network(world.rank)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with contextlib.closing(DiLoCo(model, world, optimizer, every=EVERY, replica=group)) as diloco:
        for number in range(3 * EVERY):
            step(ddp, optimizer, world.rank, number)
        assert diloco.rounds == 3
        same_on_all(world, whole(model))
        expected = reference(lambda replica: (2 * replica, 2 * replica + 1), 3 * EVERY)
        np.testing.assert_allclose(whole(model), expected, rtol=1e-3, atol=1e-5)


def fully_shard_inside(world: Communicator) -> None:
    """Bit for bit as replicas of one rank, where both ranks of a replica have one batch."""
    replica = world.rank // 2
    for options in ({}, {"streaming": Streaming(3, delay=2, mix=0.5)}):
        found = []
        for shards in (False, True):
            model = network(world.rank)
            with contextlib.ExitStack() as stack:
                if shards:
                    model = network(replica)
                    fully_shard(model[0], mesh=mesh())  # type: ignore[index]
                    fully_shard(model, mesh=mesh())
                    comm, inside = world, mesh().get_group()
                else:
                    comm, inside = stack.enter_context(alone()), 1
                    model = network(replica)
                optimizer = torch.optim.AdamW(model.parameters(), 0.01)
                diloco = DiLoCo(model, comm, optimizer, every=EVERY, replica=inside, **options)
                stack.enter_context(contextlib.closing(diloco))
                for number in range(STEPS):
                    step(model, optimizer, replica, number)
                with torch.no_grad():
                    model(batch(9, 9)[0])  # after which the root's parameters are whole
                diloco.exchange()
                found.append(whole(model))
        same_on_all(world, found[1])
        assert found[0].tobytes() == found[1].tobytes()


def sparse_shards(world: Communicator) -> None:
    """Chunks are of a rank's shard. States go on bitwise."""
    replica = world.rank // 2
    compress = TopK(4 / 32, BucketTopK(32, 4), small_elements=0, combine="allgather")

    def made() -> tuple[Any, Any, DiLoCo]:
        model = network(replica)
        fully_shard(model, mesh=mesh())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        options: dict[str, Any] = {"compress": compress, "decay": 0.9, "replica": mesh().get_group()}
        return model, optimizer, DiLoCo(model, world, optimizer, every=EVERY, **options)

    model, optimizer, diloco = made()
    for number in range(6):
        step(model, optimizer, replica, number)
    state = diloco.state_dict()
    for number in range(6, STEPS):
        step(model, optimizer, replica, number)
    diloco.exchange()
    same_on_all(world, whole(model))
    assert not np.array_equal(whole(model), whole(network()))
    other, optimizer, resumed = made()
    resumed.load_state_dict(state)
    for number in range(6, STEPS):
        step(other, optimizer, replica, number)
    resumed.exchange()
    assert whole(model).tobytes() == whole(other).tobytes()
    diloco.close()
    resumed.close()


COMPRESSED = {"compress": TopK(0.1, small_elements=0, values="packed-qsgd2", combine="allgather"), "decay": 0.9}
STREAMED: dict[str, Any] = {"streaming": Streaming(3, delay=3, mix=0.5), **COMPRESSED}


class Replica:
    """A job of replicas, as a user of torch.distributed.checkpoint writes it."""

    def __init__(self, comm: Communicator, world: Communicator, *, shards: bool, **options: Any) -> None:
        self.data = world.rank // 2 if shards else comm.rank
        self.model = network(3)
        if shards:
            fully_shard(self.model, mesh=mesh())
            options["replica"] = mesh().get_group()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.diloco = DiLoCo(self.model, comm, self.optimizer, every=6, **options)

    def train(self, steps: range) -> None:
        for number in steps:
            step(self.model, self.optimizer, self.data, number)

    def state(self) -> dict[str, Any]:
        own = get_optimizer_state_dict(self.model, self.optimizer)
        return {"diloco": RankState(self.diloco), "optimizers": {f"replica {self.data}": own}}

    def load(self, folder: str) -> None:
        state = self.state()
        assert (self.diloco.rounds, self.diloco.state_dict()["inner_steps"]) == (0, 0)
        dcp.load(state, checkpoint_id=folder)
        own = state["optimizers"][f"replica {self.data}"]
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=own)

    def end(self) -> tuple[bytes, int, int]:
        self.diloco.exchange()
        self.diloco.close()
        return whole(self.model).tobytes(), self.diloco.rounds, self.diloco.checksum()


def distributed_checkpoint(world: Communicator) -> None:
    """Saved in the middle of a round, with averages in flight, it goes on bitwise in objects that have taken no step,
    whose outer optimizer has no state yet. ``async_save`` writes the state of the moment in which it was called."""
    for shards in (False, True):
        for options in ({}, COMPRESSED, STREAMED):
            folders: list[Any] = [tempfile.mkdtemp(), tempfile.mkdtemp()]
            dist.broadcast_object_list(folders)
            first = Replica(world, world, shards=shards, **options)
            first.train(range(11))
            dcp.save(first.state(), checkpoint_id=folders[0])
            saving: Any = dcp.async_save(first.state(), checkpoint_id=folders[1])
            first.train(range(11, 20))
            saving.result()
            expected = first.end()
            for folder in folders:
                resumed = Replica(world, world, shards=shards, **options)
                resumed.load(folder)
                resumed.train(range(11, 20))
                assert resumed.end() == expected, (shards, options)


def distributed_checkpoint_of_other_replicas(world: Communicator) -> None:
    """Of four replicas two go on: with the common parameters, the outer momentum, what was in flight, and the sum of
    all residuals."""
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    first = Replica(world, world, shards=False, **STREAMED)
    first.train(range(11))
    dcp.save(first.state(), checkpoint_id=folders[0])
    before = first.diloco.state_dict()
    with alone() as comm:
        fewer = Replica(comm, world, shards=False, **STREAMED)
        with pytest.raises(ValueError, match="state is of rank"):
            fewer.diloco.load_state_dict(before)
        load_resharded(fewer.diloco, folders[0], key="diloco")
        after = fewer.diloco.state_dict()
        for kind in ("common", "outer", "fragments"):
            assert str(after[kind]) == str(before[kind])
        assert (after["step"], after["inner_steps"]) == (before["step"], 5)
        for name, entry in before["compressor"]["parameters"].items():
            waits, kept = entry["residual"].double(), after["compressor"]["parameters"][name]["residual"].double()
            world.all_reduce(waits)
            comm.all_reduce(kept)
            torch.testing.assert_close(kept, waits, rtol=1e-5, atol=1e-7)
        fewer.train(range(11, 20))
        found = fewer.end()
    assert found[1] > before["step"]
    with alone() as comm:
        told = comm.all_gather(np.array([found[2]], np.int64))
        assert len({*told.reshape(-1).tolist()}) == 1
    first.diloco.close()


def groups_that_do_not_fit(world: Communicator) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sizes = dist.new_group([0, 1, 2]), dist.new_group([3])
    with pytest.raises(ValueError, match="ranks of a replica of rank 3 and rank 0 differ"):
        DiLoCo(model, world, optimizer, replica=sizes[world.rank == 3])
    with alone() as comm, pytest.raises(ValueError, match="give each rank the process group of its own replica"):
        DiLoCo(model, comm, optimizer, replica=mesh().get_group())
    sharded = fully_shard(network(), mesh=mesh())
    with pytest.raises(TypeError, match="is a DTensor: give replica= the ranks that its model is sharded over"):
        DiLoCo(sharded, world, torch.optim.SGD(sharded.parameters(), 0.1))


SCENARIOS = [
    ddp_inside,
    fully_shard_inside,
    sparse_shards,
    distributed_checkpoint,
    distributed_checkpoint_of_other_replicas,
]
SCENARIOS += [groups_that_do_not_fit]


def run(init_method: str) -> None:
    ddp_program.run_all(init_method, SCENARIOS)
