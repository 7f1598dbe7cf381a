"""The DDP hook with buckets on a device whose streams compute (computing_device.py): a rank's host never waits
for the device, nor for another rank, so one thread drives all ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, StreamTensor, computed_on, wait_for
from fake_device import FakeStream
from handmade_buckets import Bucket
from varied_options import module_of, objects_of

import telegrad
from telegrad import Communicator, DDPState, NonFiniteGradient, TopK
from telegrad.errors import TransportError

SHAPES = {"weight": (3, 4), "bias": (4,), "empty": (0,)}
BUCKETS = [["bias", "empty"], ["weight"]]


class Ranks:
    """All ranks, each with parameters, a state and a stream."""

    def __init__(
        self, device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], **options: Any
    ) -> None:
        self.device, self.comms, self.streams = device, comms, streams
        dtype = options.pop("dtype", torch.float32)
        self.parameters = [
            {
                name: torch.nn.Parameter(computed_on(device, torch.zeros(shape, dtype=dtype)))
                for name, shape in SHAPES.items()
            }
            for _ in comms
        ]
        self.states = [
            DDPState(comm, module_of(parameters), **objects_of(**{"compress": None, **options}))
            for comm, parameters in zip(comms, self.parameters, strict=True)
        ]

    def start(self, rank: int, value: float) -> list[tuple[StreamTensor, Any]]:
        """A backward pass of one rank: gradients are ``rank + 1``, but ``value`` first in that of ``weight``."""
        found = []
        with self.device.on(self.streams[rank]):
            for index, names in enumerate(BUCKETS):
                parameters = [self.parameters[rank][name] for name in names]
                gradient = torch.cat([x.detach().reshape(-1) for x in parameters]).fill_(rank + 1.0)
                assert isinstance(gradient, StreamTensor)
                if "weight" in names:
                    gradient[:1].fill_(value)
                bucket = Bucket(parameters, gradient, index, index == len(BUCKETS) - 1)
                found.append((gradient, telegrad.ddp_hook(self.states[rank], bucket)))  # type: ignore[arg-type]
        return found

    def run(self, value: Callable[[int], float]) -> list[list[list[float]]]:
        """What each rank's stream finds behind its futures."""
        passes = [self.start(rank, value(rank)) for rank in range(len(self.comms))]
        seen: list[list[StreamTensor]] = []
        for rank, buckets in enumerate(passes):
            with self.device.on(self.streams[rank]):
                seen.append([future.wait() * 1.0 for _, future in buckets])
        wait_for(self.streams)
        return [[x.memory.tolist() for x in of_rank] for of_rank in seen]

    def on(self, rank: int, call: Callable[[], Any]) -> Any:
        with self.device.on(self.streams[rank]):
            return call()


Make = Callable[..., Ranks]


@pytest.fixture
def make(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Make:
    return lambda **options: Ranks(device, comms, streams, **options)


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "send"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_are_averaged(make: Make, nonfinite: str, dtype: torch.dtype) -> None:
    ranks = make(nonfinite=nonfinite, dtype=dtype)
    for step in range(3):
        found = ranks.run(lambda rank: 4.0 * rank)
        assert found == [[[2.0] * 4, [4.0] + [2.0] * 11]] * 3
        for rank, state in enumerate(ranks.states):
            assert ranks.on(rank, lambda state=state: state.step) == step + 1
            assert not state.skipped
            state.synchronize()
            assert state.failure is None
    assert ranks.states[0].stats.buckets == 6
    assert ranks.states[0].stats.dense_elements == ranks.states[0].stats.elements == 48


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "send"])
def test_the_host_does_not_wait(make: Make, nonfinite: str) -> None:
    ranks = make(nonfinite=nonfinite)
    held = threading.Event()
    for stream in ranks.streams:
        stream.put(held.wait)
    futures = [future for rank in range(2) for _, future in ranks.start(rank, 1.0)]
    assert all(future.done() for future in futures)  # before any gradient is there, and before the last rank calls
    more = [future for rank in range(2) for _, future in ranks.start(rank, 1.0)]  # the next pass
    ranks.on(0, futures[0].wait)
    behind = threading.Event()
    ranks.streams[0].put(behind.set)
    held.set()
    assert not behind.wait(0.2)  # the stream waits for the last rank
    for _ in range(2):
        ranks.start(2, 1.0)
    assert behind.wait(60.0)
    assert all(future.done() for future in more)
    wait_for(ranks.streams)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_raise_names_the_parameter_once_the_host_knows(make: Make, value: float) -> None:
    ranks = make()
    ranks.run(lambda rank: 1.0)
    for bias, weight in ranks.run(lambda rank: value if rank == 1 else 1.0):
        assert bias == [2.0] * 4
        assert not math.isfinite(weight[0])
        assert weight[1:] == [2.0] * 11
    with pytest.raises(NonFiniteGradient, match="rank 1, step 1: the gradient of 'weight' has entries") as caught:
        ranks.start(1, 1.0)  # the next pass
    assert (caught.value.rank, caught.value.parameter) == (1, "weight")
    assert isinstance(ranks.states[1].failure, NonFiniteGradient)
    assert ranks.states[1].stats.nonfinite_buckets == 1

    def next_pass() -> None:
        ranks.start(0, 1.0)
        ranks.states[0].synchronize()

    with pytest.raises(TransportError, match="NonFiniteGradient: rank 1, step 1"):
        next_pass()


