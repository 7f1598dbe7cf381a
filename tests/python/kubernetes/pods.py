"""Pods, imitated: each has namespaces of its own (network, mounts, processes, IPC, host name), a /dev/shm of 64 MB, and
the names of a headless service. Needs root, ``ip`` and ``unshare``.

The pod's network is one of those that clusters have:

- ``"bridge"``: a subnet for each node, a gateway between them, and a second interface (Multus);
- ``"single address"``: the pod has its address alone (/32), and a link-local gateway (Calico);
- ``"host network"``: the node's own interfaces, with addresses (/32) that every node has: of a service, of a local DNS.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORKS = ("bridge", "single address", "host network")
SHARED = {"kube-ipvs0": "10.96.0.10", "nodelocaldns": "169.254.20.10"}
_PREFIX = f"tg{os.getpid()}x900"  # as a laboratory's: what a killed process leaves is removed by the next one


def why_unavailable() -> str | None:
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found" if missing else None


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


class Pods:
    """``names``: what each pod is called. ``service``: the headless service by which pods know each other."""

    def __init__(self, names: Sequence[str], service: str, network: str) -> None:
        self.names, self.service, self.network = names, service, network
        self.hub = f"{_PREFIX}hub"
        self._hosts = ""

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address_of(self, pod: int) -> str:
        return f"10.244.0.{5 + pod}" if self.network == "host network" else f"10.244.{pod}.5"

    def run(
        self, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], timeout_s: float
    ) -> list[str]:
        """Runs a command in each pod at once; its environment has nothing else. Returns by pod what was printed."""
        started = [self._start(pod, *one) for pod, one in enumerate(zip(commands, environments, strict=True))]
        try:
            said = [process.communicate(timeout=timeout_s)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for pod, process in enumerate(started):
            assert process.returncode == 0, f"pod {pod} ended with {process.returncode}:\n" + "\n".join(said)
        return said

    def _start(self, pod: int, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        script = f"""
mount -t tmpfs -o size=64m tmpfs /dev/shm &&
mount --bind {shlex.quote(self._hosts)} /etc/hosts &&
hostname {self.names[pod]} &&
exec env -i {shlex.join(f"{name}={value}" for name, value in environment.items())} {shlex.join(command)}
"""
        spaces = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--mount", "--mount-proc"]
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{_PREFIX}n{pod}", *spaces, "bash", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _build(self) -> None:
        run("ip", "netns", "add", self.hub)
        self._in_hub("link", "set", "lo", "up")
        run("ip", "netns", "exec", self.hub, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for bridge in ("br0", "br1"):
            self._in_hub("link", "add", bridge, "type", "bridge")
            self._in_hub("link", "set", bridge, "up")
        for pod in range(len(self.names)):
            self._build_pod(pod)
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self.address_of(pod)} {name}.{self.service} {name}" for pod, name in enumerate(self.names)]
        with tempfile.NamedTemporaryFile("w", suffix="hosts", delete=False) as file:
            file.write("\n".join(lines) + "\n")
            self._hosts = file.name

    def _build_pod(self, pod: int) -> None:
        run("ip", "netns", "add", f"{_PREFIX}n{pod}")
        self._in_pod(pod, "link", "set", "lo", "up")
        if self.network == "host network":  # before the node's own, so that it is the first that is found
            for number, (device, address) in enumerate(SHARED.items()):
                self._in_pod(pod, "link", "add", device, "type", "veth", "peer", "name", f"other{number}")
                self._in_pod(pod, "address", "add", f"{address}/32", "dev", device)
                self._in_pod(pod, "link", "set", device, "up")
                self._in_pod(pod, "link", "set", f"other{number}", "up")
        self._link(pod, "eth0", f"p{pod}")
        address, gateway = self.address_of(pod), f"10.244.{pod}.1"
        if self.network == "bridge":
            self._in_hub("address", "add", f"{gateway}/24", "dev", f"p{pod}")
            self._in_pod(pod, "address", "add", f"{address}/24", "dev", "eth0")
            self._in_pod(pod, "route", "add", "default", "via", gateway)
            self._link(pod, "net1", f"q{pod}")
            self._in_hub("link", "set", f"q{pod}", "master", "br1")
            self._in_pod(pod, "address", "add", f"172.30.0.{5 + pod}/24", "dev", "net1")
        elif self.network == "single address":
            self._in_hub("address", "add", "169.254.1.1/32", "dev", f"p{pod}")
            self._in_hub("route", "add", address, "dev", f"p{pod}")
            self._in_pod(pod, "address", "add", f"{address}/32", "dev", "eth0")
            self._in_pod(pod, "route", "add", "169.254.1.1", "dev", "eth0", "scope", "link")
            self._in_pod(pod, "route", "add", "default", "via", "169.254.1.1", "dev", "eth0")
        else:
            self._in_hub("link", "set", f"p{pod}", "master", "br0")
            self._in_pod(pod, "address", "add", f"{address}/24", "dev", "eth0")

    def _link(self, pod: int, device: str, port: str) -> None:
        self._in_pod(pod, "link", "add", device, "type", "veth", "peer", "name", port, "netns", self.hub)
        self._in_hub("link", "set", port, "up")
        self._in_pod(pod, "link", "set", device, "up")

    def _in_hub(self, *arguments: str) -> None:
        run("ip", "-n", self.hub, *arguments)

    def _in_pod(self, pod: int, *arguments: str) -> None:
        run("ip", "-n", f"{_PREFIX}n{pod}", *arguments)

    def _remove(self) -> None:
        for name in [*(f"{_PREFIX}n{pod}" for pod in range(len(self.names))), self.hub]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        if self._hosts:
            Path(self._hosts).unlink(missing_ok=True)
