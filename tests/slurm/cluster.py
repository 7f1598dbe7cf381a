"""A real Slurm cluster on one machine: a controller and nodes with network, host name and processes of their own.

Needs root, and slurmctld, slurmd and munged (Debian: apt-get install --no-install-recommends slurm-wlm munge). The
machine's own Slurm is not touched: configuration, key, sockets and logs are in a temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from telegrad.tools.bench import netlab
from telegrad.tools.bench.netlab import INTERFACE, Netlab, NetlabError

CONTROLLER = "controller"
CPUS = 8
"""Of each node, whatever this machine has: what the scripts of examples/slurm ask for."""

_START_MOST_S = 60.0
_COMMAND_MOST_S = 90.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
_SYSTEM_PATHS = ("/usr/local/sbin", "/usr/sbin", "/sbin")

_CONFIGURATION = """\
ClusterName=telegrad
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(RuntimeError):
    """A cluster cannot be built here, or a command of Slurm failed; the message says which and why."""


def path_of(slurm: Path | None) -> str:
    """PATH with the programs of a Slurm installed under ``slurm``, or with the system's own."""
    first = [] if slurm is None else [str(slurm / "bin"), str(slurm / "sbin")]
    return os.pathsep.join([*first, os.environ["PATH"], *_SYSTEM_PATHS])


def why_unavailable(slurm: Path | None = None) -> str | None:
    """Why no cluster can be built by this process, as far as one can tell without trying; None if it can."""
    reason = netlab.why_unavailable()
    if reason is not None:
        return reason
    missing = [name for name in (*_PROGRAMS, "nsenter", "unshare") if shutil.which(name, path=path_of(slurm)) is None]
    if missing:
        return (
            f"{', '.join(missing)} not found: install Slurm and Munge "
            "(Debian: apt-get install --no-install-recommends slurm-wlm munge)"
        )
    return None


