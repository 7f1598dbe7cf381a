"""What is installed (telegrad's core with its UCX, torch, MPI, and what the extras need), and how any check is run.

A check cannot hang or break the others. What may crash or hang is tried in a Python process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

# Questions to a Python process of its own, which may crash, hang or print without harm.

# If the asking process is killed, the answering one goes too.
_PREAMBLE = "import ctypes, json; ctypes.CDLL(None).prctl(1, 9)\n"


class ProbeFailed(Exception):  # noqa: N818 - named by what happened
    """The process gave no answer; the message is the last that it said, or how it ended."""


def ask(program: str, *, timeout_s: float) -> dict[str, Any]:
    """Runs ``program`` (Python source; it finds ``json`` imported) and returns the JSON object in its last line.

    Raises ``ProbeFailed`` if it does not end well within ``timeout_s`` seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PREAMBLE + program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"it was not done within {timeout_s:g} s") from error
    if done.returncode < 0:
        raise ProbeFailed(f"the process was ended by {signal.Signals(-done.returncode).name}")
    lines = done.stderr.strip().splitlines()
    if done.returncode != 0:
        raise ProbeFailed(lines[-1] if lines else f"the process ended with status {done.returncode}")
    answers = done.stdout.strip().splitlines()
    try:
        answer = json.loads(answers[-1])
    except (IndexError, ValueError) as error:
        raise ProbeFailed(f"the process gave no answer but {done.stdout[-200:]!r}") from error
    if not isinstance(answer, dict):
        raise ProbeFailed(f"the process gave no object but {answers[-1][:200]!r}")
    return answer


# Findings, and checks that cannot hang or break each other.

Status = Literal["ok", "note", "missing", "failed", "error"]
"""``ok``; ``note``: works, with a limit worth knowing; ``missing``: something optional is not here; ``failed``: the
check itself broke or hung; ``error``: telegrad cannot be used."""

_LAST_WORDS_S = 5.0  # for an interrupted check to remove what it has made
_LONGEST_REASON = 300  # characters of an exception


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: what was looked at, how it is, and what to do about it (empty if nothing)."""

    check: str
    status: Status
    text: str
    mend: str = ""


class NotTried(Exception):  # noqa: N818 - no fault of the check's
    """Raised by a check whose first condition is not met; the message says which, and its own line what to do."""


@dataclass(frozen=True)
class Check:
    """A function that returns one finding or several. Without an ``essential`` one telegrad cannot be used.

    ``timeout_s``: seconds after which it is given up. ``mend``: what to do if it hangs or raises."""

    name: str
    run: Callable[[], Finding | Sequence[Finding]]
    timeout_s: float = 10.0
    essential: bool = False
    mend: str = ""


def run_checks(
    checks: Sequence[Check],
    *,
    on_begin: Callable[[str], None] = lambda _: None,
    on_finding: Callable[[Finding], None] = lambda _: None,
) -> list[Finding]:
    """Runs ``checks`` one after another; ``on_finding`` sees each finding as it comes.

    A check that raises, or is not done in time, gives a finding that says so; the others run all the same. Ctrl-C
    waits for a moment until the running check has cleaned up."""
    findings: list[Finding] = []
    for check in checks:
        on_begin(check.name)
        for finding in _run(check):
            findings.append(finding)
            on_finding(finding)
    return findings


def is_usable(findings: Sequence[Finding]) -> bool:
    """False if one of them says that telegrad cannot be used."""
    return all(finding.status != "error" for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """What ``telegrad doctor --json`` prints."""
    return {
        "kind": "telegrad doctor",
        "version": 1,
        "usable": is_usable(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def reason_of(error: BaseException) -> str:
    """An exception in one line: its kind, and what it says."""
    said = " ".join(str(error).split())
    if len(said) > _LONGEST_REASON:
        said = said[:_LONGEST_REASON] + " …"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _run(check: Check) -> Sequence[Finding]:
    found: list[Finding] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            said = check.run()
            found.extend([said] if isinstance(said, Finding) else said)
        except BaseException as error:  # SystemExit too: nothing that a check does may end the doctor
            raised.append(error)

    # A daemon: if it hangs, it must not keep the process from ending.
    thread = threading.Thread(target=work, name=f"check {check.name}", daemon=True)
    thread.start()
    try:
        thread.join(check.timeout_s)
    except KeyboardInterrupt:
        thread.join(_LAST_WORDS_S)
        raise
    status: Status = "error" if check.essential else "failed"
    if thread.is_alive():
        return [Finding(check.name, status, f"the check hangs: not done within {check.timeout_s:g} s", check.mend)]
    if raised and isinstance(raised[0], NotTried):
        return [Finding(check.name, "error" if check.essential else "note", f"not tried: {raised[0]}")]
    if raised:
        return [Finding(check.name, status, f"the check failed: {reason_of(raised[0])}", check.mend)]
    if not found:
        return [Finding(check.name, status, "the check failed: it said nothing", check.mend)]
    return found


# Which UCX it is, the kernel says: the file that the loader has mapped.
_CORE = """
import os, telegrad, numpy
from telegrad import _core
paths = sorted({line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "ucp.so" in line})
print(json.dumps({
    "folder": os.path.dirname(telegrad.__file__), "numpy": numpy.__version__, "libraries": paths,
    "ucx": _core.ucx_version() if hasattr(_core, "ucx_version") else None,
    "driver": hasattr(_core.Communicator, "ucx"),
}))"""
_TORCH = """
import torch
import torch.distributed as dist
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": gpus,
    "distributed": dist.is_available(), "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
}))"""
_FOR_CUDA = {"triton": "Triton", "cuda.bindings": "cuda-bindings"}
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import importlib
from telegrad.communicator.rendezvous.mpi import driver_module
driver = error = None
try:
    driver = importlib.import_module(driver_module(MPI)).library_version()
except ModuleNotFoundError:
    pass
except ImportError as failure:
    error = str(failure)
library = MPI.Get_library_version()
print(json.dumps({"mpi4py": mpi4py.__version__, "library": library, "driver": driver, "error": error}))"""
_PROBE_S = 8.0
TORCH_S = 45.0  # a cold file system takes its time
_REINSTALL = (
    "install it again: `pip install .` in the repository (bundles UCX), "
    "or `pip install . -C cmake.define.TELEGRAD_UCX=system` for the system's UCX"
)
_BUNDLED = "libtelegrad_ucp.so"
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cli": ("typer", "rich", "matplotlib"),
    "torch": ("torch",),
    "demo": ("torch", "typer", "rich", "matplotlib"),
}


