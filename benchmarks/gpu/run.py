"""All that needs this machine's GPU, one part after the other: questions, tests, benchmarks. `make gpu` runs it.

    python benchmarks/gpu/run.py [--brief] [--parts smoke,probe,tests,…] [--budget 1620] [--out benchmarks/results]
                                 [--archive FILE.tgz]

A part that fails, hangs or has no time left takes no other along, but for the first: where that fails, only what
does not communicate is run. ``--brief``: what a quarter of an hour on a lent machine has room for, and for a
second try of what failed. What is known is in its file at once:
DATE-gpu-NAME.json and .png of a benchmark, DATE-gpu-NAME.log, and DATE-gpu-summary.json, which says of each part what
became of it, and of tests which passed, failed and were skipped. Ends with status 1 unless all parts passed, with 0
where torch sees no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import outcomes
from limited import ROOT, last_of, run_limited

from telegrad.tools.bench.device import ENVIRONMENT

_INTERRUPTED_S = 20.0  # from Ctrl-C to the end by force
_LEAST_S = 20.0  # with less no part is begun
_ATTEMPTS = 6  # of tests: each goes on behind the one that broke the process
_LAST_LINES = 15
_BYTES_OF_1_GI = 60 << 30  # a dozen arrays of 4 GiB, with torch's, and what kernels lay aside


@dataclass(frozen=True)
class Part:
    """``command(stem)``: of a benchmark, ``stem`` being its results' path without suffix; of tests what pytest gets.
    ``needs``: packages. ``stands_on``: parts without which this one is not begun, if they are run. ``environment``:
    what docs/results/gpu.md says that it needs."""

    limit_s: float
    command: Callable[[Path], list[str]]
    are_tests: bool = False
    needs: tuple[str, ...] = ("cuda.bindings",)
    stands_on: tuple[str, ...] = ("smoke",)
    environment: Mapping[str, str] = field(default_factory=dict)


def _experiment(name: str, *arguments: str) -> Callable[[Path], list[str]]:
    def command(stem: Path) -> list[str]:
        return [*_LAB, name, *arguments, "--json", f"{stem}.json", "--plot", f"{stem}.png"]

    return command


def _demo(stem: Path) -> list[str]:
    model = ["--width", "1024", "--layers", "8", "--context", "256", "--batch", "8", "--bucket-mb", "25"]
    how_long = ["--steps", "30", "--validations", "2", "--timeout", "100"]
    files = ["--json", f"{stem}.json", "--out", f"{stem}-plot"]
    return [*_TELEGRAD, "demo", "--device", "cuda", "--ranks", "4", *model, *how_long, *files]


def _select(stem: Path) -> list[str]:
    elements = "64Ki,1Mi,16Mi,64Mi" + (",1Gi" if _gpu_bytes() >= _BYTES_OF_1_GI else "")
    return _experiment("select", "--device", "cuda", "--elements", elements, "--seconds", "4")(stem)


def _program(name: str) -> Callable[[Path], list[str]]:
    return lambda stem: [sys.executable, str(Path(__file__).with_name(name)), "--json", f"{stem}.json"]


def _gpu_tests(*names: str) -> Callable[[Path], list[str]]:
    """A stream that waits for ever keeps its host in C code, from which no signal calls it: a thread ends the process.
    What scenarios say is in the log at once."""
    places = [f"{_GPU_TESTS}/{name}" for name in names]
    return lambda _: [*places, "--timeout=60", "--timeout-method=thread", "--capture=no"]


def _gpu_bytes() -> int:
    """Of the memory of the GPU that torch would use."""
    import torch

    return torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0


_TELEGRAD, _LAB = [sys.executable, "-m", "telegrad"], [sys.executable, "-m", "lab"]
_GPU_TESTS = "tests/python/gpu"
# Those that run on the CPU alone, and those that compile what others run, are not among them.
_KERNEL_TESTS = [
    *(f"tests/python/kernels/test_{name}_triton.py" for name in ("encode", "feedback", "scatter", "select")),
    *("tests/python/kernels/test_staging_triton.py", "tests/python/kernels/test_select_queued.py"),
    *("tests/python/compress/test_selection_on_tensors.py", "tests/lab/test_lab_select.py"),
]
# Ranks in one process: one of them may load a kernel, for which the driver waits for the device, while the stream of
# another waits for it. Where ranks are processes that is only slow, and what users have.
_IN_ONE_PROCESS = {**ENVIRONMENT, "CUDA_MODULE_LOADING": "EAGER"}
_FIRST_TESTS = tuple(f"test_gpu_{name}.py" for name in ("transfers", "fast_path", "entries", "memory", "captures"))

_SMOKE = Part(180, _program("smoke.py"), needs=("cuda.bindings", "triton"), stands_on=(), environment=ENVIRONMENT)
_PROBE = Part(240, _program("probe.py"), stands_on=())
_TESTS = Part(180, _gpu_tests(*_FIRST_TESTS), are_tests=True, environment=_IN_ONE_PROCESS)
_BLOCKS = Part(90, _program("blocks.py"), needs=("triton",), stands_on=())
PARTS: Mapping[str, Part] = {
    "smoke": _SMOKE,
    "probe": _PROBE,
    "tests": _TESTS,
    # One job of the latter may take 360 s.
    "training": Part(
        480, _gpu_tests("test_gpu_nccl.py", "test_gpu_training.py"), are_tests=True, environment=ENVIRONMENT
    ),
    "kernels": Part(
        300,
        # Tests that need most of the GPU's memory are a group, which one worker runs.
        lambda _: [*_KERNEL_TESTS, "-n", "6", "--dist", "loadgroup"],
        are_tests=True,
        needs=("triton",),
        stands_on=(),
    ),
    # 1, 2 and 4 ranks, each of which may take as long.
    "transfers": Part(340, _experiment("transfers", "--seconds", "40", "--timeout", "110"), environment=ENVIRONMENT),
    "overlap": Part(150, _experiment("overlap", "--timeout", "70"), environment=ENVIRONMENT),
    "demo": Part(320, _demo, environment=ENVIRONMENT),
    "hook": Part(170, _program("hook.py"), needs=("cuda.bindings", "triton"), environment=ENVIRONMENT),
    "select": Part(200, _select, needs=("triton",), stands_on=()),
    "blocks": _BLOCKS,
}
_BRIEF_SELECT = (
    *("--device", "cuda", "--elements", "64Mi,256Mi", "--density", "0.01", "--seconds", "2"),
    *("--methods", "reused-threshold,exact,exact-queued,reused-threshold-queued"),
)
_BRIEF_TRANSFERS = ("--ranks", "1,2", "--sizes", "4B,64KiB,4MiB,64MiB", "--seconds", "8", "--timeout", "25")
_BRIEF_OVERLAP = ("--ranks", "2", "--sizes", "64MiB", "--timeout", "30")
BRIEF: Mapping[str, Part] = {
    "smoke": replace(_SMOKE, limit_s=80),
    "probe": replace(_PROBE, limit_s=90),
    "tests": replace(_TESTS, limit_s=65),
    "training": Part(80, _gpu_tests("test_gpu_training.py"), are_tests=True, environment=ENVIRONMENT),
    "select": Part(35, _experiment("select", *_BRIEF_SELECT), needs=("triton",), stands_on=()),
    "transfers": Part(50, _experiment("transfers", *_BRIEF_TRANSFERS), environment=ENVIRONMENT),
    "overlap": Part(35, _experiment("overlap", *_BRIEF_OVERLAP), environment=ENVIRONMENT),
    "blocks": replace(_BLOCKS, limit_s=25),
}
"""What is most worth knowing first. Of what does not come to its end the rows that are there are kept."""

_BUDGET_S, _BRIEF_BUDGET_S = 1620.0, 480.0


@dataclass
class Outcome:
    """Of a part. ``status``: passed, failed, timed out or skipped; ``tests``: of a part that is tests."""

    status: str
    why: str = ""
    seconds: float = 0.0
    tests: dict[str, Any] = field(default_factory=dict)


class Run:
    """``parts`` by name, within ``budget_s`` seconds; files go to ``out``, and all of them into ``archive``, too."""

    def __init__(self, parts: Mapping[str, Part], budget_s: float, out: Path, archive: Path | None, about: Any) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._parts, self._end = parts, time.monotonic() + budget_s
        self._out, self._archive, self._about = out, archive, about
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
        known = {one: self.outcomes[one].status for one in part.stands_on if one in self.outcomes}
        wanting = [one for one, status in known.items() if status not in ("passed", "skipped")]
        if wanting:
            return Outcome("skipped", f"{', '.join(wanting)} did not pass")
        limit_s = min(part.limit_s, self._end - time.monotonic() - _INTERRUPTED_S)
        if limit_s < _LEAST_S:
            return Outcome("skipped", "no time left")
        stem = self._out / f"{self._date}-gpu-{name}"
        log = stem.with_suffix(".log")
        log.unlink(missing_ok=True)
        return (_tested if part.are_tests else _measured)(part, stem, log, limit_s)

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


def _measured(part: Part, stem: Path, log: Path, limit_s: float) -> Outcome:
    status = run_limited(part.command(stem), log, limit_s, part.environment, interrupted_s=_INTERRUPTED_S)
    for plot in stem.parent.glob(f"{stem.name}-plot/*.png"):  # of a command that takes a folder
        plot.replace(stem.with_suffix(".png"))
        plot.parent.rmdir()
    if status == 0:
        return Outcome("passed")
    print(last_of(log, _LAST_LINES), flush=True)
    return Outcome("timed out", f"after {limit_s:.0f} s") if status is None else Outcome("failed", f"status {status}")


def _tested(part: Part, stem: Path, log: Path, limit_s: float) -> Outcome:
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
        left_s, environment = end - time.monotonic(), {**part.environment, **own}
        status = run_limited([*command, *passed_over], log, left_s, environment, interrupted_s=_INTERRUPTED_S)
        found = outcomes.read(told)
        if found.finished or status is None or len(found.seen) == begun:
            break
    tests = {name: getattr(found, name) for name in ("passed", "failed", "broken", "skipped")}
    told.unlink(missing_ok=True)
    if status is None:
        return Outcome("timed out", f"after {limit_s:.0f} s", tests=tests)
    if found.failed or found.broken or not found.finished:
        print(last_of(log, _LAST_LINES), flush=True)
        return Outcome("failed", "" if found.finished else f"pytest ended with status {status}", tests=tests)
    if not found.passed:
        return Outcome("failed", "no test was run", tests=tests)
    return Outcome("passed", tests=tests)


def _with_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="fewer parts, and shorter: on a machine lent for minutes")
    parser.add_argument("--parts", help=f"which, in this order: {','.join(PARTS)}")
    parser.add_argument(
        "--budget", type=float, help=f"seconds for all of them ({_BUDGET_S:.0f}, {_BRIEF_BUDGET_S:.0f})"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--archive", type=Path, help="all files once more, in one .tgz, after each part")
    asked = parser.parse_args(arguments)
    there = BRIEF if asked.brief else PARTS
    names = list(there) if asked.parts is None else asked.parts.split(",")
    unknown = [name for name in names if name not in there]
    if unknown:
        parser.error(f"--parts: {', '.join(unknown)} do not exist: use {', '.join(there)}")
    from telegrad.tools.bench.device import describe_gpu, gpu_name

    gpu = gpu_name()
    if gpu is None:
        print("no GPU: torch sees none here, nothing was run. 'make test' runs the kernels in Triton's interpreter.")
        return 0
    carried = Path(sys.prefix, "commit")  # of a tree without its repository; .ci/setup puts it there
    if carried.exists():
        os.environ.setdefault("TELEGRAD_COMMIT", carried.read_text().strip())
    asked.out.mkdir(parents=True, exist_ok=True)
    parts = {name: there[name] for name in names}
    budget_s = asked.budget or (_BRIEF_BUDGET_S if asked.brief else _BUDGET_S)
    run = Run(parts, budget_s, asked.out.resolve(), asked.archive, describe_gpu(gpu))
    passed = run.all()
    run.say()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