class Machine:
    """A host of the cluster. Its processes end together, with the one that ``__init__`` starts."""

    def __init__(self, lab: Netlab, index: int, name: str, folder: Path) -> None:
        self.name = name
        self._lab, self._index = lab, index
        # bash reads until this process ends or kills it. Meanwhile it reaps orphans: linuxproc counts zombies as alive.
        setup = (
            f"hostname {name} && mount --bind {folder / 'hosts'} /etc/hosts && mount -t tmpfs tmpfs /dev/shm && "
            f"mount -t tmpfs -o mode=755 tmpfs {folder / 'munge'} && echo ready && while read -r; do :; done"
        )
        own = ("--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
        self._keeper = subprocess.Popen(
            [*lab.prefix_of(index), "unshare", *own, "bash", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"ready\n":
            self._keeper.kill()
            self._keeper.wait()
            raise SlurmError(
                f"{name}: no namespaces of its own: root, util-linux and the right to mount are needed "
                "(not in an unprivileged container)"
            )
        keeper = self._keeper.pid
        (first,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        self.first_process = int(first)

    def prefix(self) -> list[str]:
        """What to put before a command so that it runs on this machine."""
        return ["nsenter", f"--target={self.first_process}", "--net", "--uts", "--ipc", "--pid", "--mount"]

    def connect(self, connected: bool) -> None:
        """Plugs the network in, or out: what is sent to the machine then vanishes without an answer."""
        device = ["ip", "-n", self._lab.namespace_of(self._index), "link", "set", INTERFACE]
        subprocess.run([*device, "up" if connected else "down"], check=True)

    def kill(self) -> None:
        """Ends every process at once (SIGKILL). The kernel still answers: others see connections closed."""
        self._keeper.kill()
        self._keeper.wait()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            deadline = time.monotonic() + _START_MOST_S
            while Path(f"/proc/{self.first_process}/exe").exists() and time.monotonic() < deadline:
                time.sleep(0.02)


class Cluster:
    """A controller and ``nodes`` nodes, named ``node1``, ``node2``, …; a partition has them all.

    Use it in a ``with`` statement: daemons, namespaces and the temporary folder are removed on the way out, also by
    Ctrl-C and exceptions. ``slurmd_timeout_s``: a node that does not answer for so long is DOWN. ``slurm``: the prefix
    of another installation of Slurm. Raises ``SlurmError``.
    """

    def __init__(self, nodes: int = 2, *, slurmd_timeout_s: int = 30, slurm: Path | None = None) -> None:
        self.names = [f"node{number}" for number in range(1, nodes + 1)]
        self.folder = Path()
        self._slurmd_timeout_s = slurmd_timeout_s
        self._slurm = slurm
        self._lab = Netlab(nodes + 1, None)
        self._machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        reason = why_unavailable(self._slurm)
        if reason is not None:
            raise SlurmError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="telegrad-slurm-"))
        try:
            self.folder.chmod(0o755)  # munged asks for that of its socket's folders
            try:
                self._lab.create()
            except NetlabError as error:
                raise SlurmError(str(error)) from error
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes all that was started and written; a second call does nothing. A Ctrl-C meanwhile waits."""
        with netlab.uninterrupted():
            for machine in self._machines.values():
                machine.kill()
            self._machines.clear()
            self._lab.destroy()
            if self.folder.name:
                shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """For commands of Slurm, and for the jobs that they start."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH_"))}
        return {**inherited, "PATH": path_of(self._slurm), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, changes: Mapping[str, str] | None = None) -> str:
        """Runs a command on the controller's machine; returns what it prints. Raises ``SlurmError`` where it fails."""
        return self.run_on(CONTROLLER, *command, changes=changes)

    def run_on(self, machine: str, *command: str, changes: Mapping[str, str] | None = None) -> str:
        """As ``run``, on another machine."""
        done = subprocess.run(
            [*self._machines[machine].prefix(), *command],
            env={**self.environment(), **(changes or {})},
            capture_output=True,
            text=True,
            timeout=_COMMAND_MOST_S,
            check=False,
            start_new_session=True,  # a Ctrl-C is this process's affair
        )
        if done.returncode != 0:
            raise SlurmError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def version(self) -> str:
        return self.run("sinfo", "--version").removeprefix("slurm ")

    def state_of(self, node: str) -> str:
        """As sinfo says it, such as ``idle`` or ``down*``."""
        return self.run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%t")

    def lose(self, node: str, *, silently: bool = False) -> None:
        """Ends every process of a node; ``silently``: with the network first, as a machine without power."""
        if silently:
            self._machines[node].connect(False)
        self._machines.pop(node).kill()

    def bring_back(self, node: str) -> None:
        """Starts a node that was lost, as a machine that has booted."""
        self._start_machine(self.names.index(node) + 1, node)
        self._start_daemon(node, "slurmd", "-b")

    def wait_until_idle(self, names: Sequence[str], most_s: float = _START_MOST_S) -> None:
        """Raises ``SlurmError`` where a node is not idle within that time."""
        deadline = time.monotonic() + most_s
        while states := [f"{name} is {state}" for name in names if (state := self.state_of(name)) != "idle"]:
            if time.monotonic() > deadline:
                raise SlurmError(f"not idle within {most_s:.0f} s: {', '.join(states)}")
            time.sleep(0.5)

    def _start(self) -> None:
        (self.folder / "munge").mkdir()
        key = self.folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        addresses = {name: self._lab.address_of(index) for index, name in enumerate([CONTROLLER, *self.names])}
        lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")
        nodes = [f"NodeName={name} NodeAddr={addresses[name]} CPUs={CPUS} State=UNKNOWN" for name in self.names]
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                controller=CONTROLLER,
                address=addresses[CONTROLLER],
                folder=self.folder,
                slurmd_timeout_s=self._slurmd_timeout_s,
                nodes="\n".join(nodes),
            )
        )
        # No cgroups are used, but Slurm before 24.05 loads a plugin for them all the same.
        without_cgroups = "disabled" if self._version_of_slurmd() >= (24, 5) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={without_cgroups}\n")
        for index, name in enumerate(addresses):
            self._start_machine(index, name)
        self._start_daemon(CONTROLLER, "slurmctld")
        for name in self.names:
            self._start_daemon(name, "slurmd")
        self._wait_for_controller()
        self.wait_until_idle(self.names)

    def _version_of_slurmd(self) -> tuple[int, ...]:
        said = subprocess.run(
            ["slurmd", "-V"], env=self.environment(), capture_output=True, text=True, check=True
        ).stdout
        return tuple(int(number) for number in re.findall(r"\d+", said)[:2])

    def _start_machine(self, index: int, name: str) -> None:
        machine = Machine(self._lab, index, name, self.folder)
        self._machines[name] = machine
        machine.connect(True)
        # One for each machine, as Munge refuses a credential that it has seen before.
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / 'munge' / file}" for option, file in files.items()]
        self._start_daemon(name, "munged", f"--key-file={self.folder / 'key'}", *options)

    def _start_daemon(self, name: str, *daemon: str) -> None:
        said = self.folder / f"{daemon[0]}.{name}.start"
        with said.open("wb") as file:  # not a pipe, which the daemon would keep open
            done = subprocess.run(
                [*self._machines[name].prefix(), *daemon],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=_START_MOST_S,
                check=False,
            )
        if done.returncode != 0:
            logs = [said, *self.folder.glob("slurm*.log")]
            lines = "\n".join("\n".join(log.read_text().splitlines()[-10:]) for log in logs)
            raise SlurmError(f"{daemon[0]} does not start on {name}:\n{lines}")

    def _wait_for_controller(self) -> None:
        deadline = time.monotonic() + _START_MOST_S
        while True:
            try:
                self.run("sinfo", "--noheader")
                return
            except SlurmError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