def core() -> list[Finding]:
    """Does ``import telegrad`` work, and with whose UCX?"""
    try:
        facts = ask(_CORE, timeout_s=_PROBE_S)
    except ProbeFailed as error:
        missing = re.search(r"No module named '(\w+)", str(error))
        return [
            Finding(
                "core",
                "error",
                f"`import telegrad` fails: {error}",
                f"pip install {missing[1]}" if missing and missing[1] != "telegrad" else _REINSTALL,
            )
        ]
    version = version_of("telegrad") or "of an unknown version"
    loads = Finding("core", "ok", f"telegrad {version} loads, numpy {facts['numpy']} ({facts['folder']})")
    return [loads, _ucx(facts)]


def _ucx(facts: Mapping[str, Any]) -> Finding:
    if not facts["driver"] or not facts["ucx"]:
        return Finding("ucx", "error", "this telegrad was built without UCX and reaches no other process", _REINSTALL)
    ours, others = whose_ucx(facts["libraries"])
    set_here = sorted(name for name in os.environ if name.startswith("UCX_"))
    settings = f"; set in the environment: {', '.join(set_here)}" if set_here else ""
    if ours is not None:
        return Finding(
            "ucx", "ok", f"UCX {facts['ucx']}, bundled under private names (beside MPI's it is safe){settings}"
        )
    where = others[0] if others else "an unknown place"
    return Finding("ucx", "ok", f"UCX {facts['ucx']}, the system's: {where}{settings}")


def whose_ucx(libraries: list[str]) -> tuple[str | None, list[str]]:
    """The path of the bundled libucp among those that a process has loaded (None: it has none), and the others."""
    ours = [path for path in libraries if _BUNDLED in path]
    return (ours[0] if ours else None), [path for path in libraries if path not in ours]


def loaded_ucx() -> dict[str, Any]:
    """Version and library of the UCX that telegrad runs on. Raises ``ProbeFailed`` if telegrad does not load."""
    facts = ask(_CORE, timeout_s=_PROBE_S)
    ours, others = whose_ucx(facts["libraries"])
    return {"version": facts["ucx"], "bundled": ours is not None, "library": ours or (others[0] if others else None)}


