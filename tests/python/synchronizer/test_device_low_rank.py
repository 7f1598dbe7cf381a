"""LowRank on a device whose streams compute: the host's averages, nothing lost, and a host that waits for nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, wait_for
from device_and_host import OnEach
from device_ranks import RANKS
from device_trainer import DeviceTrainer, Gradients, step_on_device
from fake_device import FakeStream
from given_gradients import NAMED, gradients_of
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer
from threaded_ranks import on_ranks
from triton_arrays import DEVICE

from telegrad import Communicator, LowRank
from telegrad.ddp import ByShape, StepRecord
from telegrad.ddp.cuda.exchange import first_rows, halved, in_batches, orthonormal_columns, power_of_two, product_of
from telegrad.ddp.low_rank import first_basis, first_factor, orthonormal, product
from telegrad.errors import NonFiniteGradient, TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

Make = Callable[..., list[DeviceTrainer]]
PLAIN = LowRank(2, 100, "f32")
MIXED = LowRank(values="f32", policy=ByShape(2, 100, ("embedding",), 0.05, "topk"))
STEPS = 4


def drawn(rank: int, step: int) -> Gradients:
    random = np.random.default_rng([rank, step])
    return {name: random.standard_normal(int(np.prod(shape))).astype(np.float32) for name, shape in SHAPES.items()}


def buckets_of(step: int) -> list[list[str]]:
    return ONE if step == 0 else REBUILT


def of_host(steps: range, compress: LowRank, given: Callable[[int, int], Gradients] = drawn, **options: Any) -> Any:
    """Averages by step, and a state; of rank 0."""

    def run(comm: Communicator) -> Any:
        one = Trainer(comm, compress=compress, **options)
        averages = [one.step(given(comm.rank, step), buckets_of(step)) for step in steps]
        return averages, one.state.state_dict()

    return on_ranks(RANKS, run)[0]


def steps_of(trainers: list[DeviceTrainer], steps: range) -> list[list[Gradients]]:
    """Averages by step and rank."""
    return [step_on_device(trainers, [drawn(rank, step) for rank in range(RANKS)], buckets_of(step)) for step in steps]


def assert_close(own: np.ndarray, other: np.ndarray, share: float) -> None:
    assert np.linalg.norm(own.astype(np.float64) - other) <= share * np.linalg.norm(other.astype(np.float64))


@pytest.mark.parametrize(
    ("compress", "options", "share"),
    [
        (PLAIN, {"nonfinite": "skip"}, 1e-4),
        (PLAIN, {"nonfinite": "send", "warmup_steps": 2}, 1e-4),
        (PLAIN, {"clip_norm": 1.0}, 1e-4),
        (PLAIN, {"dtype": torch.bfloat16}, 2e-2),
        (MIXED, {}, 1e-4),
        (LowRank(2, 100), {"dtype": torch.bfloat16}, 5e-2),
    ],
    ids=["skip", "warm-up", "clipping", "bfloat16", "mixed", "int8-bfloat16"],
)
def test_the_hosts_averages(make: Make, compress: LowRank, options: dict[str, Any], share: float) -> None:
    trainers = make(compress=compress, **options)
    found = steps_of(trainers, range(STEPS))
    expected, state = of_host(range(STEPS), compress, **options)
    for of_ranks, other in zip(found, expected, strict=True):
        for name, average in other.items():
            assert all(own[name].tobytes() == of_ranks[0][name].tobytes() for own in of_ranks)
            assert_close(of_ranks[0][name], average, share)
    memory = trainers[0].memory()["parameters"]
    for name in LARGE:
        own, other = memory[name]["residual"].numpy(), state["compressor"]["parameters"][name]["residual"].numpy()
        assert own.any()
        assert_close(own, other, 10 * share)


@pytest.mark.parametrize("compress", [PLAIN, MIXED, LowRank(2, 100)], ids=["plain", "mixed", "int8"])
def test_what_was_given_is_what_was_sent_and_what_is_kept(make: Make, compress: LowRank) -> None:
    trainers = make(compress=compress)
    found = steps_of(trainers, range(STEPS))
    memories = [trainer.memory()["parameters"] for trainer in trainers]
    assert {*memories[0]} == {*(SHAPES if compress.values == "int8" else LARGE)}
    for name in memories[0]:
        given = sum(drawn(rank, step)[name].astype(np.float64) for rank in range(RANKS) for step in range(STEPS))
        sent = RANKS * sum(of_ranks[0][name].astype(np.float64) for of_ranks in found)
        kept = sum(memory[name]["residual"].numpy().astype(np.float64) for memory in memories)
        np.testing.assert_allclose(sent + kept, given, atol=4e-5)
        assert np.linalg.norm(kept) > (0.1 if name in LARGE else 1e-4) * np.linalg.norm(given)


def test_bits_on_the_network_are_few(make: Make) -> None:
    sent = {}
    for values in ("f32", "int8"):
        trainers = make(compress=LowRank(2, 100, values))
        steps_of(trainers, range(2))
        before = trainers[0].comm.stats()["bytes_sent"]
        steps_of(trainers, range(2, 4))
        sent[values] = trainers[0].comm.stats()["bytes_sent"] - before
    assert sent["int8"] < 0.3 * sent["f32"]


def test_a_state_goes_on_and_comes_from_the_host(make: Make) -> None:
    first = make(compress=PLAIN)
    steps_of(first, range(3))
    states = []
    for trainer in first:
        with trainer.device.on(trainer.stream):
            states.append(trainer.state.state_dict())
    expected = steps_of(first, range(3, 5))
    second = make(compress=PLAIN)
    for trainer, state in zip(second, states, strict=True):
        with trainer.device.on(trainer.stream):
            trainer.state.load_state_dict(state)
    for own, other in zip(steps_of(second, range(3, 5)), expected, strict=True):
        assert all(own[0][name].tobytes() == other[0][name].tobytes() for name in SHAPES)

    def on_host(comm: Communicator) -> list[Gradients]:
        one = Trainer(comm, compress=PLAIN)
        one.state.load_state_dict(states[comm.rank])
        return [one.step(drawn(comm.rank, step), REBUILT) for step in range(3, 5)]

    for own, other in zip(on_ranks(RANKS, on_host)[0], expected, strict=True):
        for name in SHAPES:
            assert_close(own[name], other[0][name], 1e-4)


def test_a_dropped_step_has_never_been(make: Make) -> None:
    trainers, others = (make(compress=LowRank(2, 100), nonfinite="skip") for _ in range(2))
    for one in (trainers, others):
        steps_of(one, range(2))
    poisoned = [drawn(rank, 2) for rank in range(RANKS)]
    poisoned[1]["hidden"][5] = math.nan
    [*dropped] = step_on_device(trainers, poisoned, REBUILT)
    assert not any(average.any() for own in dropped for average in own.values())
    for own, other in zip(steps_of(trainers, range(3, 5)), steps_of(others, range(3, 5)), strict=True):
        assert all(own[0][name].tobytes() == other[0][name].tobytes() for name in SHAPES)
    for trainer, other in zip(trainers, others, strict=True):
        with trainer.device.on(trainer.stream):
            state = trainer.state.state_dict()
            assert trainer.state.stats.skipped_steps == 1
        with other.device.on(other.stream):
            expected = other.state.state_dict()
        assert str(state["factors"]) == str(expected["factors"])
        assert str(state["compressor"]) == str(expected["compressor"])


def test_infinity_is_sent_and_no_residual_has_it(make: Make) -> None:
    trainers = make(compress=MIXED, nonfinite="send")
    steps_of(trainers, range(1))
    poisoned = [drawn(rank, 1) for rank in range(RANKS)]
    poisoned[1]["hidden"][5] = math.inf
    averages = step_on_device(trainers, poisoned, REBUILT)
    assert all(np.isnan(own["hidden"]).all() and np.isfinite(own["embedding"]).all() for own in averages)
    for trainer in trainers:
        assert trainer.memory()["parameters"]["hidden"]["residual"].isfinite().all()
    assert all(np.isfinite(average).all() for average in steps_of(trainers, range(2, 3))[0][0].values())


def test_not_a_number_is_raised_late(make: Make) -> None:
    trainers = make(compress=PLAIN)
    steps_of(trainers, range(1))
    poisoned = [drawn(rank, 1) for rank in range(RANKS)]
    poisoned[1]["hidden"][5] = math.nan
    step_on_device(trainers, poisoned, REBUILT)
    with trainers[1].device.on(trainers[1].stream), pytest.raises(NonFiniteGradient, match="'hidden'"):
        trainers[1].state.synchronize()
    with trainers[0].device.on(trainers[0].stream), pytest.raises(TransportError, match="NonFiniteGradient"):
        trainers[0].start(drawn(0, 2), REBUILT)


def test_an_overflow_with_what_waits_is_found(make: Make) -> None:
    huge = np.where(np.arange(1000) % 2, 3e38, 0).astype(np.float32)  # a part of it waits
    trainers = make(compress=PLAIN, nonfinite="send")
    large = [
        {**drawn(rank, 0), "hidden": (rank == 0) * huge * np.random.default_rng(1).random(1000, np.float32)}
        for rank in range(RANKS)
    ]
    for _ in range(6):
        step_on_device(trainers, large, ONE)
    assert all(trainer.memory()["parameters"]["hidden"]["residual"].isfinite().all() for trainer in trainers)


def test_the_host_does_not_wait(make: Make) -> None:
    trainers = make(compress=LowRank(2, 100))
    steps_of(trainers, range(3))  # after the first two the host has looked
    held = threading.Event()
    for trainer in trainers:
        trainer.stream.put(held.wait)
    found = [trainer.start(drawn(rank, 3), REBUILT) for rank, trainer in enumerate(trainers)]
    assert all(future.done() for of_rank in found for _, _, future in of_rank)
    held.set()
    averages = [trainer.wait(one) for trainer, one in zip(trainers, found, strict=True)]
    wait_for([trainer.stream for trainer in trainers])
    assert all(x.memory.isfinite().all() for of_rank in averages for _, x in of_rank)


def test_a_parameter_that_takes_no_part_keeps_what_waits_and_its_start(make: Make) -> None:
    trainers = make(compress=LowRank(2, 100))
    without = [{**drawn(rank, 0), "hidden": np.zeros(1000, np.float32)} for rank in range(RANKS)]
    for _ in range(3):
        assert not any(own["hidden"].any() for own in step_on_device(trainers, without, ONE))
    trainer = trainers[0]
    with trainer.device.on(trainer.stream):
        state = trainer.state.state_dict()
    assert not state["compressor"]["parameters"]["hidden"]["residual"].any()
    shape = trainer.state._low_rank.shapes["hidden"]
    np.testing.assert_array_equal(state["factors"]["hidden"].numpy(), first_factor("hidden", shape))
    assert steps_of(trainers, range(1, 2))[0][0]["hidden"].any()


class Collected:
    """A telemetry."""

    every = 1

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("compress", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_figures_are_those_of_the_host(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], compress: LowRank
) -> None:
    own, hosts = [[Collected() for _ in range(RANKS)] for _ in range(2)]
    trainers = [
        DeviceTrainer(device, comm, streams[rank], compress=compress, telemetry=own[rank])
        for rank, comm in enumerate(comms)
    ]
    steps_of(trainers, range(2))
    for trainer in trainers:
        with device.on(trainer.stream):
            trainer.state.synchronize()

    def run(comm: Communicator) -> None:
        one = Trainer(comm, compress=compress, telemetry=hosts[comm.rank])
        for step in range(2):
            one.step(drawn(comm.rank, step), buckets_of(step))

    on_ranks(RANKS, run)
    assert all(len(one.records) == 2 for one in own)
    pairs = [pair for one, host in zip(own, hosts, strict=True) for pair in zip(one.records, host.records, strict=True)]
    for record, other in pairs:
        assert record.dense_elements == other.dense_elements
        found, expected = ({one.name: one for one in of.tensors} for of in (record, other))
        assert found.keys() == expected.keys() == {*LARGE}
        for name, one in expected.items():
            assert found[name][:4] == one[:4]
            np.testing.assert_allclose(found[name][4:6], one[4:6], rtol=1e-4)
            assert (found[name].threshold is None) == (one.threshold is None)


@pytest.mark.parametrize("compress", [PLAIN, LowRank(2, 100)], ids=["plain", "int8"])
def test_a_synchronizer_on_a_device(on_devices: OnEach, compress: LowRank) -> None:
    def run(rank: Any) -> Any:
        averages = [rank.step(gradients_of(rank.comm.rank, step)) for step in range(STEPS)]
        return averages, rank.sync.state_dict()["compressor"]["parameters"]

    results = on_devices(run, compress=compress, plan=NAMED)
    for name in LARGE:
        given = sum(gradients_of(rank, step)[name].double() for rank in range(RANKS) for step in range(STEPS))
        sent = RANKS * sum(average[name].double() for average in results[0][0])
        kept = sum(waits[name]["residual"].double() for _, waits in results).view(SHAPES[name])
        torch.testing.assert_close(sent + kept, given, rtol=0, atol=0.05)
        assert all(
            torch.equal(one[name], other[name])
            for own, _ in results
            for one, other in zip(own, results[0][0], strict=True)
        )


def test_parts_are_those_of_the_host() -> None:
    random = np.random.default_rng(3)
    given = [
        random.standard_normal((rows, columns)).astype(np.float32) for rows, columns in ((9, 2), (16, 3), (1000, 4))
    ]
    given[1][:, 1] = 3 * given[1][:, 0]  # depends on it
    for own, one in zip(in_batches([*map(torch.from_numpy, given)], orthonormal_columns), given, strict=True):
        np.testing.assert_allclose(own.numpy(), orthonormal(one), atol=1e-6)
    given[2][::3], given[0][1:] = 0, 0
    for one in (*given, np.zeros_like(given[0])):
        np.testing.assert_array_equal(first_rows(torch.from_numpy(one)).numpy(), first_basis(one))
    sums = in_batches([*map(torch.from_numpy, given)], lambda x: halved(x.double()))
    for own, one in zip(sums, given, strict=True):
        np.testing.assert_allclose(own.numpy(), one.astype(np.float64).sum(0), rtol=1e-12, atol=1e-12)
    made = np.empty(1000 * 16, np.float32)
    product(given[2], random.standard_normal((4, 16)).astype(np.float32), made)
    lines = np.random.default_rng(4).standard_normal((4, 16)).astype(np.float32)
    product(given[2], lines, made)
    own = product_of(torch.from_numpy(given[2]), torch.from_numpy(lines))
    assert own.numpy().tobytes() == made.tobytes()
    exponents = torch.tensor([-200, -60, -1, 0, 5, 60, 200])
    np.testing.assert_array_equal(power_of_two(exponents).numpy(), 2.0 ** np.clip(exponents.numpy(), -60, 60))
