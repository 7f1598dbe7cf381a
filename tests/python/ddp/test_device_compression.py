"""Compressed gradients on a device: the host's bits, nothing lost, and a host that waits for nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import computed_on, wait_for
from device_ranks import RANKS
from device_trainer import DeviceTrainer, Gradients, step_on_device, step_on_host
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Bucket, gradients_of, plain_sgd
from triton_arrays import DEVICE

import telegrad
from telegrad.compress import BucketTopK
from telegrad.ddp import OkTopk
from telegrad.kernels.select.triton import launches

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

Make = Callable[..., list[DeviceTrainer]]


def drawn(rank: int, step: int) -> Gradients:
    rng = np.random.default_rng([rank, step])
    return {name: (rng.standard_normal(int(np.prod(shape))) ** 3).astype(np.float32) for name, shape in SHAPES.items()}


def assert_same_state(device: dict[str, Any], host: dict[str, Any]) -> None:
    """Residuals and velocities, bit for bit."""
    for group, kind in (("parameters", "residual"), ("velocities", "velocity")):
        assert device.get(group, {}).keys() == host.get(group, {}).keys()
        for name, entry in host.get(group, {}).items():
            own = device[group][name]
            assert own[kind].dtype == torch.float32
            assert own[kind].numpy().tobytes() == entry[kind].numpy().tobytes(), name
            assert own["unit"] == entry["unit"]


WAYS: list[dict[str, Any]] = [
    {"select": "reused", "interval": 3},
    {"select": "topk", "density": 1.0},
    {"select": "reused", "dtype": torch.bfloat16},
    {"select": "topk", "values": "packed", "nonfinite": "skip"},
    {"select": "topk", "nonfinite": "send", "small_elements": 10_000},
    {"select": "reused", "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "topk", "momentum": 0.9, "nesterov": True, "optimizer": plain_sgd},
    {"select": "topk", "momentum": 0.9, "masking": False, "optimizer": plain_sgd, "dtype": torch.bfloat16},
    {"compress": None, "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "reused", "warmup_steps": 5, "warmup": "falling"},
    {"select": "topk", "values": "packed-bf16", "warmup_steps": 2},
    {"select": "reused", "values": "int8", "nonfinite": "skip"},
    {"select": "topk", "values": "f16", "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "topk", "values": "raw-qsgd4", "density": 0.4},
    {"select": "topk", "values": "packed-codebook2", "density": 0.4},
    {"select": BucketTopK(300, 9), "nonfinite": "skip", "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "sampled", "interval": 3, "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "gaussian", "density": 0.05},
    {"select": "random", "density": 0.7},
    {"select": "trimmed", "same_sign": True, "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "search", "same_sign": True, "output": [], "dtype": torch.bfloat16},
    {"select": "reused", "combine": "allgather", "values": "int8", "dtype": torch.float32},
    {"select": "topk", "combine": "allgather", "dtype": torch.bfloat16},
    {"select": "reused", "combine": "oktopk"},
    {"select": "topk", "combine": "oktopk", "values": "int8", "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "topk", "combine": OkTopk(threshold_every=3), "nonfinite": "skip"},
    {"select": "topk", "combine": "gtopk", "momentum": 0.9, "optimizer": plain_sgd, "dtype": torch.bfloat16},
    {"select": "topk", "combine": "bounded", "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "topk", "same_sign": True, "combine": "oktopk"},
]
"""Each selection, sum, format and treatment of what is lost at least once, most of them beside others."""


@pytest.mark.parametrize(
    "options", WAYS, ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items() if k != "optimizer")
)
def test_the_hosts_bits(make: Make, on_host: Any, options: dict[str, Any]) -> None:
    trainers, hosts = make(**options), on_host(**options)
    # What comes later than the third step: the end of a warm-up, and a threshold that is found anew.
    steps = 3 + {"falling": 4}.get(options.get("warmup", ""), len({"interval", "warmup_steps", "combine"} & {*options}))
    for step in range(steps):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        buckets = ONE if step == 0 else REBUILT
        found, expected = step_on_device(trainers, gradients, buckets), step_on_host(hosts, gradients, buckets)
        for own, other in zip(found, expected, strict=True):
            for name, average in other.items():
                assert own[name].tobytes() == average.tobytes(), (step, name)
    for trainer, host in zip(trainers, hosts, strict=True):
        assert_same_state(trainer.memory(), host.state.state_dict()["compressor"])
        assert trainer.state.step == host.state.step == steps
        stats, expected_stats = trainer.state.stats, host.state.stats
        counted = ("buckets", "elements", "dense_elements", "wanted", "selected")
        for name in (*counted, "kept", "overflow", "words_sent", "words_received"):
            assert getattr(stats, name) == getattr(expected_stats, name), name


def test_the_host_does_not_wait(make: Make) -> None:
    trainers = make(select="reused", momentum=0.9, optimizer=plain_sgd)
    held = threading.Event()
    for trainer in trainers:
        trainer.stream.put(held.wait)
    gradients = [drawn(rank, 0) for rank in range(RANKS)]
    first = [trainers[rank].start(gradients[rank], REBUILT) for rank in range(RANKS - 1)]
    assert all(future.done() for of_rank in first for _, _, future in of_rank)
    second = [trainers[rank].start(gradients[rank], REBUILT) for rank in range(RANKS - 1)]
    found = [trainers[rank].wait(first[rank]) for rank in range(RANKS - 1)]
    held.set()
    behind = threading.Event()
    trainers[0].stream.put(behind.set)
    assert not behind.wait(0.2)  # the stream waits for the last rank
    assert len(second) == RANKS - 1
    for _ in range(2):
        trainers[-1].start(gradients[-1], REBUILT)
    assert behind.wait(60.0)
    wait_for([trainer.stream for trainer in trainers])
    assert all(x.memory.isfinite().all() for of_rank in found for _, x in of_rank)
    for trainer in trainers:
        trainer.state.synchronize()


def test_what_selections_need_is_there_before_the_first_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random positions at which long residuals are sampled are the host's, and to copy them there is to wait."""
    monkeypatch.setattr(launches, "SMALL", 512)
    launches.sample_words.cache_clear()
    trainers = make(select="topk", warmup_steps=1)
    wait_for([trainer.stream for trainer in trainers])
    assert launches.sample_words.cache_info().misses == 1
    launches.sample_words.cache_clear()  # as if the model had only now come here
    gradients = [drawn(rank, 0) for rank in range(RANKS)]
    step_on_device(trainers, gradients, ONE)
    assert launches.sample_words.cache_info().misses == 1
    step_on_device(trainers, gradients, REBUILT)
    assert launches.sample_words.cache_info().misses == 1
    assert launches.sample_words.cache_info().hits > RANKS  # the pass did take a sample


