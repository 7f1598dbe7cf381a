"""Replicas of a sharded model whose shards are on a device whose streams compute: the host's bits, errors that come
late, and residuals that follow what the program throws away."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from computing_device import ComputingRuntime, computed_on
from device_ranks import RANKS
from fake_device import FakeStream
from given_gradients import SHAPES, gradients_of
from handmade_buckets import named
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from triton_arrays import DEVICE
from varied_options import objects_of

from telegrad import Communicator, ReplicaSynchronizer
from telegrad.errors import NonFiniteGradient, TransportError

spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of one shard, which all replicas of this process hold."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


class Replica:
    """``device``: ``None`` on the host."""

    def __init__(self, comm: Communicator, mesh: DeviceMesh, device: ComputingRuntime | None, **options: Any) -> None:
        self.comm, self._mesh, self._device = comm, mesh, device
        dtype = options.pop("dtype", torch.float32)
        self.model = nn.Module()
        for name, shape in SHAPES.items():
            values = torch.full(shape, float(comm.rank), dtype=dtype)
            self.model.register_parameter(name, nn.Parameter(self._sharded(values)))
        own = {} if "compress" in options else {"density": 0.05, "small_elements": 16}
        self.sync = ReplicaSynchronizer(self.model, comm, **objects_of(**{**own, **options}))

    def _sharded(self, x: Tensor) -> Tensor:
        local = x if self._device is None else computed_on(self._device, x)
        meta = spec.TensorMeta(x.shape, x.stride(), x.dtype)
        placed = spec.DTensorSpec(self._mesh, (Shard(0),), tensor_meta=meta)
        return DTensor(local, placed, requires_grad=False)  # type: ignore[call-arg, no-any-return]

    def here(self, x: Tensor) -> Tensor:
        """A copy of a shard on the host."""
        local = x.to_local()  # type: ignore[attr-defined]
        if self._device is None:
            return local.clone()  # type: ignore[no-any-return]
        self._device.current_stream(local.device).synchronize()
        return local.memory.clone()  # type: ignore[no-any-return]

    def step(self, gradients: dict[str, Tensor], *, steps: bool = True) -> dict[str, Tensor]:
        """The averages. ``steps``: a step of an optimizer has used them; else they are thrown away."""
        for name, one in self.model.named_parameters():
            one.grad = self._sharded(gradients[name].to(one.dtype)) if name in gradients else None
        self.sync.average()
        named_parameters = dict(self.model.named_parameters())
        found = {name: self.here(one.grad) for name, one in named_parameters.items() if one.grad is not None}
        if steps:
            torch.optim.SGD(self.model.parameters(), lr=1.0).step()
        return found


OnAll = Callable[..., list[Any]]


@pytest.fixture
def on_device(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], mesh: DeviceMesh
) -> OnAll:
    """Calls a function of each Replica there; returns by rank."""

    def run(function: Callable[[Replica], Any], **options: Any) -> list[Any]:
        def call(number: int) -> Any:
            with device.on(streams[number]):
                return _aborting(comms[number], lambda: function(Replica(comms[number], mesh, device, **options)))

        with ThreadPoolExecutor(RANKS) as pool:
            return [one.result(90) for one in [pool.submit(call, number) for number in range(RANKS)]]

    return run


@pytest.fixture
def on_host(mesh: DeviceMesh) -> Iterator[OnAll]:
    made: list[Communicator] = []

    def run(function: Callable[[Replica], Any], **options: Any) -> list[Any]:
        comms = Communicator.local(RANKS, timeout_s=60.0)
        made.extend(comms)

        def call(comm: Communicator) -> Any:
            return _aborting(comm, lambda: function(Replica(comm, mesh, None, **options)))

        with ThreadPoolExecutor(RANKS) as pool:
            return [one.result(90) for one in [pool.submit(call, comm) for comm in comms]]

    yield run
    for comm in made:
        comm.close()


def _aborting(comm: Communicator, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        comm.abort(f"the test failed: {error!r}")
        raise


def residuals_of(replica: Replica) -> dict[str, Tensor]:
    entries = replica.sync.state_dict()["compressor"]["parameters"]
    return {name: entry["residual"] for name, entry in entries.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"compress": None},
        {"select": "topk"},
        {"select": "reused", "interval": 2},
        {"select": "topk", "warmup_steps": 2},
        {"select": "topk", "dtype": torch.bfloat16, "nonfinite": "send"},
    ],
    ids=named,
)
def test_the_hosts_bits(on_device: OnAll, on_host: OnAll, options: dict[str, Any]) -> None:
    def run(replica: Replica) -> Any:
        began = {name: replica.here(one.detach()) for name, one in replica.model.named_parameters()}
        assert not any(one.any() for one in began.values()), "they are replica 0's"
        averages = [replica.step(gradients_of(replica.comm.rank, step)) for step in range(4)]
        thrown_away = replica.step(gradients_of(replica.comm.rank, 4), steps=False)
        for one in replica.model.parameters():
            one.grad = None
        averages += [thrown_away, replica.step(gradients_of(replica.comm.rank, 5))]
        weights = {name: replica.here(one.detach()) for name, one in replica.model.named_parameters()}
        return [*averages, weights, residuals_of(replica)]

    for found, expected in zip(on_device(run, **options), on_host(run, **options), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_parameter_that_only_one_replica_uses(on_device: OnAll) -> None:
    def run(replica: Replica) -> dict[str, Tensor]:
        return replica.step(gradients_of(replica.comm.rank, 0, ("norm", "bias") if replica.comm.rank else ("norm",)))

    for averages in on_device(run, compress=None):
        assert {*averages} == {"norm", "bias"}
        total = sum(gradients_of(rank, 0)["bias"] for rank in range(1, RANKS))
        torch.testing.assert_close(averages["bias"] * RANKS, total)


def test_the_host_goes_on_from_a_state_of_the_device(on_device: OnAll, on_host: OnAll) -> None:
    def first(replica: Replica) -> Any:
        for step in range(3):
            replica.step(gradients_of(replica.comm.rank, step))
        return replica.sync.state_dict()

    states = on_device(first, select="topk")

    def second(replica: Replica) -> Any:
        replica.sync.load_state_dict(states[replica.comm.rank])
        return replica.step(gradients_of(replica.comm.rank, 3))

    def whole(replica: Replica) -> Any:
        return [replica.step(gradients_of(replica.comm.rank, step)) for step in range(4)][-1]

    for one, other in zip(on_host(second, select="topk"), on_host(whole, select="topk"), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_nan_is_raised_late(on_device: OnAll) -> None:
    all_trained, has_raised = threading.Barrier(RANKS), threading.Event()

    def run(replica: Replica) -> None:
        gradients = gradients_of(replica.comm.rank, 0)
        if replica.comm.rank == 1:
            gradients["hidden"][3, 5] = math.nan
        assert replica.step(gradients)["hidden"].isnan().sum() == 1
        all_trained.wait(60)  # an abort ends also what another rank has not finished
        if replica.comm.rank != 1:
            has_raised.wait(60)
        wanted = NonFiniteGradient if replica.comm.rank == 1 else TransportError
        with pytest.raises(wanted, match="rank 1 of the replicas of shard 0 of 1, step 0: the gradient of 'hidden'"):
            replica.sync.state_dict() if replica.comm.rank == 1 else replica.comm.barrier()
        has_raised.set()

    on_device(run, select="topk")
