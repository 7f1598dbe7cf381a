"""Nodes of several ranks under the hook on a device whose streams compute, with Gloo inside of a node in the place of
NCCL: the host's bits, and states that the host takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime
from device_trainer import DeviceTrainer, Gradients, step_on_device
from handmade_buckets import ONE, REBUILT, SHAPES, Trainer, gradients_of, named, plain_sgd
from nccl_stand_in import node_groups, numbers_of
from triton_arrays import DEVICE

from telegrad import Communicator, LowRank

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

SIZES = (2, 2)
OnRanks = Callable[[Callable[[Communicator], Any]], list[Any]]


@pytest.fixture
def on_four() -> Iterator[OnRanks]:
    """Calls a function of each rank's communicator, of two nodes of two ranks, in threads."""
    made: list[Communicator] = []

    def run(function: Callable[[Communicator], Any]) -> list[Any]:
        comms = Communicator.local(4, nodes=numbers_of(SIZES), timeout_s=60.0)
        made.extend(comms)

        def aborting(comm: Communicator) -> Any:
            try:
                return function(comm)
            except BaseException as error:
                comm.abort(f"the test failed: {error!r}")
                raise

        with ThreadPoolExecutor(4) as pool:
            return [one.result(120) for one in [pool.submit(aborting, comm) for comm in comms]]

    yield run
    for comm in made:
        comm.close()


def on_host(steps: range, state: Any = None, **options: Any) -> Callable[[Communicator], Any]:
    """Averages by step, and the state."""

    def run(comm: Communicator) -> Any:
        trainer = Trainer(comm, node="auto", **options)
        if state is not None:
            trainer.state.load_state_dict(state[comm.rank])
        averages = [trainer.step(gradients_of(comm.rank, step), REBUILT if step else ONE) for step in steps]
        return averages, trainer.state.state_dict(), trainer.state.skipped

    return run


def on_device(
    device: ComputingRuntime, steps: range, gradients: Callable[[int, int], Gradients] = gradients_of, **options: Any
) -> Callable[[Communicator], Any]:
    """The same there."""
    group_of = node_groups(device, SIZES)

    def run(comm: Communicator) -> Any:
        with device.on(device.new_stream()) as stream:
            trainer = DeviceTrainer(device, comm, stream, node=group_of(comm.rank), **options)
            averages = [
                step_on_device([trainer], [gradients(comm.rank, step)], REBUILT if step else ONE)[0] for step in steps
            ]
            return averages, trainer.state.state_dict(), trainer.state.skipped

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"compress": None},
        {"select": "topk"},
        {"select": "reused", "momentum": 0.9, "optimizer": plain_sgd},
        {"select": "topk", "nonfinite": "skip"},
        {"select": "topk", "dtype": torch.bfloat16, "nonfinite": "send"},
        {"select": "search", "combine": "oktopk"},
    ],
    ids=named,
)
def test_the_hosts_bits(on_four: OnRanks, device: ComputingRuntime, options: dict[str, Any]) -> None:
    steps = range(5)  # from the third on kernels are replayed
    found, expected = on_four(on_device(device, steps, **options)), on_four(on_host(steps, **options))
    for (averages, state, _), (wanted, held, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(one[name], np.asarray(other[name], np.float32), err_msg=name)
        assert state["node"] == held["node"]
        for name, entry in held["compressor"]["parameters"].items():
            assert torch.equal(state["compressor"]["parameters"][name]["residual"], entry["residual"]), name
    if options.get("select") == "topk":
        assert any(one.replays for one in device.captures)


def test_low_rank_has_one_average_on_all_ranks(on_four: OnRanks, device: ComputingRuntime) -> None:
    options = {"compress": LowRank(rank=2, small_elements=16), "nonfinite": "send"}
    found, expected = on_four(on_device(device, range(3), **options)), on_four(on_host(range(3), **options))
    for averages, _, _ in found:
        for one, other, wanted in zip(averages, found[0][0], expected[0][0], strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(one[name], other[name])
                np.testing.assert_allclose(one[name], wanted[name], rtol=5e-2, atol=2.0)


def test_the_host_goes_on_from_a_state_of_the_device(on_four: OnRanks, device: ComputingRuntime) -> None:
    options = {"select": "topk"}
    saved = [state for _, state, _ in on_four(on_device(device, range(3), **options))]
    whole = on_four(on_host(range(5), **options))
    for (averages, _, _), (wanted, _, _) in zip(on_four(on_host(range(3, 5), saved, **options)), whole, strict=True):
        for one, other in zip(averages, wanted[3:], strict=True):
            for name in SHAPES:
                np.testing.assert_array_equal(one[name], other[name])


def test_all_ranks_drop_the_step_of_a_nan(on_four: OnRanks, device: ComputingRuntime) -> None:
    def given(rank: int, step: int) -> Gradients:
        gradients = gradients_of(rank, step)
        if (rank, step) == (3, 2):
            gradients["embedding"][5] = np.nan
        return gradients

    for averages, _, skipped in on_four(on_device(device, range(3), given, select="topk", nonfinite="skip")):
        assert skipped
        assert not any(one.any() for one in averages[2].values())
        assert any(one.any() for one in averages[1].values())