@pytest.mark.parametrize(
    ("selection", "combine", "nonfinite"),
    [
        ("topk", "allreduce", "raise"),
        ("reused", "allreduce", "skip"),
        ("sampled", "oktopk", "raise"),
        ("buckets", "gtopk", "skip"),
        ("search", "bounded", "raise"),
        ("gaussian", "allgather", "skip"),
    ],
)
def test_nothing_is_lost(make: Make, selection: str, combine: str, nonfinite: str) -> None:
    """Integers, whose sums and thirds' threefold are exact enough: all that came in has gone out, or waits."""
    interval = {"interval": 3} if selection in ("reused", "sampled") else {}  # exact again at the fourth step
    trainers = make(select=selection, combine=combine, nonfinite=nonfinite, density=0.02, **interval)
    steps = 6 if interval else 4
    sent = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    entered = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    for step in range(steps):
        gradients = [gradients_of(rank, step) for rank in range(RANKS)]
        for name, average in step_on_device(trainers, gradients, REBUILT)[0].items():
            sent[name] += np.rint(average.astype(np.float64) * RANKS)
            entered[name] += sum(own[name].astype(np.float64) for own in gradients)
    states = [trainer.memory()["parameters"] for trainer in trainers]
    for name in SHAPES:
        waits = sum(state[name]["residual"].numpy().astype(np.float64) for state in states) if name in LARGE else 0.0
        np.testing.assert_array_equal(sent[name] + waits, entered[name])
        assert name not in LARGE or np.any(waits)


@pytest.mark.parametrize("combine", ["oktopk", "gtopk", "bounded", "allgather"])
def test_a_dropped_step_leaves_sums_as_they_were(make: Make, on_host: Any, combine: str) -> None:
    """States of sums too: a threshold is reused after the step, as on the host."""
    options = {"select": "topk", "combine": combine, "nonfinite": "skip", "momentum": 0.9, "optimizer": plain_sgd}
    trainers, hosts = make(**options), on_host(**options)
    for step in range(6):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        if step in (2, 3):
            gradients[1]["hidden"][3] = math.nan
        found, expected = step_on_device(trainers, gradients, REBUILT), step_on_host(hosts, gradients, REBUILT)
        for name, average in expected[0].items():
            assert found[0][name].tobytes() == average.tobytes(), (step, name)
    for trainer, host in zip(trainers, hosts, strict=True):
        with trainer.device.on(trainer.stream):
            state, wanted = trainer.state.state_dict(), host.state.state_dict()
        assert_same_state(state["compressor"], wanted["compressor"])
        assert state["sums"] == wanted["sums"]
        assert state["step"] == wanted["step"] == 4


