"""All that needs this machine's GPU, one part after the other: questions, tests, benchmarks. `make gpu` runs it.

    python benchmarks/gpu/run.py [--parts probe,tests,kernels,transfers,overlap,demo,select] [--budget 1440]
                                 [--out benchmarks/results] [--archive FILE.tgz]

A part that fails, hangs or has no time left takes no other along. What is known is in its file at once:
DATE-gpu-NAME.json and .png of a benchmark, DATE-gpu-NAME.log, and DATE-gpu-summary.json, which says of each part what
became of it, and of tests which passed, failed and were skipped. Ends with status 1 unless all parts passed, with 0
where torch sees no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import outcomes

ROOT = Path(__file__).resolve().parents[2]
_INTERRUPTED_S = 20.0  # from Ctrl-C to the end by force
_LEAST_S = 20.0  # with less no part is begun
_ATTEMPTS = 6  # of tests: each goes on behind the one that broke the process
_LAST_LINES = 15
_BYTES_OF_1_GI = 60 << 30  # a dozen arrays of 4 GiB, with torch's, and what kernels lay aside


@dataclass(frozen=True)
class Part:
    """``command(stem)``: of a benchmark, ``stem`` being its results' path without suffix; of tests what pytest gets.
    ``needs``: packages. ``communicates``: its processes wait for each other's, and need what docs/gpu.md says of that;
    others load the kernels that they use, which is less work."""

    limit_s: float
    command: Callable[[Path], list[str]]
    are_tests: bool = False
    needs: tuple[str, ...] = ("cuda.bindings",)
    communicates: bool = True


def _bench(name: str, *arguments: str) -> Callable[[Path], list[str]]:
    def command(stem: Path) -> list[str]:
        return [*_TELEGRAD, "bench", name, *arguments, "--json", f"{stem}.json", "--plot", f"{stem}.png"]

    return command


def _demo(stem: Path) -> list[str]:
    model = ["--width", "1024", "--layers", "8", "--context", "256", "--batch", "8", "--bucket-mb", "25"]
    how_long = ["--steps", "30", "--validations", "2", "--timeout", "100"]
    files = ["--json", f"{stem}.json", "--out", f"{stem}-plot"]
    return [*_TELEGRAD, "demo", "--device", "cuda", "--ranks", "4", *model, *how_long, *files]


def _select(stem: Path) -> list[str]:
    elements = "64Ki,1Mi,16Mi,64Mi" + (",1Gi" if _gpu_bytes() >= _BYTES_OF_1_GI else "")
    return _bench("select", "--device", "cuda", "--elements", elements, "--seconds", "4")(stem)


def _probe(stem: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("probe.py")), "--json", f"{stem}.json"]


def _gpu_tests(_: Path) -> list[str]:
    """What all others stand on comes first, and the longest job, of which nothing is known before its end, last."""
    names = sorted(path.name for path in (ROOT / _GPU_TESTS).glob("test_*.py"))
    names.sort(key=lambda name: (name != "test_gpu_transfers.py", name == "test_gpu_training.py"))
    return [*(f"{_GPU_TESTS}/{name}" for name in names), "--timeout=60", "--timeout-method=thread"]


def _gpu_bytes() -> int:
    """Of the memory of the GPU that torch would use."""
    import torch

    return torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0


_TELEGRAD = [sys.executable, "-m", "telegrad"]
_GPU_TESTS = "tests/python/gpu"
_KERNEL_TESTS = ["tests/python/ops", "tests/python/compress/test_selection_on_tensors.py"]
PARTS: Mapping[str, Part] = {
    "probe": Part(240, _probe),
    # A stream that waits for ever keeps its host in C code, from which no signal calls it: a thread ends the process.
    # The job of test_gpu_training.py alone may take 360 s.
    "tests": Part(480, _gpu_tests, are_tests=True),
    "kernels": Part(
        300,
        # Tests that need most of the GPU's memory are a group, which one worker runs.
        lambda _: [*_KERNEL_TESTS, "tests/python/cli/test_bench_select.py", "-n", "6", "--dist", "loadgroup"],
        are_tests=True,
        needs=("triton",),
        communicates=False,
    ),
    # 1, 2 and 4 ranks, each of which may take as long.
    "transfers": Part(340, _bench("transfers", "--seconds", "40", "--timeout", "110")),
    "overlap": Part(150, _bench("overlap", "--timeout", "70")),
    "demo": Part(320, _demo),
    "select": Part(200, _select, needs=("triton",), communicates=False),
}


@dataclass
class Outcome:
    """Of a part. ``status``: passed, failed, timed out or skipped; ``tests``: of a part that is tests."""

    status: str
    why: str = ""
    seconds: float = 0.0
    tests: dict[str, Any] = field(default_factory=dict)


class Run:
    """``parts`` by name, within ``budget_s`` seconds; files go to ``out``, and all of them into ``archive``, too.
    ``communicating``: the environment of parts that communicate."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        budget_s: float,
        out: Path,
        archive: Path | None,
        about: Any,
        communicating: Mapping[str, str],
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._parts, self._end = parts, time.monotonic() + budget_s
        self._out, self._archive, self._about = out, archive, about
        self._communicating = communicating
        self._date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._begun = time.time()

    def all(self) -> bool:
        """Whether all parts have passed."""
        for name, part in self._parts.items():
            begin = time.monotonic()
            print(f"\n== {name}", flush=True)
            self.outcomes[name] = outcome = self._one(name, part)
            outcome.seconds = round(time.monotonic() - begin, 1)
            print(f"{name}: {outcome.status} {outcome.why} ({outcome.seconds:.0f} s)", flush=True)
            self._keep()
        return all(outcome.status == "passed" for outcome in self.outcomes.values())

    def _one(self, name: str, part: Part) -> Outcome:
        missing = [package for package in part.needs if not _is_installed(package)]
        if missing:
            return Outcome("skipped", f"not installed: {', '.join(missing)}")
        limit_s = min(part.limit_s, self._end - time.monotonic() - _INTERRUPTED_S)
        if limit_s < _LEAST_S:
            return Outcome("skipped", "no time left")
        stem = self._out / f"{self._date}-gpu-{name}"
        log = stem.with_suffix(".log")
        log.unlink(missing_ok=True)
        environment = self._communicating if part.communicates else {}
        run = _tested if part.are_tests else _measured
        return run(part, stem, log, limit_s, environment)

    def _keep(self) -> None:
        summary = {"parts": {name: asdict(one) for name, one in self.outcomes.items()}, "machine": self._about}
        path = self._out / f"{self._date}-gpu-summary.json"
        path.write_text(json.dumps(summary, indent=1) + "\n")
        if self._archive is not None:
            partial = self._archive.with_name(self._archive.name + ".partial")
            with tarfile.open(partial, "w:gz") as file:
                for one in sorted(self._out.rglob(f"{self._date}-gpu-*")):
                    if one.is_file() and one.stat().st_mtime >= self._begun - 1:
                        file.add(one, one.relative_to(self._out))
            partial.replace(self._archive)

    def say(self) -> None:
        """What became of all parts, and the names of tests that did not pass."""
        print("\n== summary")
        for name, one in self.outcomes.items():
            tests = one.tests
            counts = ", ".join(f"{len(tests[kind])} {kind}" for kind in tests)
            print(f"{name:10} {one.status:9} {one.seconds:6.0f} s  {counts} {one.why}".rstrip())
            for kind in ("failed", "broken"):
                for test in tests.get(kind, ()):
                    print(f"           {kind}: {test}")
            for test, reason in tests.get("skipped", {}).items():
                print(f"           skipped: {test}: {reason}")


