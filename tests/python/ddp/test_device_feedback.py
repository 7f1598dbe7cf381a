"""Residuals on a device, with the threshold and number of calls of each: what steps change, and what is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, computed_on, wait_for
from device_trainer import DeviceTrainer
from fake_device import FakeStream
from triton_arrays import DEVICE

from telegrad.compress import Compressor, RandomK, Selection, ThresholdSearch
from telegrad.ddp.cuda.feedback import DeviceFeedback, DeviceTables
from telegrad.ddp.cuda.selection import QueuedEntries, QueuedSelection, queue_selections

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

_SIZE = 400


def _compressor(**options: Any) -> Compressor:
    return Compressor({"weight": _SIZE}, density=0.05, **options)


def test_a_reverted_change_of_k_keeps_the_threshold(device: ComputingRuntime, streams: list[FakeStream]) -> None:
    """As where a pass of a falling density is taken back: its k is, and with it what the threshold held for."""
    compressor = _compressor(selection="reused")
    feedback, entry = DeviceFeedback(compressor, None), compressor.residuals["weight"]
    k = entry.k
    with device.on(streams[0]):
        like = computed_on(device, torch.zeros(_SIZE))
        held: Any = feedback.residual(entry, like)
        held.threshold.fill_(0.25)
        held.calls.fill_(7)
        feedback.record(True)
        feedback.residual(entry, like)  # about to change, with this k
        compressor.residuals.raise_density(0.5)
        assert feedback.residual(entry, like).k == entry.k > k
        held.values.fill_(3.0)
        feedback.revert(["weight"])
        compressor.residuals.raise_density(0.0)
        feedback.apply_reverts()
        assert feedback.residual(entry, like).k == entry.k == k
    wait_for(streams)
    assert (held.threshold.memory.item(), held.calls.memory.item()) == (0.25, 7)
    assert not held.values.memory.any()


@pytest.mark.parametrize("active", [0, 1])
@pytest.mark.parametrize(
    "policy", [RandomK(seed=1), ThresholdSearch(same_sign=True)], ids=lambda one: type(one).__name__
)
def test_a_parameter_without_a_gradient_counts_no_call(
    device: ComputingRuntime, streams: list[FakeStream], policy: Selection, active: int
) -> None:
    """On which hang the next random entries, and whose turn among the signs it is."""
    compressor = _compressor(selections={"weight": policy})
    entry = compressor.residuals["weight"]
    with device.on(streams[0]):
        gradient = computed_on(device, torch.linspace(-1, 1, _SIZE))
        held: Any = DeviceFeedback(compressor, None).residual(entry, gradient)
        choice = QueuedSelection(compressor.policy_of(entry), entry, held, 0, 0, 0)
        room, takes_part = choice.room, computed_on(device, torch.tensor([active]))
        indices = computed_on(device, torch.zeros(room, dtype=torch.int32)).view(torch.uint32)
        values = computed_on(device, torch.zeros(room))
        counts: Any = computed_on(device, torch.zeros(1, dtype=torch.int64))
        chosen = QueuedEntries(gradient, indices, values, counts, takes_part)
        queue_selections([choice], chosen, DeviceTables(), device, streams[0])
    wait_for(streams)
    assert held.calls.memory.item() == active
    assert bool(counts.memory.item()) == bool(held.values.memory.any()) == bool(active)


def test_what_did_not_leave_after_all_is_kept_to_the_bit(
    make: Callable[..., list[DeviceTrainer]], device: ComputingRuntime
) -> None:
    """As the Synchronizer does where only another rank has a gradient of a parameter."""
    trainer = make(select="topk")[0]
    own = torch.linspace(-1, 1, trainer.parameters["hidden"].numel())
    with device.on(trainer.stream):
        compression = trainer.state._device_buckets()._compression
        part = compression.compressor.part("hidden", 0)
        for _ in range(2):
            compression.keep(part, computed_on(device, own))
        compression.save()
    assert part.entry.values.tobytes() == (own + own).numpy().tobytes()