@pytest.mark.parametrize("same_sign", [False, True])
def test_a_nan_that_is_sent_spoils_no_residual(make: Make, on_host: Any, same_sign: bool) -> None:
    """It arrives on all ranks, whatever adds entries up, and nothing of it comes back."""
    ways = [{"same_sign": True}] if same_sign else [{"combine": one} for one in ("oktopk", "gtopk", "allgather")]
    for way in ways:
        trainers = make(select="topk", nonfinite="send", **way)
        for step in range(3):
            gradients = [drawn(rank, step) for rank in range(RANKS)]
            if step == 1:
                gradients[2]["embedding"][5] = math.nan
            found = step_on_device(trainers, gradients, REBUILT)
            assert [np.isnan(own["embedding"]).any() for own in found] == [step == 1] * RANKS
        for trainer in trainers:
            for entry in trainer.memory()["parameters"].values():
                assert np.isfinite(entry["residual"].numpy()).all()


def test_a_parameter_that_took_no_part_keeps_what_waits(make: Make, on_host: Any) -> None:
    options = {"select": "topk", "momentum": 0.9, "optimizer": plain_sgd}
    trainers, hosts = make(**options), on_host(**options)
    for step in range(4):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        for own in gradients[: 2 if step == 2 else 0] if step != 3 else gradients:
            own["hidden"][:] = 0
            own["bias"][:] = 0
        found, expected = step_on_device(trainers, gradients, REBUILT), step_on_host(hosts, gradients, REBUILT)
        for name, average in expected[0].items():
            assert found[0][name].tobytes() == average.tobytes(), (step, name)
    assert not found[0]["hidden"].any()
    for trainer, host in zip(trainers, hosts, strict=True):
        assert_same_state(trainer.memory(), host.state.state_dict()["compressor"])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (math.nan, "large"),
        (-math.inf, "small"),
        pytest.param(math.nan, "small", marks=pytest.mark.slow),
        pytest.param(-math.inf, "large", marks=pytest.mark.slow),
    ],
)
def test_a_dropped_step_leaves_all_as_it_was(make: Make, value: float, what: str) -> None:
    options = {"select": "reused", "interval": 3, "nonfinite": "skip", "momentum": 0.9, "optimizer": plain_sgd}
    trainers = make(**options)
    before: list[Any] = []
    for step in range(5):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        if step == 3:
            gradients[1]["hidden" if what == "large" else "bias"][3] = value
            before = [trainer.memory() for trainer in trainers]
        found = step_on_device(trainers, gradients, REBUILT)
        for trainer in trainers:
            with trainer.device.on(trainer.stream):
                assert trainer.state.skipped == (step == 3)
        if step == 3:
            assert not any(average.any() for own in found for average in own.values())
            for trainer, state in zip(trainers, before, strict=True):
                now = trainer.memory()
                assert_same_state(now, state)
                for name in LARGE:
                    for key in ("threshold", "calls"):
                        assert now["parameters"][name][key] == state["parameters"][name][key]
    assert [trainer.state.step for trainer in trainers] == [4] * RANKS


def test_raise_names_the_parameter_and_poisons_no_residual(make: Make) -> None:
    trainers = make(select="topk")
    step_on_device(trainers, [drawn(rank, 0) for rank in range(RANKS)], REBUILT)
    before = trainers[1].memory()["parameters"]["hidden"]["residual"].clone()
    gradients = [drawn(rank, 1) for rank in range(RANKS)]
    gradients[1]["hidden"][7:900] = math.nan
    found = step_on_device(trainers, gradients, REBUILT)
    assert np.isnan(found[0]["hidden"]).sum() == 1  # all ranks see it
    with pytest.raises(telegrad.NonFiniteGradient, match="rank 1, step 1: the gradient of 'hidden' has") as caught:
        trainers[1].state.synchronize()
    assert (caught.value.rank, caught.value.parameter) == (1, "hidden")
    with trainers[1].device.on(trainers[1].stream):
        trainers[1].state._buckets.save()
    after = trainers[1].state._compressor.residuals
    np.testing.assert_array_equal(after["hidden"].values, before.numpy())
    assert all(np.isfinite(entry.values).all() for entry in after)


