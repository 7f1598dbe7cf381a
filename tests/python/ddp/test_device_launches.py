"""How many kernels a compressed pass launches on a device: with many parameters these are what the host's time goes to.
Counted are Triton's launches, and torch's operations that launch."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import computing_device
import handmade_buckets
import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, StreamTensor, computed_on, wait_for
from device_trainer import DeviceTrainer
from torch.utils._python_dispatch import TorchDispatchMode
from triton_arrays import DEVICE

import telegrad
from telegrad import Communicator
from telegrad.kernels.feedback import triton as feedback

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias"}


class Launches:
    """Counts while it is ``on``, but for what is a part of a replay."""

    def __init__(self, device: ComputingRuntime) -> None:
        self.on = False
        self._replaying = device.replaying
        self.counted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._in_kernel = threading.local()

    def count_torch(self, func: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        inside = getattr(self._in_kernel, "on", False) or getattr(self._replaying, "on", False)
        if self.on and not func.is_view and name not in _FREE and not inside:
            with self._lock:
                self.counted["torch"] += 1

    @contextlib.contextmanager
    def kernel(self, _: Any) -> Iterator[None]:
        """In place of what every launch of a Triton kernel enters."""
        if self.on and not getattr(self._replaying, "on", False):
            with self._lock:
                self.counted["triton"] += 1
        self._in_kernel.on = True  # what the interpreter computes is none of it
        try:
            yield
        finally:
            self._in_kernel.on = False


@pytest.fixture
def launches(device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches(device)
    unwaiting = computing_device._Unwaiting

    class Counting(unwaiting):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.count_torch(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr(computing_device, "_Unwaiting", Counting)
    monkeypatch.setattr("telegrad.kernels.triton.device_of", found.kernel)
    return found


class _Counted(TorchDispatchMode):
    """Of what the host calls: operations on the device's tensors alone."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, StreamTensor) for one in types):
            self._launches.count_torch(func)
        return func(*args, **(kwargs or {}))


def launched(
    launches: Launches, device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch, sizes: list[int], **options: Any
) -> dict[str, int]:
    """By a pass that is not the first, of one bucket, on one rank. ``captured``: what it repeats has been, by then; its
    memory is the same in each pass."""
    captured = options.pop("captured", False)
    names = [f"p{number}" for number in range(len(sizes))]
    monkeypatch.setattr(handmade_buckets, "SHAPES", dict(zip(names, ((size,) for size in sizes), strict=True)))
    monkeypatch.setattr("device_trainer.SHAPES", handmade_buckets.SHAPES)
    stream, rng = device.new_stream(), np.random.default_rng(0)
    if options.pop("scaled", False):
        options["scaler"] = scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))  # what a training does with its loss: now there is a scale
        with device.on(stream):
            scaler._scale = computed_on(device, scaler._scale)
    with Communicator.local(1)[0] as comm:
        trainer = DeviceTrainer(device, comm, stream, **{"density": 0.01, **options})
        gradient = computed_on(device, torch.zeros(sum(sizes)))
        last = 2 if captured else 1
        for step in range(last + 1):
            given = computed_on(device, torch.from_numpy(rng.standard_normal(sum(sizes)).astype(np.float32)))
            gradient = given if not captured else gradient
            with device.on(stream):
                gradient.copy_(given)
            bucket = handmade_buckets.Bucket([trainer.parameters[name] for name in names], gradient, 0, True)
            launches.on = step == last
            with device.on(stream), _Counted(launches):
                telegrad.ddp_hook(trainer.state, bucket).wait()  # type: ignore[arg-type]
            wait_for(device.streams)
            launches.on = False
        trainer.state.synchronize()
    found = dict(launches.counted)
    launches.counted.clear()
    return found


def test_where_residuals_lie_is_copied_once(
    launches: Launches, device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    table = feedback.table
    monkeypatch.setattr(feedback, "table", lambda parts: [made.append(len(parts)), table(parts)][1])
    launched(launches, device, monkeypatch, [3000, 500, 40_000], small_elements=100)
    assert made == [3]  # in two passes
    launched(launches, device, monkeypatch, [3000], warmup_steps=3, warmup="falling")
    assert made == [3, 1, 1]  # there are other numbers of entries in each of them


@pytest.mark.parametrize(
    ("options", "size", "alone", "each"),
    [
        ({"select": "topk"}, 3000, (8, 16), (3, 1)),
        ({"select": "topk"}, 40_000, (17, 20), (12, 5)),
        ({"select": "reused"}, 3000, (17, 16), (0, 0)),
        ({"select": "reused"}, 40_000, (17, 16), (0, 0)),
        ({"select": "topk", "values": "packed-bf16"}, 3000, (10, 18), (3, 1)),
    ],
)
def test_so_many_and_not_more(
    launches: Launches,
    device: ComputingRuntime,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    size: int,
    alone: tuple[int, int],
    each: tuple[int, int],
) -> None:
    """Of a bucket with one parameter, and for each one more: Triton's, torch's."""
    one = launched(launches, device, monkeypatch, [size], **options)
    four = launched(launches, device, monkeypatch, [size] * 4, **options)
    assert (one["triton"], one["torch"]) == alone
    assert ((four["triton"] - one["triton"]) / 3, (four["torch"] - one["torch"]) / 3) == each


@pytest.mark.parametrize("selection", ["topk", "trimmed", "reused"])
def test_of_what_each_pass_repeats_a_replay_is_left(
    launches: Launches, device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    """Of launches those of the sum."""
    found = [
        launched(launches, device, monkeypatch, [size] * number, select=selection, captured=True)
        for size, number in ((3000, 1), (3000, 4))
    ]
    assert [one.replays for one in device.captures] == [2, 2]
    assert found == [{"triton": 3}] * 2


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"momentum": 0.9, "optimizer": handmade_buckets.plain_sgd}, 2),
        ({"scaled": True, "nonfinite": "skip"}, 3),
        ({"scaled": True, "nonfinite": "skip", "momentum": 0.9, "optimizer": handmade_buckets.plain_sgd}, 7),
    ],
    ids=["momentum", "scale", "both"],
)
def test_momentum_and_a_scale_are_launched_for_once(
    launches: Launches, device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], more: int
) -> None:
    """However many parameters there are, of those that are compressed and of the others."""
    usual, own = ([3000] * number + [10] * number for number in (1, 4))
    plain = launched(launches, device, monkeypatch, usual)
    one = launched(launches, device, monkeypatch, usual, **options)
    four = launched(launches, device, monkeypatch, own, **options)
    assert (one["triton"] - plain["triton"], four["triton"] - one["triton"]) == (more, 0)


def test_a_long_parameter_is_launched_for_by_itself(
    launches: Launches, device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [40_000, 40_001, 3000]
    short = launched(launches, device, monkeypatch, sizes, select="reused")
    monkeypatch.setattr("telegrad.kernels.select.triton.launches.ALONE", 40_000)
    long = launched(launches, device, monkeypatch, sizes, select="reused")
    # One program ranks what a sample lets pass of so few; of 2**25 elements 4 and 1 more are launched for that.
    assert ((long["triton"] - short["triton"]) / 2, (long["torch"] - short["torch"]) / 2) == (13, 3)
