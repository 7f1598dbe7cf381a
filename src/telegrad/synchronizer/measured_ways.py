"""What it takes to send a group in each way, measured on a live communicator: the ways of a joint plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from telegrad.communicator import Communicator
from telegrad.compress import Compressor, Velocities
from telegrad.cost.send_method import SendMethod
from telegrad.ddp.bucket import ParameterSpan, layout_of_members
from telegrad.ddp.exchange import Exchange
from telegrad.ddp.telemetry import DDPStats
from telegrad.synchronizer.compression import Compression
from telegrad.tuning.group_cost import (
    Begun,
    group_cost_while_computing,
    measured_group_cost,
    measured_way,
    way_cost_while_computing,
)

_Prepare = Callable[[], Callable[[], Begun]]

_NAME = "probe"
_GRADIENTS, _SETTLING = 64, 8
"""How many gradients are drawn, and how many are compressed before the first is sent: residuals begin empty."""


def measured_ways(compression: Compression, comm: Communicator, *, most_bytes: int) -> list[SendMethod]:
    """Those of ``compression.ways``; the same on all ranks but for rounding.

    Those that compress are of random float32 gradients in one tensor, and their delay is what that takes on this rank's
    thread; sparse ones are at the density that all compressed parameters have together, with the selection of the
    largest. Called on all ranks, alike, after the plans' ``plan_after``. Raises ``ValueError`` for ``most_bytes``
    below 1.
    """
    dense = measured_group_cost(comm, most_bytes=most_bytes)
    busy = group_cost_while_computing(comm, most_bytes=most_bytes)
    ways = []
    for name in compression.ways:
        if name == "dense":
            ways.append(SendMethod(name, dense, busy=busy))
            continue
        probe = _probe_of(compression, comm, name)
        alone = measured_way(comm, name, probe, most_bytes=most_bytes, beside=dense)
        of_busy = way_cost_while_computing(comm, probe, most_bytes=most_bytes)
        ways.append(replace(alone, busy=of_busy, busy_beside=busy))
    return ways


def _probe_of(compression: Compression, comm: Communicator, way: str) -> Callable[[int], _Prepare]:
    largest = max(compression.compressor.residuals, key=lambda one: one.values.size)
    selection = compression.compressor.policy_of(largest)
    given = compression.compressor.momentum

    def of_length(elements: int) -> _Prepare:
        momentum: Velocities | None = None if given is None else given.anew({_NAME: elements})
        compressor = Compressor(
            {_NAME: elements}, density=compression.density, selections={_NAME: selection}, momentum=momentum
        )
        exchange = Exchange(comm, compressor, compression.values, compression.encoding, compression.combine, DDPStats())
        layout = layout_of_members([ParameterSpan(_NAME, 0, elements)], elements, compressor)
        drawn = np.random.default_rng(comm.rank).standard_normal(elements + _GRADIENTS, np.float32)  # ranks' differ
        bits = np.empty(elements, np.float32)
        calls = 0

        def prepare() -> Callable[[], Begun]:
            # Another gradient in each call: one that repeats itself makes thresholds useless that are kept from call
            # to call.
            nonlocal calls
            bits[:] = drawn[calls % _GRADIENTS :][:elements]
            calls += 1
            return start

        def start() -> Begun:
            if way == "sparse":
                sending = exchange.send(layout, bits, sound=True)
            else:
                sending = exchange.send_quantised(layout, bits, way)

            def conclude() -> None:
                sending.keep()
                sending.write()

            return Begun(sending.works, conclude)

        for _ in range(_SETTLING):
            prepare()
            compressor.compress(layout.parts, bits, *layout.scratch())
        return prepare

    return of_length