@pytest.mark.parametrize(("nonfinite", "momentum"), [("skip", 0.0), ("skip", 0.9), ("send", 0.9), ("raise", 0.9)])
def test_what_overflows_is_no_residual(make: Make, nonfinite: str, momentum: float) -> None:
    """Finite gradients whose sum with what waits is infinite, in more entries than there is room for."""
    options = {"momentum": momentum, "optimizer": plain_sgd} if momentum else {}
    trainers = make(select="topk", nonfinite=nonfinite, **options)
    for step in range(2):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        gradients[2]["hidden"][:] = 3e38
        gradients[2]["hidden"][::2] = -3e38
        found = step_on_device(trainers, gradients, REBUILT)
    if nonfinite == "skip":
        with trainers[0].device.on(trainers[0].stream):
            assert trainers[0].state.skipped
        assert not found[0]["hidden"].any()
    else:
        assert np.isinf(found[0]["hidden"]).any()
    if nonfinite == "raise":
        with pytest.raises(telegrad.NonFiniteGradient, match="'hidden'.*or what waits of it has overflowed"):
            trainers[2].state.synchronize()
    with trainers[2].device.on(trainers[2].stream):
        trainers[2].state._buckets.save()
    compressor = trainers[2].state._compressor
    for entry in (*compressor.residuals, *(compressor.momentum or ())):
        assert np.isfinite(entry.values).all(), entry.name


@pytest.mark.parametrize("options", [{"compress": None}, {"select": "reused", "nonfinite": "skip"}])
def test_gradients_are_clipped_together(make: Make, on_host: Any, options: dict[str, Any]) -> None:
    trainers, hosts = make(clip_norm=20.0, **options), on_host(clip_norm=20.0, **options)
    for step in range(4):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        if step == 3:
            for own in gradients:
                for one in own.values():
                    one *= np.float32(0.01)  # of a norm that nothing clips
        found, expected = step_on_device(trainers, gradients, REBUILT), step_on_host(hosts, gradients, REBUILT)
        for name, average in expected[0].items():
            np.testing.assert_allclose(found[0][name], average, rtol=1e-5, atol=1e-7)
    assert hosts[0].state.stats.clipped_steps == 3


@pytest.mark.parametrize("combine", ["allreduce", "oktopk"])
def test_residuals_of_steps(make: Make, on_host: Any, combine: str) -> None:
    options = {"select": "reused", "combine": combine, "feedback": "steps", "optimizer": plain_sgd}
    trainers, hosts = make(**options), on_host(**options)
    for step, rate in enumerate([0.5, 0.5, 0.1, 0.0, 3.0, 0.25]):
        for one in (*trainers, *hosts):
            one.state._scales._optimizer.param_groups[0]["lr"] = rate
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        found, expected = step_on_device(trainers, gradients, REBUILT), step_on_host(hosts, gradients, REBUILT)
        for name, average in expected[0].items():
            assert found[0][name].tobytes() == average.tobytes(), (step, name)
    for trainer, host in zip(trainers, hosts, strict=True):
        assert_same_state(trainer.memory(), host.state.state_dict()["compressor"])


def test_a_dropped_step_of_another_rate_leaves_all_as_it_was(make: Make, on_host: Any) -> None:
    options = {"select": "reused", "feedback": "steps", "optimizer": plain_sgd, "nonfinite": "skip"}
    trainers, hosts = make(**options), on_host(**options)
    steps = [(0.3, False), (0.07, True), (0.011, False), (3.0, True), (0.5, True), (0.5, False), (0.25, False)]
    for step, (rate, is_bad) in enumerate(steps):
        for one in (*trainers, *hosts):
            one.state._scales._optimizer.param_groups[0]["lr"] = rate
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        if is_bad:
            gradients[1]["hidden"][3] = math.nan
        found, expected = step_on_device(trainers, gradients, REBUILT), step_on_host(hosts, gradients, REBUILT)
        for name, average in expected[0].items():
            assert found[0][name].tobytes() == average.tobytes(), (step, name)
        if step % 2:
            for trainer, host in zip(trainers, hosts, strict=True):
                assert_same_state(trainer.memory(), host.state.state_dict()["compressor"])