@pytest.mark.parametrize("asks", [True, False])
def test_what_a_pass_has_found_that_was_broken_off_is_heard_of(make: Make, asks: bool) -> None:
    ranks = make()

    def call(rank: int, number: int) -> None:
        with ranks.device.on(ranks.streams[rank]):
            members = [ranks.parameters[rank][name] for name in (["weight", "empty"] if number else ["bias"])]
            size = sum(one.numel() for one in members)
            buffer = computed_on(ranks.device, torch.full((size,), math.nan if rank == 0 else 1.0))
            bucket = Bucket(members, buffer, number, number == 1)
            telegrad.ddp_hook(ranks.states[rank], bucket)  # type: ignore[arg-type]

    for rank in range(len(ranks.states)):
        call(rank, 0)
    if not asks:
        call(0, 0)
        wait_for([ranks.streams[0]])
    ask = ranks.states[0].synchronize if asks else partial(call, 0, 1)
    said = "rank 0, step 0: the gradient of 'bias'"
    with ranks.device.on(ranks.streams[0]), pytest.raises(NonFiniteGradient, match=said):
        ask()


@pytest.mark.parametrize("asked", ["synchronize", "state_dict"])
def test_the_last_pass_is_heard_of_without_another(make: Make, asked: str) -> None:
    ranks = make()
    ranks.run(lambda rank: math.nan if rank == 2 else 1.0)
    with pytest.raises(NonFiniteGradient, match="rank 2, step 0: the gradient of 'weight'"):
        getattr(ranks.states[2], asked)()
    ranks.states[0].synchronize()  # nothing was under way any more


