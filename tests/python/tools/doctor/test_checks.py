"""The checks themselves, on this machine and on machines that lack something."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from telegrad import _core
from telegrad._interfaces import Interface, interfaces
from telegrad.tools.cli.doctor import CHECKS
from telegrad.tools.doctor import host, installation, transports
from telegrad.tools.doctor.installation import Finding, NotTried, ProbeFailed
from telegrad.tools.doctor.transports import Meeting

_LO = Interface("lo", up=True, loopback=True, addresses=("127.0.0.1",), virtual=True)
_ETH = Interface("eth0", up=True, loopback=False, addresses=("10.0.0.7", "fe80::1"), mbit_per_s=1000)


def _answer(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | str) -> None:
    """The process that is asked answers so; a text is the reason why it does not."""

    def ask(program: str, *, timeout_s: float) -> dict[str, Any]:
        if isinstance(answer, str):
            raise ProbeFailed(answer)
        return answer

    monkeypatch.setattr(installation, "ask", ask)


def _only(found: Finding | list[Finding]) -> Finding:
    if isinstance(found, Finding):
        return found
    assert len(found) == 1, found
    return found[0]


def _all(found: Finding | list[Finding]) -> list[Finding]:
    return [found] if isinstance(found, Finding) else found


def test_the_list_has_all_that_was_asked_for() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {check.name for check in CHECKS if check.essential} == {"core", "ranks"}
    assert {"shared memory", "tcp", "rdma", "torch", "gpu", "mpi", "interfaces", "host name", "laboratory"} <= {*names}


def test_the_core_of_this_installation_loads_with_its_ucx() -> None:
    core, ucx = installation.core()
    assert core.status == ucx.status == "ok"
    assert "telegrad" in core.text
    assert "UCX 1." in ucx.text


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("ModuleNotFoundError: No module named 'numpy'", "pip install numpy"),
        ("ImportError: libucp.so.0: cannot open shared object file", "`pip install .`"),
        ("the process was ended by SIGILL", "`pip install .`"),
    ],
)
def test_a_core_that_does_not_load_is_an_error(monkeypatch: pytest.MonkeyPatch, reason: str, mend: str) -> None:
    _answer(monkeypatch, reason)
    finding = _only(installation.core())
    assert finding.status == "error"
    assert reason in finding.text
    assert mend in finding.mend


_CORE = {"folder": "/t", "numpy": "2", "ucx": "1.18.0", "driver": True, "libraries": ["/usr/lib/libucp.so.0"]}


def test_whose_ucx_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, _CORE)
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "the system's: /usr/lib/libucp.so.0; set in the environment: UCX_TLS" in installation.core()[1].text
    _answer(monkeypatch, {**_CORE, "libraries": ["/opt/mpi/libucp.so.0", "/t/_ucx/lib/libtelegrad_ucp.so.0"]})
    assert "bundled under private names" in installation.core()[1].text
    _answer(monkeypatch, {**_CORE, "driver": False})
    assert installation.core()[1].status == "error"


def test_torch_absent_broken_and_without_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"version": "2.6", "cuda": "12.4", "hip": None, "gpus": ["H200"], "distributed": True, "gloo": True}
    monkeypatch.setattr(installation, "is_installed", lambda name: True)
    _answer(monkeypatch, {**facts, "nccl": False})
    finding = _only(installation.torch())
    assert (finding.status, finding.text) == (
        "ok",
        "torch 2.6, built for CUDA 12.4, with distributed, gloo; sees 1 GPU (H200)",
    )
    _answer(monkeypatch, {**facts, "distributed": False, "gloo": False, "nccl": False})
    assert _only(installation.torch()).status == "note"
    _answer(monkeypatch, "OSError: libcudart.so.12: cannot open")
    broken = _only(installation.torch())
    assert broken.status == "missing"
    assert "libcudart" in broken.text
    monkeypatch.setattr(installation, "is_installed", lambda name: name != "torch")
    assert _only(installation.torch()).mend == "pip install 'telegrad[torch]'"


def test_mpi_is_never_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "is_installed", lambda name: True)
    mpich = "MPICH Version:      5.0.2\nMPICH Release date: today\0"
    facts = {"mpi4py": "4.1", "library": mpich, "driver": None, "error": None}
    _answer(monkeypatch, facts)
    assert "mpi4py 4.1 over MPICH 5.0.2; telegrad was built without" in _only(installation.mpi()).text
    _answer(monkeypatch, {**facts, "driver": mpich})
    assert "from_mpi() works over it" in _only(installation.mpi()).text
    _answer(monkeypatch, {**facts, "library": "Open MPI v5.0.1, package: Open MPI", "driver": mpich})
    other = _only(installation.mpi())
    assert (other.status, "over Open MPI v5.0.1;" in other.text) == ("note", True)
    assert "it was built for MPICH" in other.text
    _answer(monkeypatch, {**facts, "error": "libmpi.so.12: cannot open shared object file"})
    assert "libmpi.so.12" in _only(installation.mpi()).text
    _answer(monkeypatch, "RuntimeError: cannot load MPI library")
    assert _only(installation.mpi()).status == "note"
    monkeypatch.setattr(installation, "is_installed", lambda name: False)
    assert _only(installation.mpi()).status == "note"


def test_missing_extras_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "is_installed", lambda name: name not in ("matplotlib", "torch"))
    found = {finding.check: finding for finding in installation.extras()}
    assert {finding.status for finding in found.values()} == {"missing"}
    assert (found["extra cli"].text, found["extra cli"].mend) == ("matplotlib not found", "pip install 'telegrad[cli]'")
    assert found["extra demo"].text == "torch, matplotlib not found"


@pytest.mark.parametrize(
    ("installed", "status", "text", "mend"),
    [
        ({"triton", "cuda.bindings"}, "note", "operations take CUDA tensors: docs/explanation/gpu.md", ""),
        ({"triton"}, "missing", "operations take CUDA tensors, but cuda-bindings not found", "telegrad[gpu]"),
        (set(), "missing", "but Triton and cuda-bindings not found", "telegrad[gpu]"),
    ],
)
def test_a_gpu_is_told_by_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: set[str], status: str, text: str, mend: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(installation, "is_installed", lambda name: name in installed)
    finding = _only(installation.gpu())
    assert finding.status == status
    assert finding.text.startswith("1: NVIDIA H200, 143771 MiB, 570.1; ")
    assert text in finding.text
    assert mend in finding.mend


def test_a_gpu_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "gpus", lambda: ["AMD, /dev/kfd"])
    finding = _only(installation.gpu())
    assert (finding.status, finding.mend) == ("note", "")
    assert "take CUDA tensors, not ROCm's: copy gradients to the host" in finding.text


def _meetings(monkeypatch: pytest.MonkeyPatch, outcome: Meeting | str) -> None:
    def meet(transports: str | None, interface: str = "") -> Meeting:
        if isinstance(outcome, str):
            raise ProbeFailed(outcome)
        return outcome

    monkeypatch.setattr(transports, "meet", meet)


@pytest.mark.parametrize("check", [transports.ranks, transports.shared_memory, transports.tcp])
def test_a_wrong_sum_is_an_error_on_any_way(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    _meetings(monkeypatch, Meeting(right=False, over_network=False))
    assert {finding.status for finding in _all(check())} == {"error"}


def test_ranks_that_do_not_come_together_are_an_error_and_a_lost_way_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    _meetings(monkeypatch, "Destination is unreachable")
    monkeypatch.setenv("UCX_TLS", "shm")
    finding = _only(transports.ranks())
    assert finding.status == "error"
    assert "unset UCX_TLS" in finding.mend
    assert "Destination is unreachable" in finding.text
    assert _only(transports.shared_memory()).status == "note"
    assert {finding.status for finding in transports.tcp()} == {"note"}


def test_the_remedy_is_that_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose error names it too: there it is told once."""
    with pytest.raises(ProbeFailed) as failed:
        transports.meet("self")
    remedy = _core.join_remedy("Destination is unreachable")
    assert f"file descriptors are open): {remedy}" in str(failed.value)
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    _meetings(monkeypatch, str(failed.value))
    for check in (transports.ranks, transports.shared_memory, transports.tcp):
        for finding in _all(check()):
            assert finding.mend == remedy
            assert "Destination is unreachable (set: UCX_TLS=self; interfaces tried: " in finding.text
            assert remedy not in finding.text
    _meetings(monkeypatch, "two ranks were not done within 20 s")
    assert "choose another interface by interface=" in transports.tcp()[0].mend