@pytest.mark.parametrize("wire", ["bf16", "packed-int8", "qsgd8"])
def test_what_a_wire_rounds_waits(make: Make, wire: str) -> None:
    """Nothing is lost; nobody has waited for a pass before the next begins."""
    trainers, steps = make(select="topk", values=wire), 5
    given = [[drawn(rank, step) for step in range(steps)] for rank in range(RANKS)]
    sent = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    started = [
        [trainer.start(own, REBUILT, anew=True) for own in of_rank]
        for trainer, of_rank in zip(trainers, given, strict=True)
    ]
    for trainer, passes in zip(trainers, started, strict=True):
        for of_pass in passes:
            trainer.wait(of_pass)
    wait_for([trainer.stream for trainer in trainers])
    for of_pass in started[0]:
        for names, buffer, _ in of_pass:
            cuts = np.cumsum([sent[name].size for name in names])[:-1]
            for name, average in zip(names, np.split(buffer.memory.double().numpy(), cuts), strict=True):
                sent[name] += average * RANKS
    states = [trainer.memory()["parameters"] for trainer in trainers]
    for name in LARGE:
        entered = sum(own[name].astype(np.float64) for of_rank in given for own in of_rank)
        waits = sum(state[name]["residual"].numpy().astype(np.float64) for state in states)
        np.testing.assert_allclose(sent[name] + waits, entered, atol=1e-4)
        assert not np.allclose(sent[name], entered, atol=0.01)


def test_a_dropped_step_takes_back_what_its_wire_has_rounded(make: Make) -> None:
    trainers = make(select="topk", values="int8", nonfinite="skip")
    step_on_device(trainers, [drawn(rank, 0) for rank in range(RANKS)], REBUILT)
    before = [trainer.memory() for trainer in trainers]
    gradients = [drawn(rank, 1) for rank in range(RANKS)]
    gradients[2]["bias"][0] = math.nan
    step_on_device(trainers, gradients, REBUILT)
    for trainer, state in zip(trainers, before, strict=True):
        assert_same_state(trainer.memory(), state)


def test_what_float16_does_not_hold_waits(make: Make, on_host: Any) -> None:
    options = {"select": "topk", "values": "f16"}
    trainers, hosts = make(**options), on_host(**options)
    for step in range(3):
        gradients = [drawn(rank, step) for rank in range(RANKS)]
        for own in gradients:
            own["hidden"] *= np.float32(1e5)
        found, expected = step_on_device(trainers, gradients, REBUILT), step_on_host(hosts, gradients, REBUILT)
        for name, average in expected[0].items():
            assert found[0][name].tobytes() == average.tobytes(), (step, name)
        assert np.abs(found[0]["hidden"]).max() <= 65504
    for trainer, host in zip(trainers, hosts, strict=True):
        assert_same_state(trainer.memory(), host.state.state_dict()["compressor"])


@pytest.mark.parametrize(("combine", "saves"), [("allreduce", False), ("oktopk", True)])
def test_a_pass_that_was_broken_off_is_undone(make: Make, on_host: Any, combine: str, saves: bool) -> None:
    options = {"select": "topk", "nonfinite": "skip", "combine": combine}
    trainers, hosts = make(**options), on_host(**options)
    given = [drawn(rank, 0) for rank in range(RANKS)]
    step_on_device(trainers, given, REBUILT)
    step_on_host(hosts, given, REBUILT)
    before = [trainer.memory() for trainer in trainers]
    for rank, trainer in enumerate(trainers):
        gradients = drawn(rank, 1)
        with trainer.device.on(trainer.stream):
            names = REBUILT[0]
            own = torch.from_numpy(np.concatenate([gradients[name] for name in names]))
            parameters = [trainer.parameters[name] for name in names]
            bucket = Bucket(parameters, computed_on(trainer.device, own), 0, False)
            telegrad.ddp_hook(trainer.state, bucket)  # type: ignore[arg-type]
    for trainer, state in zip(trainers, before, strict=True):
        if saves:
            assert_same_state(trainer.memory(), state)
    given = [drawn(rank, 2) for rank in range(RANKS)]
    found, expected = step_on_device(trainers, given, REBUILT), step_on_host(hosts, given, REBUILT)
    for name, average in expected[0].items():
        assert found[0][name].tobytes() == average.tobytes(), name


def test_passes_that_nobody_waits_for_come_in_their_order(make: Make) -> None:
    """The second one changes nothing before the first one, which is dropped, is undone."""
    options = {"select": "reused", "nonfinite": "skip"}
    kept: list[list[dict[str, Any]]] = []
    for waits in (True, False):
        trainers = make(**options)
        given = [[drawn(rank, step) for step in range(3)] for rank in range(RANKS)]
        given[1][1]["hidden"][0] = math.nan
        if waits:
            for step in range(3):
                step_on_device(trainers, [of_rank[step] for of_rank in given], REBUILT)
        else:
            for trainer, of_rank in zip(trainers, given, strict=True):
                for gradients in of_rank:
                    trainer.start(gradients, REBUILT, anew=True)
        kept.append([trainer.memory() for trainer in trainers])
        assert [trainer.state.step for trainer in trainers] == [2] * RANKS
    for one, other in zip(*kept, strict=True):
        assert_same_state(one, other)