@pytest.mark.parametrize("scaled", [False, True])
def test_skip_drops_the_step_on_all_ranks(make: Make, scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    ranks = make(nonfinite="skip", scaler=scaler)
    dropped = math.inf if scaled else 0.0
    for value, is_dropped in ((1.0, False), (math.nan, True), (1.0, False), (math.inf, True), (math.inf, True)):
        found = ranks.run(lambda rank, value=value: value if rank == 1 else 1.0)
        expected = [[dropped] * 4, [dropped] * 12] if is_dropped else [[2.0] * 4, [1.0] + [2.0] * 11]
        assert found == [expected] * 3
        assert [state.skipped for state in ranks.states] == [is_dropped] * 3
    assert [state.step for state in ranks.states] == [2] * 3
    assert [state.state_dict()["step"] for state in ranks.states] == [2] * 3
    assert ranks.states[0].stats.skipped_steps == 3


def test_send_shows_the_optimiser_what_is_not_finite(make: Make) -> None:
    ranks = make(nonfinite="send")
    found = ranks.run(lambda rank: math.inf if rank == 1 else 1.0)
    assert found == [[[2.0] * 4, [math.inf] + [2.0] * 11]] * 3
    for state in ranks.states:
        state.synchronize()


@pytest.mark.parametrize("nonfinite", ["raise", "skip", "send"])
def test_after_a_failure_averages_are_nan_and_the_next_call_raises(make: Make, nonfinite: str) -> None:
    ranks = make(nonfinite=nonfinite)
    ranks.run(lambda rank: 1.0)
    buckets = ranks.start(0, 1.0)
    ranks.comms[2].close()
    with ranks.device.on(ranks.streams[0]):
        for _, future in buckets:
            future.wait()
    ranks.streams[0].synchronize()
    assert all(torch.isnan(gradient.memory).all() for gradient, _ in buckets)
    with pytest.raises(TransportError, match="rank 2 closed"):
        ranks.start(0, 1.0)
    assert isinstance(ranks.states[0].failure, TransportError)
    with pytest.raises(TransportError, match="rank 2 closed"):
        ranks.states[0].synchronize()


def test_where_ranks_cannot_agree_no_average_stays(make: Make) -> None:
    """Rank 2 sums the buckets, and ends before it says whether the step is to be dropped."""
    ranks = make(nonfinite="skip")
    buckets = [*ranks.start(0, 1.0), *ranks.start(1, 2.0)]
    for n in (4, 12):
        x = computed_on(ranks.device, torch.full((n,), 3.0))
        ranks.on(2, lambda x=x: ranks.comms[2].all_reduce(x, "avg"))
    deadline = time.monotonic() + 60
    while any(gradient.memory.tolist() != [2.0] * gradient.numel() for gradient, _ in buckets):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    ranks.comms[2].abort("ended")
    for rank in range(2):
        with ranks.device.on(ranks.streams[rank]):
            for _, future in buckets:
                future.wait()
        ranks.streams[rank].synchronize()
    assert all(torch.isnan(gradient.memory).all() for gradient, _ in buckets)
    for _ in range(2):
        for ask in (lambda: ranks.states[0].step, lambda: ranks.states[0].skipped):
            with pytest.raises(TransportError, match="ended"):
                ask()
    with pytest.raises(TransportError, match="ended"):
        ranks.states[0].state_dict()


def test_a_pass_that_was_broken_off_leaves_nothing(make: Make) -> None:
    ranks = make(nonfinite="skip")
    for rank in range(3):
        with ranks.device.on(ranks.streams[rank]):
            parameters = [ranks.parameters[rank]["bias"]]
            buffer = computed_on(ranks.device, torch.full((4,), math.nan))
            telegrad.ddp_hook(ranks.states[rank], Bucket(parameters, buffer, 0, False))  # type: ignore[arg-type]
    assert ranks.run(lambda rank: 1.0) == [[[2.0] * 4, [1.0] + [2.0] * 11]] * 3
    assert not any(state.skipped for state in ranks.states)
    ranks.states[0].load_state_dict(ranks.states[0].state_dict())
    assert ranks.states[0].step == 1


class OtherSelection:
    """A program's own."""

    def capacity(self, entry: Any) -> int:
        return int(entry.k)

    def select(self, *_: Any) -> int:
        raise AssertionError("it is refused before")


def test_a_selection_that_streams_cannot_do_is_refused(make: Make) -> None:
    message = "parameter 'weight' is on a device, where a OtherSelection cannot choose without waiting.*model.cpu"
    with pytest.raises(TypeError, match=message):
        make(compress="topk", small_elements=4, select=OtherSelection())
    make(compress="topk", small_elements=100, select=OtherSelection())  # all of it is dense


def test_steps_are_dropped_on_one_device_only(make: Make) -> None:
    ranks = make()
    parameters = {
        "first": ranks.parameters[0]["bias"],
        "last": torch.nn.Parameter(torch.ones(4)),
    }
    DDPState(ranks.comms[0], module_of(parameters), compress=None)
    with pytest.raises(TypeError, match="parameters are on cpu, privateuseone:0: nonfinite='skip' takes"):
        DDPState(ranks.comms[0], module_of(parameters), compress=None, nonfinite="skip")  # before any sum begins
    with pytest.raises(TypeError, match="parameters are on cpu, privateuseone:0: clip_norm= takes those of one device"):
        DDPState(ranks.comms[0], module_of(parameters), compress=None, clip_norm=1.0)


def test_a_model_that_was_moved_after_the_state_was_made(make: Make) -> None:
    ranks = make()
    host = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    compress = TopK(select=OtherSelection(), small_elements=4)
    ranks.states[0] = DDPState(ranks.comms[0], module_of(host), compress=compress)
    with pytest.raises(TypeError, match="a OtherSelection cannot choose without waiting"):
        ranks.start(0, 1.0)
    meta = Bucket([host["bias"]], torch.zeros(4, device="meta"), 0, False)
    state = DDPState(ranks.comms[1], module_of(host), compress=None)
    with pytest.raises(TypeError, match="the gradient of 'bias' is on meta: train on the CPU or on CUDA"):
        telegrad.ddp_hook(state, meta)  # type: ignore[arg-type]