def test_shared_memory_that_ucx_does_not_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _meetings(monkeypatch, Meeting(right=True, over_network=True))
    finding = _only(transports.shared_memory())
    assert (finding.status, "by TCP" in finding.text) == ("note", True)


def test_two_real_ranks_meet_over_memory_and_over_tcp() -> None:
    assert transports.meet("shm,tcp,self") == Meeting(right=True, over_network=False)
    assert transports.meet("tcp,self", "lo") == Meeting(right=True, over_network=True)
    with pytest.raises(ProbeFailed, match="Destination is unreachable"):
        transports.meet("self")


def test_without_telegrad_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "telegrad.launch", None)
    with pytest.raises(NotTried, match="telegrad does not load"):
        transports.meet(None)


def test_which_interfaces_are_tried() -> None:
    down = Interface("eth1", up=False, loopback=False, addresses=("10.0.0.8",))
    lonely = Interface("eth2", up=True, loopback=False, addresses=("fe80::2", "169.254.0.1"))
    bridges = [Interface(f"br{n}", True, False, (f"172.17.{n}.1",), virtual=True) for n in range(6)]
    order = [one.name for one in transports.tcp_candidates([_LO, down, *bridges, lonely, _ETH])]
    assert order[:5] == ["eth0", "br0", "br1", "br2", "lo"]
    assert order[5:] == ["br3", "br4", "br5"]