def _measured(part: Part, stem: Path, log: Path, limit_s: float, environment: Mapping[str, str]) -> Outcome:
    status = _ended(part.command(stem), log, limit_s, environment)
    for plot in stem.parent.glob(f"{stem.name}-plot/*.png"):  # of a command that takes a folder
        plot.replace(stem.with_suffix(".png"))
        plot.parent.rmdir()
    if status == 0:
        return Outcome("passed")
    print(_last_of(log), flush=True)
    return Outcome("timed out", f"after {limit_s:.0f} s") if status is None else Outcome("failed", f"status {status}")


def _tested(part: Part, stem: Path, log: Path, limit_s: float, environment: Mapping[str, str]) -> Outcome:
    """Tests behind one that breaks the process are run by another."""
    end = time.monotonic() + limit_s
    told = stem.with_name(stem.name + "-outcomes.jsonl")
    told.unlink(missing_ok=True)
    own = {"TRITON_INTERPRET": "0", outcomes.FILE: str(told), "PYTHONPATH": _with_path(Path(__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "outcomes", "-v", *part.command(stem)]
    found = outcomes.Outcomes()
    status: int | None = 0
    for _ in range(_ATTEMPTS):
        begun = len(found.seen)
        passed_over = [argument for test in found.seen for argument in ("--deselect", test)]
        status = _ended([*command, *passed_over], log, end - time.monotonic(), {**environment, **own})
        found = outcomes.read(told)
        if found.finished or status is None or len(found.seen) == begun:
            break
    tests = {name: getattr(found, name) for name in ("passed", "failed", "broken", "skipped")}
    told.unlink(missing_ok=True)
    if status is None:
        return Outcome("timed out", f"after {limit_s:.0f} s", tests=tests)
    if found.failed or found.broken or not found.finished:
        print(_last_of(log), flush=True)
        return Outcome("failed", "" if found.finished else f"pytest ended with status {status}", tests=tests)
    if not found.passed:
        return Outcome("failed", "no test was run", tests=tests)
    return Outcome("passed", tests=tests)


def _ended(command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> int | None:
    """The status of a command that writes into ``log``; ``None``: it had to be ended. Its children end with it."""
    if limit_s <= 0:
        return None
    with log.open("a") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it writes what it has, and ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_INTERRUPTED_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


def _with_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in this order")
    parser.add_argument("--budget", type=float, default=1440.0, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--archive", type=Path, help="all files once more, in one .tgz, after each part")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)} do not exist: use {', '.join(PARTS)}")
    from telegrad.bench.device import ENVIRONMENT, gpu_name
    from telegrad.bench.machine import describe_machine

    gpu = gpu_name()
    if gpu is None:
        print("no GPU: torch sees none here, nothing was run. 'make test' runs the kernels in Triton's interpreter.")
        return 0
    carried = Path(sys.prefix, "commit")  # of a tree without its repository; .ci/setup puts it there
    if carried.exists():
        os.environ.setdefault("TELEGRAD_COMMIT", carried.read_text().strip())
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {**describe_machine(), "gpu": gpu}
    parts = {name: PARTS[name] for name in asked.parts.split(",")}
    run = Run(parts, asked.budget, asked.out.resolve(), asked.archive, about, ENVIRONMENT)
    passed = run.all()
    run.say()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
