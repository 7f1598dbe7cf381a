"""What telegrad assumes of CUDA's driver, or would like to know of it, and nothing documents: asked of this GPU.

    python benchmarks/gpu/probe.py --json FILE

A row for each question: what was asked, and what was found; of what telegrad stands on, whether it holds. Questions are
asked by groups, each in a process of its own and in the environment that it is about; a stream that waits is let go
after some seconds, and a process that hangs nevertheless, as a call may hold Python's lock, is ended. What is known by
then is in the file. Ends with status 1 unless all was asked and all that must hold does.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from limited import ROOT

sys.path.insert(0, str(ROOT))

from lab.common.growing_result import GrowingResult

_HELD_S = 4.0  # that a stream waits, at most
_FILLED_S = 2.5  # in which commands are put behind one that waits
_AHEAD_S = 0.1  # by which one call comes before another thread's
_COMMANDS = 6000
_WORD_BYTES = 64
_GROUP_S = 90.0
_KERNELS = 300


@dataclass(frozen=True)
class Group:
    """``questions``: a function of this module. ``connections``, ``loading``: ``CUDA_DEVICE_MAX_CONNECTIONS`` and
    ``CUDA_MODULE_LOADING`` there; ``None``: not set."""

    questions: str
    connections: str | None = "32"
    loading: str | None = None


GROUPS = (
    Group("visibility"),
    Group("standstills"),
    Group("queues"),
    Group("costs"),
    Group("depth"),
    Group("standstills", loading="EAGER"),
    Group("queues", connections="8"),
    Group("queues", connections=None),
)
"""What telegrad stands on first: there may be no time for all of them."""

_Row = dict[str, Any]


# What asks, in a process that knows nothing of the device


def ask_all(
    groups: Sequence[Group], path: Path, command: Callable[[Group], Sequence[str]], about: Mapping[str, Any]
) -> bool:
    """Whether all came to their end, and what must hold does. ``path`` has the rows as they come."""
    result = GrowingResult(path, {"machine": about})
    for group in groups:
        setting = {"connections": group.connections, "loading": group.loading}
        process = subprocess.Popen(command(group), env=_environment(group), stdout=subprocess.PIPE, text=True)
        late = threading.Timer(_GROUP_S, process.kill)
        late.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    row = {"group": group.questions, **setting, **json.loads(line)}
                    _say(row)
                    result.add(row)
            status = process.wait()
        finally:
            is_late = not late.is_alive()
            late.cancel()
            process.kill()
        if status:
            why = f"was ended after {_GROUP_S:.0f} s" if is_late else f"ended with status {status}"
            result.fail({"group": group.questions, **setting, "error": why})
            print(f"{group.questions}: {why}", flush=True)
    return not result.failures and all(row["holds"] is not False for row in result.rows)


def _environment(group: Group) -> dict[str, str]:
    made = dict(os.environ)
    for name, value in (
        ("CUDA_DEVICE_MAX_CONNECTIONS", group.connections),
        ("CUDA_MODULE_LOADING", group.loading),
    ):
        made.pop(name, None)
        if value is not None:
            made[name] = value
    return made


def _say(row: _Row) -> None:
    said = {True: "holds: ", False: "DOES NOT HOLD: ", None: ""}[row["holds"]]
    print(f"{row['question']}: {said}{row.get('found', row.get('failed'))}", flush=True)


# What is asked, in a process of its own


class Device:
    """This process's GPU, its driver, and words of pinned memory for which streams wait."""

    def __init__(self, torch: Any, driver: Any) -> None:
        self.torch, self.driver = torch, driver
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # makes the context
        self.page = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
        self.words = self.page.view(torch.int32)
        self.free = count(100)
        torch.cuda.synchronize()
        self.legacy, self.own, self.other = driver.CUstream(1), self.stream(), self.stream()

    def call(self, name: str, *given: Any) -> Any:
        """A function of the driver's; raises where that has failed."""
        error, *made = getattr(self.driver, name)(*given)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {error!r}")
        return made[0] if made else None

    def address(self, word: int) -> int:
        """The device's, of that word."""
        return int(self.call("cuMemHostGetDevicePointer", self.page.data_ptr() + _WORD_BYTES * word, 0))

    def stream(self, priority: int | None = None) -> Any:
        """One that does not wait for the default stream."""
        if priority is None:
            return self.call("cuStreamCreate", 1)
        return self.call("cuStreamCreateWithPriority", 1, priority)

    def event(self, stream: Any) -> Any:
        """One that has been recorded there."""
        made = self.call("cuEventCreate", 2)
        self.call("cuEventRecord", made, stream)
        return made

    def passed(self, event: Any) -> bool:
        return bool(self.driver.cuEventQuery(event)[0] == self.driver.CUresult.CUDA_SUCCESS)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """To the device."""
        self.call("cuMemcpyHtoDAsync", target, source, nbytes, stream)

    def copy_back(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """To the host."""
        self.call("cuMemcpyDtoHAsync", target, source, nbytes, stream)

    def in_thread(self, work: Callable[[], object]) -> threading.Thread:
        """A thread that has begun, and by now has this device's context."""
        has_context = threading.Event()

        def run() -> None:
            self.torch.cuda.set_device(0)
            self.torch.zeros(1, device="cuda")
            has_context.set()
            work()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        has_context.wait()
        return thread


class Held:
    """A stream that waits for a word inside, or for ``_HELD_S``. ``is_over``: it had to be let go."""

    def __init__(self, device: Device, stream: Any) -> None:
        self._device, self._stream, self._word = device, stream, next(device.free)
        self.is_over = False

    def __enter__(self) -> Held:
        device = self._device
        device.call("cuStreamWaitValue32", self._stream, device.address(self._word), 1, 0)
        self._timer = threading.Timer(_HELD_S, self._end)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._let_go()

    def _end(self) -> None:
        self.is_over = True
        self._let_go()

    def _let_go(self) -> None:
        self._device.words[_WORD_BYTES // 4 * self._word] = 1


def _ask(question: str, find: Callable[[], Any], wanted: Any = None) -> None:
    """Prints the row. ``wanted``: what telegrad stands on."""
    row: _Row = {"question": question, "holds": None if wanted is None else False}
    try:
        row["found"] = find()
        if wanted is not None:
            row["holds"] = row["found"] == wanted
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    print(json.dumps(row), flush=True)


def visibility(device: Device) -> None:
    """Whether what runs behind a wait sees what the host wrote during it: every operation of device tensors does."""
    torch = device.torch

    def copied(stream: Any, nbytes: int) -> bool:
        target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()
        with Held(device, stream):
            device.copy(target.data_ptr(), source.data_ptr(), nbytes, stream)
            time.sleep(0.02)  # in which the device may have read ahead
            source.fill_(7)
        device.call("cuStreamSynchronize", stream)
        return bool((target == 7).all())

    def stale_values() -> int:
        from telegrad.kernels.staging import DENSE
        from telegrad.kernels.staging.triton import scatter_set, write_sum

        elements = 1 << 16
        dense, out = torch.zeros(elements, pin_memory=True), torch.zeros(elements, device="cuda")
        places, ten = torch.arange(10, device="cuda"), torch.full((1,), 10, device="cuda")
        scatter_set(out, places, out, ten)  # so that it is on disk when "standstills" launches it
        form = torch.full((1,), DENSE, dtype=torch.int64, device="cuda")
        nothing = torch.zeros(0, dtype=torch.int32, pin_memory=True)
        entries = nothing.view(torch.uint32), nothing.view(torch.float32)
        write_sum(out, form, dense, *entries, 0.0)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(1, _KERNELS):
            torch.cuda.synchronize()
            with Held(device, device.legacy):
                write_sum(out, form, dense, *entries, 0.0)
                dense.fill_(float(number))
            wrong += (out != number).sum()
        return int(wrong)

    middle = device.page.data_ptr() + 5 * _WORD_BYTES
    _ask("the device has the host's address for the middle of pinned memory", lambda: device.address(5) == middle, True)
    for name, stream in (("the default stream", device.legacy), ("a stream that does not wait for it", device.own)):
        for nbytes in (4, 1000, 64 << 10, 1 << 20):
            what = f"a copy of {nbytes} bytes behind a wait, in {name}, has what the host wrote meanwhile"
            _ask(what, functools.partial(copied, stream, nbytes), True)
    _ask(f"old values that {_KERNELS} kernels behind waits read from pinned memory", stale_values, 0)


def standstills(device: Device) -> None:
    """Whether a call of the host's lasts until a stream goes on that waits for a peer: then that may hang."""
    torch = device.torch
    kept: list[Any] = []  # what is freed may wait as well

    def seconds(work: Callable[[], Any], stream: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        with Held(device, stream) as held:
            kept.append(work())
            took = time.perf_counter() - begin
            return {"stands_still": held.is_over, "seconds": took}

    def seconds_to_free(take: Callable[[], Any], free: str) -> dict[str, Any]:
        """Also of another thread's copy in another stream, which begins meanwhile."""
        memory, begun, beside = take(), threading.Event(), dict[str, Any]()

        def copy() -> None:
            begun.wait()
            time.sleep(_AHEAD_S)
            begin = time.perf_counter()
            device.copy(x.data_ptr(), device.page.data_ptr(), 64, device.other)
            beside.update(copy_stands_still=held.is_over, copy_seconds=time.perf_counter() - begin)

        copying = device.in_thread(copy)
        with Held(device, device.own) as held:
            begun.set()
            begin = time.perf_counter()
            device.call(free, memory)
            found = {"stands_still": held.is_over, "seconds": time.perf_counter() - begin}
            copying.join()
        return {**found, **beside}

    def pinned(nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def launch_triton() -> None:
        from telegrad.kernels.staging.triton import scatter_set

        scatter_set(x, places, x, held)

    x, places = torch.rand(1000, device="cuda"), torch.arange(10, device="cuda")
    held = torch.full((1,), 10, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(int(device.other))):
        for what, work, stream in (
            ("making a stream", device.stream, device.own),
            ("making an event", lambda: device.call("cuEventCreate", 2), device.own),
            ("taking 4 KiB of pinned memory", lambda: pinned(4 << 10), device.own),
            ("taking 64 MiB of pinned memory", lambda: pinned(64 << 20), device.own),
            ("taking 512 MiB of the GPU's", lambda: torch.empty(1 << 27, device="cuda"), device.own),
            ("first launching a kernel of torch's", lambda: torch.erfinv(x), device.own),
            ("first launching a kernel of torch's", lambda: torch.lgamma(x), device.legacy),
            ("first launching a kernel of Triton's", launch_triton, device.own),
        ):
            waiting = "the default stream" if stream is device.legacy else "a stream"
            _ask(f"{what} while {waiting} waits", functools.partial(seconds, work, stream))
        for what, take, free in (
            ("giving back 512 MiB of the GPU's", lambda: device.call("cuMemAlloc", 1 << 29), "cuMemFree"),
            ("giving back 4 KiB of pinned memory", lambda: device.call("cuMemHostAlloc", 1 << 12, 0), "cuMemFreeHost"),
            ("giving back 64 MiB of pinned memory", lambda: device.call("cuMemHostAlloc", 1 << 26, 0), "cuMemFreeHost"),
        ):
            asked = f"{what}, and a copy by another thread, while a stream waits"
            _ask(asked, functools.partial(seconds_to_free, take, free))
        # Last: it may hold Python's lock.
        _ask("torch.cuda.Stream() while a stream waits", functools.partial(seconds, torch.cuda.Stream, device.own))


def queues(device: Device) -> None:
    """Which streams stand still because another one waits, with which they share a queue of the hardware."""
    torch = device.torch
    small, page = torch.zeros(64, dtype=torch.uint8, device="cuda"), device.page.data_ptr()

    def copy(stream: Any) -> None:
        device.copy(small.data_ptr(), page, 64, stream)

    def behind(waiting: Any, others: Sequence[Any], *, copies: bool) -> list[int]:
        with Held(device, waiting) as held:
            if copies:
                copy(waiting)
            events = []
            for stream in others:
                if copies:
                    copy(stream)
                    device.copy_back(page + _WORD_BYTES, small.data_ptr(), 64, stream)
                events.append(device.event(stream))
            time.sleep(0.05)
            found = [number for number, event in enumerate(events) if not device.passed(event)]
            stood_still = held.is_over
        torch.cuda.synchronize()
        if stood_still:
            raise RuntimeError("the host stood still, too")
        return found

    def among(streams: Sequence[Any], *, copies: bool) -> dict[str, list[int]]:
        return {
            str(number): [at for at in behind(streams[number], streams, copies=copies) if at != number]
            for number in (0, 1, 5)
        }

    _, _, greatest = device.driver.cuCtxGetStreamPriorityRange()
    kinds = (None, 48), (greatest, 48), (greatest, 8)
    of_torch = [device.driver.CUstream(torch.cuda.Stream().cuda_stream) for _ in range(32)]
    plain, urgent, high = ([device.stream(priority) for _ in range(n)] for priority, n in kinds)
    for copies, suffix in ((False, ""), (True, ", with copies both ways")):
        for what, find in (
            ("of 48 streams those that stand still behind number 0, 1 and 5", functools.partial(among, plain)),
            (f"the same of priority {greatest}", functools.partial(among, urgent)),
            ("of 32 streams of torch's those behind one of ours", functools.partial(behind, device.own, of_torch)),
            (
                f"of 8 streams of priority {greatest} those behind one of another",
                functools.partial(behind, device.own, high),
            ),
        ):
            _ask(what + suffix, functools.partial(find, copies=copies))


def depth(device: Device) -> None:
    """How many commands fit behind a wait before the host stands still."""
    small = device.torch.zeros(64, dtype=device.torch.uint8, device="cuda")

    def fitting(put: Callable[[], Any]) -> dict[str, Any]:
        done: list[None] = []
        begun = threading.Event()

        def fill() -> None:
            begun.wait()
            for _ in range(_COMMANDS):
                put()
                done.append(None)

        filling = device.in_thread(fill)
        with Held(device, device.own):
            begun.set()
            filling.join(_FILLED_S)
            begin, fitted = time.perf_counter(), len(done)
            device.event(device.other)
            other_s = time.perf_counter() - begin
        filling.join()
        device.call("cuStreamSynchronize", device.own)
        return {"commands": fitted, "at_most": _COMMANDS, "event_of_another_stream_s": other_s}

    met, source = device.address(1), device.page.data_ptr()
    _ask("waits behind a wait", lambda: fitting(lambda: device.call("cuStreamWaitValue32", device.own, met, 0, 0)))
    _ask("copies behind a wait", lambda: fitting(lambda: device.copy(small.data_ptr(), source, 64, device.own)))


def costs(device: Device) -> None:
    """Seconds of the host for one call, of what an operation is made of."""
    small = device.torch.zeros(64, dtype=device.torch.uint8, device="cuda")
    made, own, calls = device.call("cuEventCreate", 2), device.own, 500

    def seconds(put: Callable[[], Any]) -> float:
        device.torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            put()
        return (time.perf_counter() - begin) / calls

    written, met, source = device.address(2), device.address(3), device.page.data_ptr()
    for what, put in (
        ("cuStreamWriteValue32", lambda: device.call("cuStreamWriteValue32", own, written, 1, 0)),
        ("cuStreamWaitValue32, of a word that is there", lambda: device.call("cuStreamWaitValue32", own, met, 0, 0)),
        ("cuMemcpyHtoDAsync of 64 bytes", lambda: device.copy(small.data_ptr(), source, 64, own)),
        ("cuEventRecord", lambda: device.call("cuEventRecord", made, own)),
    ):
        _ask(f"seconds of the host in {what}", functools.partial(seconds, put))


QUESTIONS: Mapping[str, Callable[[Device], None]] = {
    one.__name__: one for one in (visibility, standstills, queues, depth, costs)
}


def _command(group: Group) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--group", group.questions]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-probe.json"), help="where rows go")
    parser.add_argument("--group", choices=QUESTIONS, help="ask these here, and print the rows")
    asked = parser.parse_args(arguments)
    from telegrad.tools.bench.device import describe_gpu, gpu_name

    gpu = gpu_name()
    if gpu is None:
        print("no GPU: torch sees none here, and nothing was asked")
        return 1
    import torch
    from cuda.bindings import driver

    if asked.group is not None:
        QUESTIONS[asked.group](Device(torch, driver))
        return 0
    about = {**describe_gpu(gpu), "driver": driver.cuDriverGetVersion()[1]}
    return 0 if ask_all(GROUPS, asked.json, _command, about) else 1


if __name__ == "__main__":
    sys.exit(main())