def torch() -> Finding:
    """Version, build, and whether torch's distributed part and Gloo are in it; also its view of the GPU."""
    if not is_installed("torch"):
        return Finding(
            "torch",
            "missing",
            "not installed: no DDP hook and no torch tensors; numpy arrays work",
            "pip install 'telegrad[torch]'",
        )
    try:
        facts = ask(_TORCH, timeout_s=TORCH_S)
    except ProbeFailed as error:
        return Finding(
            "torch",
            "missing",
            f"torch {version_of('torch')} is installed but does not load: {error}",
            "install it again: pip install --force-reinstall torch",
        )
    build = f"for CUDA {facts['cuda']}" if facts["cuda"] else f"for ROCm {facts['hip']}" if facts["hip"] else "for CPU"
    parts = [name for name in ("distributed", "gloo", "nccl") if facts[name]]
    said = f"torch {facts['version']}, built {build}, with {', '.join(parts) or 'no distributed part'}"
    if not facts["distributed"]:
        return Finding("torch", "note", f"{said}: neither DDP nor torchrun", "install a build of torch that has it")
    if facts["gpus"]:
        said += f"; sees {len(facts['gpus'])} GPU ({facts['gpus'][0]})"
    return Finding("torch", "ok", said)


def gpu() -> Finding:
    """Is there one, and what its tensors need?"""
    found = gpus()
    if not found:
        return Finding("gpu", "note", "none found; telegrad works in host memory and needs none")
    said = f"{len(found)}: {found[0]}"
    if found[0].startswith("AMD"):
        return Finding("gpu", "note", f"{said}; operations take CUDA tensors, not ROCm's: copy gradients to the host")
    missing = [package for module, package in _FOR_CUDA.items() if not is_installed(module)]
    if missing:
        needs = f"{said}; operations take CUDA tensors, but {' and '.join(missing)} not found"
        return Finding("gpu", "missing", needs, "pip install 'telegrad[gpu]'")
    return Finding("gpu", "note", f"{said}; operations take CUDA tensors: docs/explanation/gpu.md")


def gpus() -> list[str]:
    """Each GPU's name and driver, from nvidia-smi; else what the kernel's device files tell."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ["an NVIDIA GPU whose nvidia-smi does not answer"]
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0 and lines:
            return lines
    nvidia = sorted(path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if nvidia:
        return [f"NVIDIA, {path}" for path in nvidia]
    return ["AMD, /dev/kfd"] if Path("/dev/kfd").exists() else []


def mpi() -> Finding:
    """mpi4py, which MPI it found, and whether telegrad's mpi driver is for that. telegrad needs none."""
    if not is_installed("mpi4py"):
        return Finding("mpi", "note", "no mpi4py: telegrad needs none (jobs start by torchrun)")
    try:
        facts = ask(_MPI, timeout_s=_PROBE_S)
    except ProbeFailed as error:
        return Finding(
            "mpi",
            "note",
            f"mpi4py {version_of('mpi4py')} is installed but finds no MPI ({error}); telegrad needs none",
            "pip install mpich, or load your cluster's MPI module, if you want to use it beside telegrad",
        )
    library = re.sub(r"\s+(Version:\s+)?", " ", re.split(r"[,\n\0]", facts["library"])[0])
    found = f"mpi4py {facts['mpi4py']} over {library}"
    if facts["driver"] == facts["library"]:
        return Finding("mpi", "ok", f"{found}; Communicator.from_mpi() works over it")
    if facts["driver"] is None and facts["error"] is None:
        return Finding("mpi", "ok", f"{found}; telegrad was built without the mpi driver: from_mpi(driver='ucx')")
    why = facts["error"] or f"it was built for {facts['driver'].splitlines()[0].strip()}"
    return Finding(
        "mpi",
        "note",
        f"{found}; telegrad's mpi driver is not for it ({why})",
        "from_mpi(driver='ucx'), or build telegrad from source with this MPI's mpicxx in PATH: docs/how-to/mpi.md",
    )


def extras() -> list[Finding]:
    """What of the optional extras is not installed."""
    said = []
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if not is_installed(package)]
        said.append(
            Finding(f"extra {extra}", "missing", f"{', '.join(missing)} not found", f"pip install 'telegrad[{extra}]'")
            if missing
            else Finding(f"extra {extra}", "ok", ", ".join(f"{name} {version_of(name)}" for name in packages))
        )
    return said


def is_installed(module: str) -> bool:
    """Can ``module`` be found? It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: half of an import is in sys.modules
        return False


def version_of(package: str) -> str | None:
    """The version of an installed package, None if there is no such."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