def test_no_interface_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "interfaces", list)
    assert _only(transports.tcp()).status == "error"


def test_rdma_needs_a_device_and_a_ucx_that_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transports, "_RDMA", tmp_path)
    assert "no RDMA device" in _only(transports.rdma()).text
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(transports, "loaded_ucx", lambda: {"bundled": True})
    bundled = _only(transports.rdma())
    assert (bundled.status, "TELEGRAD_UCX=system" in bundled.mend) == ("note", True)
    monkeypatch.setattr(transports, "loaded_ucx", lambda: {"bundled": False})
    _meetings(monkeypatch, "no such device")
    assert "mlx5_0 found but does not carry data: no such device" in _only(transports.rdma()).text
    _meetings(monkeypatch, Meeting(right=True, over_network=False))
    assert _only(transports.rdma()).status == "ok"


def test_single_copy_is_tried_between_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _only(transports.single_copy()).status in ("ok", "note")
    monkeypatch.setattr(transports, "ask", lambda *_, **__: {"works": False, "reason": "Operation not permitted"})
    finding = _only(transports.single_copy())
    assert finding.status == "note"
    assert "Operation not permitted" in finding.text
    assert "SYS_PTRACE" in finding.mend


@pytest.mark.parametrize(
    ("enabled", "kernel", "environment", "torch", "status", "said"),
    [
        ("[always] madvise never", "5.4", {}, True, "ok", "all long arrays"),
        ("always [madvise] never", "6.1.0-rc1", {}, True, "ok", "again and again"),
        ("always [madvise] never", "6.12", {"TELEGRAD_HUGE_PAGES": "0"}, True, "note", "PyTorch does not"),
        ("always [madvise] never", "5.15.0-91", {}, True, "note", "THP_MEM_ALLOC_ENABLE=1"),
        ("always [madvise] never", "unknown", {"THP_MEM_ALLOC_ENABLE": "0"}, True, "note", "PyTorch does not"),
        ("always [madvise] never", "5.15", {"THP_MEM_ALLOC_ENABLE": "1"}, True, "ok", "numpy, telegrad"),
        ("always [madvise] never", "5.15", {}, False, "ok", "numpy, telegrad"),
        ("always madvise [never]", "6.12", {"THP_MEM_ALLOC_ENABLE": "1"}, True, "note", "echo madvise"),
        (None, "6.12", {}, True, "note", "this kernel has no others"),
    ],
)
def test_who_has_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    enabled: str | None,
    kernel: str,
    environment: dict[str, str],
    torch: bool,
    status: str,
    said: str,
) -> None:
    file = tmp_path / "enabled"
    if enabled is not None:
        file.write_text(enabled + "\n")
    monkeypatch.setattr(host, "_HUGE_PAGES", file)
    monkeypatch.setattr(host, "is_installed", lambda module: torch and module == "torch")
    monkeypatch.setattr(host.platform, "release", lambda: kernel)
    for name in ("THP_MEM_ALLOC_ENABLE", "TELEGRAD_HUGE_PAGES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    finding = _only(host.pages())
    assert finding.status == status
    assert said in finding.text + finding.mend


def test_a_single_core_and_a_quota_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    assert _only(host.cores()).status == "ok"
    monkeypatch.setattr(host, "cpu_quota", lambda: 1.5)
    assert _only(host.cores()).status == "note"


@pytest.mark.parametrize(("free_mib", "status"), [(4, "note"), (64, "note"), (4096, "ok")])
def test_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch, free_mib: int, status: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    room = os.statvfs_result((4096, 4096, free_mib * 256, free_mib * 256, free_mib * 256, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    finding = _only(host.shared_memory_size())
    assert finding.status == status
    assert ("--shm-size" in finding.mend) == (status == "note")


def test_limits_of_files_and_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    files, locked = host.limits()
    assert (files.status, files.mend) == ("note", "ulimit -n 4096 before the job (the hard limit is 4096)")
    assert locked.status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert {finding.text for finding in host.limits()} == {"unlimited"}


def test_a_name_that_does_not_resolve_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    name, master = host.host_name()
    assert (name.check, name.status, master.check, master.status) == ("host name", "note", "MASTER_ADDR", "note")
    assert "'node1' does not resolve" in name.text
    assert "/etc/hosts" in name.mend


@pytest.mark.parametrize(("address", "status"), [("127.0.1.1", "note"), ("10.0.0.7", "ok"), ("fe80::1%eth0", "ok")])
def test_a_name_that_only_this_machine_reaches(monkeypatch: pytest.MonkeyPatch, address: str, status: str) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0))])
    assert _only(host.host_name()).status == status


