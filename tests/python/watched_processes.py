"""Members of a group in processes, which a test kills, freezes and starts while the others go on."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

PATIENCE_S = 100.0
# Whoever is killed is noticed at once. Only a test that freezes a process says how long one may be silent: on a busy
# machine any is silent for seconds.
PATIENT_S, LIVENESS_S = 60.0, float(os.environ.get("LIVENESS_S", "3"))
# Optimizers import torch._dynamo when they step. Python 3.11 finds these modules, as it does not find tests.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["telegrad.synchronizer.elastic", "telegrad.diloco", "torch._dynamo", "pytest"])


@contextmanager
def telling(output: str, **always: Any) -> Iterator[Callable[..., None]]:
    """In a process: ``say(key=value)`` writes a line for Job.said(). The last one says with which error it ends."""
    with open(output, "a") as file, open(f"{output}.stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)

        def say(**what: Any) -> None:
            file.write(json.dumps({**always, **what}) + "\n")
            file.flush()

        try:
            yield say
        except BaseException as error:
            say(error=f"{type(error).__name__}: {error}")
            raise


class Job:
    """Processes, their store, and what they have said. Each runs ``main(port, size, number, kind, output, *more)``, and
    writes a line for each ``unit`` (a step or a round) that it has ended."""

    unit: str

    def __init__(
        self, folder: Path, size: int, kind: str, main: Callable[..., None], *more: Any, port: int = 0
    ) -> None:
        self.folder, self.size, self.kind = folder, size, kind
        self._main, self._more = main, more
        self.store = TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
        self.processes: dict[int, BaseProcess] = {}

    def start(self, count: int = 1) -> int:
        """The number of the last one."""
        for number in range(len(self.processes), len(self.processes) + count):
            arguments = (self.store.port, self.size, number, self.kind, str(self._path(number)), *self._more)
            self.processes[number] = context.Process(target=self._main, args=arguments, daemon=True)
            self.processes[number].start()
        return number

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.jsonl"

    def send(self, number: int, what: signal.Signals) -> None:
        process = self.processes[number].pid
        assert process is not None
        os.kill(process, what)

    def said(self, number: int) -> list[dict[str, Any]]:
        path = self._path(number)
        text = path.read_text() if path.exists() else ""
        ended = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]  # the last may be half there
        return [json.loads(line) for line in ended]

    def all_said(self, key: str) -> list[dict[str, Any]]:
        return [one for number in self.processes for one in self.said(number) if key in one]

    def warnings_of(self, number: int) -> str:
        return "\n".join(one["warned"] for one in self.said(number) if "warned" in one)

    def units(self, number: int) -> list[int]:
        return [one[self.unit] for one in self.said(number) if self.unit in one]

    def wait_for(self, happens: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happens():
            assert time.monotonic() < deadline_s, self._where()
            time.sleep(0.02)

    def _where(self) -> str:
        """Last words and exit statuses of all processes, and stacks of the living ones."""
        for number, one in self.processes.items():
            if one.is_alive():
                self.send(number, signal.SIGUSR1)
        time.sleep(1.0)
        ends = [
            f"{number}: exit status {one.exitcode}: {self.said(number)[-2:]}" for number, one in self.processes.items()
        ]
        stacks = [Path(f"{self._path(number)}.stacks") for number in self.processes]
        return "\n".join([*ends, *(f"{one.name}:\n{one.read_text()}" for one in stacks if one.exists())])

    def wait_for_units(self, number: int, more: int | None = None) -> None:
        goal = len(self.units(number)) + (more or self.several)
        self.wait_for(lambda: len(self.units(number)) >= goal)

    def alike(self, number: int, one: dict[str, Any]) -> dict[Any, Any]:
        """What all processes have alike, of a unit that one of them has ended, or of its end."""
        if "ended" in one:
            return {"end": (one["ended"], one.get("checksum"))}
        return {one[self.unit]: one["checksum"]} if self.unit in one and "checksum" in one else {}

    def finish(self, numbers: list[int]) -> None:
        """These end with one unit, and all who have ended one have the same bits."""
        self.store.set("last", str(max(self.units(numbers[0])) + 12))
        for number in numbers:
            self.processes[number].join(PATIENCE_S)
            assert self.processes[number].exitcode == 0, self.said(number)[-3:]
        bits: defaultdict[Any, set[Any]] = defaultdict(set)
        for number in self.processes:
            for one in self.said(number):
                if self.unit in one or number in numbers:
                    for key, value in self.alike(number, one).items():
                        bits[key].add(value)
        assert bits
        assert all(any("ended" in one for one in self.said(number)) for number in numbers)
        assert {key: found for key, found in bits.items() if len(found) > 1} == {}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
