"""Ranks of tests are forked from servers that have imported what they import, instead of executed one by one.

A rank that is started so is a process as any other: a child of this one, in a process group of its own, with its own
environment, descriptors and random numbers. Strings are hashed in another way by ranks of odd and even number, as by
each fresh process: who takes the order of a set for the same on all ranks shall be found out. Two things a forked rank
has not of its own: ``/proc/PID/environ`` and ``/proc/PID/cmdline``, and what libraries read while they are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rank_server
from telegrad.launch import SINGLE_THREADED
from telegrad.launch.ranks import Process, Start
from telegrad.launch.ranks import start_process as execute

_WITHOUT_NETWORKS = ["numpy.random", "secrets", "encodings.idna"]
_BY_ALL = ["telegrad", "telegrad.launch", *_WITHOUT_NETWORKS]
IMPORTS = {
    "mpi": [*_WITHOUT_NETWORKS, "argparse", "concurrent.futures.thread", "faulthandler", "json", "subprocess", "uuid"],
    "numpy": _BY_ALL,
    "torch": [
        *(*_BY_ALL, "pytest", "telegrad.ddp", "telegrad.synchronizer", "torch._dynamo"),
        *("torch.distributed.checkpoint.state_dict", "torch.nn.parallel", "torch.optim", "torch.profiler"),
    ],
}
"""The modules that a server imports, by the kind of its ranks (``mpi``: they talk by MPI). The order in which libraries
of networks are loaded is part of their tests, so this server has loaded none."""

_PR_SET_CHILD_SUBREAPER = 36
_STARTING_S = 100.0
# Read in the rank, when a communicator is made, a store is opened, MPI is loaded or text is shown. Any other variable
# may have been read by a library while it was loaded. torch's compiler sets TORCHINDUCTOR_CACHE_DIR in the process that
# imports it. No server uses CUDA.
_READ_WHEN_USED = {
    *("PYTHONPATH", "TMPDIR", "COLUMNS", "UCX_TLS", "UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR"),
    "CUDA_DEVICE_MAX_CONNECTIONS",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
}
_READ_WHEN_USED_PREFIXES = ("PMI_", "TELEGRAD_", "TORCHELASTIC_", "PYTEST_")


class ServerEndedError(RuntimeError):
    """It was not asked for the rank."""


class RankServers:
    """``start`` takes the place of launch.ranks.start_process; ``kind`` says what ranks import, or ``exec``."""

    def __init__(self) -> None:
        self.kind = "exec"
        self._environment = {**os.environ, **SINGLE_THREADED}
        self._servers: dict[tuple[str, int], _Server] = {}
        self._lock = threading.Lock()

    def follow(self, environment: Mapping[str, str]) -> None:
        """Starts new servers where this process's environment has changed for good: a library that tests import, such
        as scikit-learn, sets variables, and with the servers of before every rank would be executed from then on."""
        if _read_while_loaded({**environment, **SINGLE_THREADED}) != _read_while_loaded(self._environment):
            self.close()
            self._environment = {**environment, **SINGLE_THREADED}

    def start(self, asked: Start) -> Process:
        namespaces = _namespaces(asked.prefix)
        if self.kind == "exec" or namespaces is None or not self._is_for(asked.environment):
            return execute(asked)
        with self._lock:
            try:
                return self._fork(asked, namespaces)
            except ServerEndedError:  # before it was asked: no rank has come to be
                return self._fork(asked, namespaces)

    def _fork(self, asked: Start, namespaces: Mapping[str, str]) -> Process:
        kind = "mpi" if "PMI_FD" in asked.environment else self.kind
        key = (kind, int(asked.environment["TELEGRAD_RANK"]) % 2)
        if key not in self._servers:
            self._servers[key] = _Server(IMPORTS[kind], self._environment)
        try:
            return self._servers[key].fork(asked, namespaces)
        except BaseException:  # a test's time-out too: what this server says next would be for another rank
            self._servers.pop(key).kill()
            raise

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def _is_for(self, environment: Mapping[str, str]) -> bool:
        """Could no library that a server has loaded have read anything else?"""
        if environment.get("OMP_NUM_THREADS") != "1":
            return False
        return _read_while_loaded({**SINGLE_THREADED, **environment}) == _read_while_loaded(self._environment)


def _namespaces(prefix: Sequence[str]) -> dict[str, str] | None:
    """Those that a forked rank enters in place of this prefix; None: it does something else, and must be executed."""
    match list(prefix):
        case []:
            return {}
        case ["ip", "netns", "exec", name]:
            return {"network": name}
        case ["ip", "netns", "exec", name, "nsenter", option] if option.startswith("--ipc="):
            return {"network": name, "memory": option.removeprefix("--ipc=")}
    return None


def _read_while_loaded(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _READ_WHEN_USED and not name.startswith(_READ_WHEN_USED_PREFIXES)
    }


class _Server:
    def __init__(self, imports: list[str], environment: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, Path(rank_server.__file__), str(theirs.fileno()), *imports],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        self._connection.settimeout(_STARTING_S)
        if self._connection.recv(32) != rank_server.READY:
            raise RuntimeError(f"the server of ranks that import {imports} did not start: its stderr says why")

    def fork(self, asked: Start, namespaces: Mapping[str, str]) -> Process:
        with contextlib.ExitStack() as theirs:
            stdin = theirs.enter_context(open(os.devnull, "rb"))
            pipes = [os.pipe() for _ in range(2)]
            for _, writing in pipes:
                theirs.callback(os.close, writing)
            given = {
                0: stdin.fileno(),
                1: pipes[0][1],
                2: pipes[1][1],
                **{number: number for number in asked.descriptors},
            }
            message = {
                "arguments": [asked.target, *asked.arguments],
                "environment": dict(asked.environment),
                "namespaces": dict(namespaces),
                "folder": os.getcwd(),
                "cores": sorted(os.sched_getaffinity(0)),
                "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "descriptors": list(given),
            }
            stdout, stderr = (open(reading, "rb", buffering=0) for reading, _ in pipes)  # noqa: SIM115
            with _adopting():
                try:
                    socket.send_fds(self._connection, [json.dumps(message).encode()], list(given.values()))
                except OSError as error:
                    raise ServerEndedError(f"the server of ranks has ended: its stderr says why ({error})") from error
                answer = self._connection.recv(32)
            if not answer:
                raise RuntimeError("the server of ranks has ended: its stderr says why")
        pid = int(answer)
        return Process(pid, stdout, stderr, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def close(self) -> None:
        self._connection.close()
        self._process.wait(_STARTING_S)

    def kill(self) -> None:
        self._process.kill()
        self.close()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile an orphan among this process's descendants becomes its child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
