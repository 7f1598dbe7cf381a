"""What the host spends on putting an operation on device tensors into its stream, without the device's own calls.

The device's runtime does nothing, and tensors are torch's of "meta", which have no memory. A call is timed on one rank
while others are under way. Nothing is communicated meanwhile: between calls the oldest one's gate is opened.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console

from lab.common.commands import counts_of
from telegrad import Communicator
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.runtime import DeviceRuntime, register_runtime
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.cli.options import RowsFile
from telegrad.tools.cli.outputs import check_writable, write_result

UNDER_WAY = 20
"""Operations behind which a call is timed: the oldest ends before it, so that its memory is used again."""

CHUNK_BYTES = 1024
"""Short, as what is communicated afterwards is not what is measured."""


class IdleRuntime:
    """See telegrad.communicator.cuda.runtime.DeviceRuntime: without what an allreduce does not call."""

    def __init__(self) -> None:
        self._number = 0
        self._ended = -1
        self._gates: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._results: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def next(self, under_way: int) -> None:
        """What is called from now on is another operation; the one ``under_way`` before it ends."""
        self._number += 1
        ending = self._number - under_way - 1
        if ending <= self._ended:
            return
        for address, value in self._gates.pop(ending, ()):
            ctypes.c_uint32.from_address(address).value = value
        for address, value in self._results.pop(ending, ()):
            while ctypes.c_uint32.from_address(address).value != value:
                time.sleep(0)
        self._ended = ending

    def current_stream(self, device: Any) -> int:
        return 0

    def new_stream(self, device: Any) -> int:
        return 1

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def enter(self, device: Any) -> None:
        pass

    def leave(self) -> None:
        pass

    def copy_to_host(self, stream: int, address: int, x: Any, first: int, nbytes: int) -> None:
        pass

    def copy_to_device(self, stream: int, x: Any, first: int, address: int, nbytes: int) -> None:
        pass

    def copy(self, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def launch(self, stream: int, kernels: Callable[..., None], *tensors: Any) -> None:
        pass

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._gates[self._number].append((address, value))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._results[self._number].append((address, value))

    def record(self, stream: int) -> int:
        return self._number

    def record_timed(self, stream: int) -> int:
        return self._number

    def wait_event(self, stream: int, event: int) -> None:
        pass

    def passed(self, event: int) -> bool:
        return event <= self._ended

    def wait_on_host(self, event: int) -> None:
        pass

    def fast_path(self, device: Any) -> None:
        return None

    def lend(self, way: Any, lease: Any, event: Any) -> int:
        raise AssertionError("there is no fast path")

    def lend_streams(self, way: Any, inputs: Any, results: Any) -> None:
        raise AssertionError("there is no fast path")

    def keep(self, tensor: Any, stream: int) -> None:
        pass

    def on(self, stream: int) -> Any:
        return nullcontext()


def times_us(runtime: IdleRuntime, call: Callable[[], Any], calls: int) -> list[float]:
    """Of every call."""
    taken: list[float] = []
    for at in range(calls + 3 * UNDER_WAY):
        runtime.next(UNDER_WAY)
        begun = time.perf_counter()
        call()
        ended = time.perf_counter()
        if at >= 3 * UNDER_WAY:  # in the first ones memory is allocated
            taken.append(1e6 * (ended - begun))
    for _ in range(UNDER_WAY + 1):
        runtime.next(UNDER_WAY)
    return taken


def measure(chunks: Sequence[int], calls: int) -> list[dict[str, Any]]:
    """A row for each form and number of chunks."""
    transfers.CHUNK_BYTES = CHUNK_BYTES
    runtime = IdleRuntime()
    register_runtime("meta", lambda: cast(DeviceRuntime, runtime))
    (comm,) = Communicator.local(1)
    rows = []
    for count in chunks:
        x = torch.empty(count * CHUNK_BYTES // 4, device="meta")
        works: list[Any] = []

        def begun(x: torch.Tensor = x, works: list[Any] = works) -> None:
            works[:] = [comm.all_reduce(x, async_op=True)]

        def begun_and_waited(x: torch.Tensor = x) -> None:
            comm.all_reduce(x, async_op=True).wait()

        forms = {
            "all_reduce(x)": lambda x=x: comm.all_reduce(x),
            "all_reduce(x, async_op=True)": begun,
            "all_reduce(x, async_op=True).wait()": begun_and_waited,
        }
        for form, call in forms.items():
            taken = times_us(runtime, call, calls)
            p99 = statistics.quantiles(taken, n=100)[98]
            rows.append(
                {
                    "form": form,
                    "chunks": count,
                    "median_us": statistics.median(taken),
                    "mean_us": statistics.fmean(taken),
                    "p99_us": p99,
                }
            )
    comm.close()
    return rows


def command(
    chunks: Annotated[str, typer.Option(help="Chunks of a tensor, of 1 KiB each; several: 1,4,16.")] = "1,4,16",
    calls: Annotated[int, typer.Option(min=2, help="Of each form and number of chunks.")] = 4000,
    json_file: RowsFile = None,
) -> None:
    """Time what the host does for an allreduce of a device tensor, on one rank, while others are under way."""
    console = Console()
    numbers = counts_of(chunks, 1, 1 << 16, "--chunks")
    check_writable(json_file, "--json")
    rows = measure(numbers, calls)
    for row in rows:
        times = "".join(
            f"  {name.removesuffix('_us')} {row[name]:6.1f} us" for name in ("median_us", "mean_us", "p99_us")
        )
        console.print(f"{row['form']:38}{row['chunks']:4} chunks{times}", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": describe_machine()})
