"""Training on a device whose dense sums go by NCCL, for which nccl_stand_in.py stands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, computed_on, model_on, wait_for
from device_ranks import RANKS
from device_trainer import DeviceTrainer, Gradients, step_on_device, step_on_host
from fake_device import FakeStream
from handmade_buckets import LARGE, REBUILT, SHAPES
from nccl_stand_in import StandIn, give_group
from synchronised_net import data, model_of, reference, sgd
from triton_arrays import DEVICE

from telegrad import Communicator, NonFiniteGradient, Synchronizer
from telegrad.errors import TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]


@pytest.fixture
def nccl(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> StandIn:
    return give_group(device, comms, streams, met=True)


@pytest.fixture
def trainers(make: Callable[..., list[DeviceTrainer]], nccl: StandIn) -> Callable[..., list[DeviceTrainer]]:
    return make


def drawn(rank: int, step: int) -> Gradients:
    """Whole numbers, whose sums are the same in any order."""
    rng = np.random.default_rng([rank, step])
    return {name: rng.integers(-9, 9, int(np.prod(shape))).astype(np.float32) for name, shape in SHAPES.items()}


def dense_bytes(buckets: Any, *, small: int) -> list[int]:
    """Of the dense sum of each bucket: all of it, or the parameters that are not compressed."""
    sizes = [sum(n for n in (int(np.prod(SHAPES[name])) for name in names) if n <= small) for names in buckets]
    return [4 * size for size in sizes if size]


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "send"])
def test_the_hooks_buckets(trainers: Any, nccl: StandIn, nonfinite: str) -> None:
    ranks = trainers(compress=None, nonfinite=nonfinite)
    for step in range(3):
        given = [drawn(rank, step) for rank in range(RANKS)]
        for own in step_on_device(ranks, given, REBUILT):
            for name in SHAPES:
                np.testing.assert_array_equal(own[name], sum(one[name] for one in given) * np.float32(1 / RANKS))
    assert nccl.sums == [dense_bytes(REBUILT, small=1 << 30) * 3] * RANKS
    for rank in ranks:
        with rank.device.on(rank.stream):
            rank.state.synchronize()
            assert rank.state.step == 3


def test_of_compressed_buckets_what_stays_dense_goes_by_nccl(trainers: Any, on_host: Any, nccl: StandIn) -> None:
    """And is put into its place behind the sparse sum, which comes on another way."""
    options = {"density": 0.05, "small_elements": 16, "select": "topk"}
    ranks, hosts = trainers(**options), on_host(**options)
    for step in range(3):
        given = [drawn(rank, step) for rank in range(RANKS)]
        found, expected = step_on_device(ranks, given, REBUILT), step_on_host(hosts, given, REBUILT)
        for own, of_host in zip(found, expected, strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(own[name], of_host[name])
    assert dense_bytes(REBUILT, small=16)
    assert nccl.sums == [dense_bytes(REBUILT, small=16) * 3] * RANKS


def test_the_hook_raises_on_all_ranks(trainers: Any, nccl: StandIn) -> None:
    """The engine tells the others, who have sums of NCCL's alone."""
    ranks = trainers(compress=None)
    given = [drawn(rank, 0) for rank in range(RANKS)]
    given[1][LARGE[0]][0] = np.nan
    step_on_device(ranks, given, REBUILT)
    with pytest.raises(NonFiniteGradient, match="rank 1, step 0"):
        ranks[1].start(given[1], REBUILT)

    def next_pass() -> None:
        ranks[0].start(given[0], REBUILT)
        ranks[0].state.synchronize()

    with pytest.raises(TransportError, match="NonFiniteGradient: rank 1, step 0"):
        next_pass()


def test_the_hook_waits_for_nothing(trainers: Any, nccl: StandIn) -> None:
    ranks = trainers(compress=None)
    held = threading.Event()
    for rank in ranks:
        rank.stream.put(held.wait)
    started = [rank.start(drawn(0, 0), REBUILT) for rank in ranks]  # by one thread: would hang
    found = [rank.wait(one) for rank, one in zip(ranks, started, strict=True)]
    held.set()
    wait_for([rank.stream for rank in ranks])
    for of_rank in found:
        for names, buffer in of_rank:
            expected = np.concatenate([drawn(0, 0)[name] for name in names])
            np.testing.assert_array_equal(buffer.memory.numpy(), expected)


@pytest.mark.parametrize("plan", ["auto", "single", "wfbp"])
@pytest.mark.parametrize("shares", [False, True])
def test_the_synchronizer(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], plan: str, shares: bool
) -> None:
    """In a communicator of its own, whose ranks meet in their first sum. The number of a pass is exact there, too."""
    places = ["one", "two", "one"] if shares else None
    shared = give_group(device, comms, streams, places=places)

    def train(number: int) -> Any:
        with device.on(streams[number]):
            model = model_on(device, model_of(0 if number == 0 else 7))
            sync = Synchronizer(model, comms[number], plan=plan)
            assert sync.comm._nccl is not None
            assert len(sync.comm._nccl._verdicts) == 1  # no pass waits for it
            optimizer = sgd(model)
            for step in range(6):
                optimizer.zero_grad()
                model(computed_on(device, data(step, number))).square().mean().backward()
                optimizer.step()
            sync.comm.synchronize()
            streams[number].synchronize()
            sync.close()
            return model

    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(train, number) for number in range(RANKS)]
        models = [future.result(timeout=60) for future in futures]
    for model in models:
        for one, other in zip(model.parameters(), reference(RANKS, 6).parameters(), strict=True):
            torch.testing.assert_close(one.memory, other.detach(), rtol=1e-4, atol=1e-6)
    assert (len(shared.sums[0]) > 0) != shares
    assert shared.sums == [shared.sums[0]] * RANKS
