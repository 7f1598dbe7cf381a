"""The demo's clocks: the host's, and a device's, whose stream is behind the host."""

from __future__ import annotations

import time

import torch
from computing_device import ComputingRuntime, computed_on, model_on
from measured_device import MeasuredDevice

from telegrad.tools.demo.training import DeviceStepClock, HostStepClock


def test_the_hosts_clock() -> None:
    model = torch.nn.Linear(4, 4)
    clock = HostStepClock(model)
    clock.begin()
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02)  # what waits for averages
    clock.reduced()
    time.sleep(0.02)
    times = clock.end()
    assert 0.02 <= times.exposed_s < times.step_s - 0.02


def test_a_devices_clock_counts_what_its_stream_waits_for() -> None:
    runtime = ComputingRuntime()
    device = MeasuredDevice(runtime)
    with runtime.on(runtime.new_stream()) as stream:
        model = model_on(runtime, torch.nn.Linear(4, 4))
        clock = DeviceStepClock(model, device)
        x = computed_on(runtime, torch.ones(2, 4))
        for _ in range(2):
            clock.begin()
            stream.put(lambda: time.sleep(0.05))  # a kernel before the backward pass
            model(x).sum().backward()
            stream.put(lambda: time.sleep(0.02))  # what waits for averages
            clock.reduced()
            stream.put(lambda: time.sleep(0.02))
            times = clock.end()
            assert 0.02 <= times.exposed_s < 0.05
            assert times.step_s >= 0.09
    runtime.stop()