@pytest.mark.parametrize(("took_s", "status"), [(0.004, "ok"), (1.5, "note")])
def test_a_name_server_that_is_slow_over_addresses_is_noted(
    monkeypatch: pytest.MonkeyPatch, took_s: float, status: str
) -> None:
    now_s = [0.0]

    def ask(address: tuple[Any, ...], _: int) -> None:
        assert address[0] == "::ffff:127.0.0.1"
        now_s[0] += took_s
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getnameinfo", ask)
    monkeypatch.setattr(host.time, "monotonic", lambda: now_s[0])
    found = host.name_server()
    assert found.status == status
    if status == "note":
        assert "takes 1.5 s over an address: torch's store asks so for each process" in found.text
        assert "/etc/resolv.conf" in found.mend


def test_interfaces_are_those_of_the_system() -> None:
    present = {one.name: one for one in interfaces()}
    assert set(present) == {name for _, name in socket.if_nameindex()}
    assert present["lo"].loopback
    assert "127.0.0.1" in present["lo"].addresses


def test_loopback_alone_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "all_interfaces", lambda: [_LO])
    assert _only(host.network_interfaces()).status == "note"
    monkeypatch.setattr(host, "all_interfaces", lambda: [_LO, _ETH])
    assert "eth0 up (10.0.0.7, fe80::1, 1000 Mbit/s)" in _only(host.network_interfaces()).text


def test_the_laboratory_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    finding = _only(host.laboratory())
    assert (finding.status, finding.mend) == ("missing", "run the command as root (sudo)")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_laboratory_that_cannot_be_shaped_is_told_and_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "tc"
    tool.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    finding = _only(host.laboratory())
    assert finding.status == "missing"
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    assert f"tg{os.getpid()}x" not in left
