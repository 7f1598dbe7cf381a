"""Starts rank processes, listens to them, and ends them: all of them, whatever happens, within a time limit.

One loop without threads watches their output, their end, the exchange of addresses and the clock. It must not know what
they do.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from telegrad.launch.joining import EXCHANGE, LAUNCHER, RANK, WORLD_SIZE, Connection, ExchangeServer, RankServer

# What MPICH's MPI_Init asks of whoever started the process: its rank, and a place where ranks leave their addresses.
# Version 1.1 of PMI: lines of ``cmd=NAME key=value …`` on an inherited socket. With it our own launcher keeps its hold
# on MPI ranks; mpiexec would put its own processes between. Source: MPICH, src/pmi.

_MOST_KEY_BYTES, _MOST_VALUE_BYTES = 64, 1024
_LONGEST_PMI_LINE_BYTES = 1 << 14


class PmiServer(RankServer):
    """For MPI_Init of the ranks."""

    def __init__(self, size: int, selector: selectors.BaseSelector) -> None:
        super().__init__(size, selector)
        self._values: dict[str, str] = {}
        # MPICH names its shared memory after this: two jobs of one name, or what a killed one left, would meet in it.
        self._keyspace = f"telegrad_{os.getpid()}_{uuid.uuid4().hex}"

    def environment_of(self, rank: int) -> Mapping[str, str]:
        """By what MPI_Init finds the descriptor and who it is."""
        return {"PMI_FD": str(self.end_of(rank)), "PMI_RANK": str(rank), "PMI_SIZE": str(len(self._ends))}

    def _read(self, connection: Connection) -> None:
        if len(connection.received) > _LONGEST_PMI_LINE_BYTES:
            self._lose(connection, "said too much")
            return
        while not connection.gone and (end := connection.received.find(b"\n")) >= 0:
            line = connection.received[:end].decode(errors="replace")
            del connection.received[: end + 1]
            words = dict(word.partition("=")[::2] for word in line.split())
            if answer := self._answer(connection, words):
                self._say(connection, answer)

    def _answer(self, connection: Connection, words: Mapping[str, str]) -> str:
        match words.get("cmd"):
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                limits = f"keylen_max={_MOST_KEY_BYTES} vallen_max={_MOST_VALUE_BYTES}"
                return f"cmd=maxes kvsname_max={_MOST_KEY_BYTES} {limits} rc=0"
            case "get_appnum":
                return "cmd=appnum appnum=0 rc=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname kvsname={self._keyspace} rc=0"
            case "get_universe_size":
                return f"cmd=universe_size size={len(self._connections)} rc=0"
            case "put":
                self._values[words.get("key", "")] = words.get("value", "")
                return "cmd=put_result rc=0 msg=success"
            case "get":
                value = self._values.get(words.get("key", ""))
                return (
                    "cmd=get_result rc=-1 msg=key_not_found value=unknown"
                    if value is None
                    else f"cmd=get_result rc=0 msg=success value={value}"
                )
            case "barrier_in":
                connection.in_barrier = True
                self._conclude()
                return ""
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case _:  # such as spawn and abort: the one is not offered, after the other the rank ends, which is seen
                return ""

    def _conclude(self) -> None:
        waiting = [one for one in self._connections if one.in_barrier and not one.gone]
        lost = any(one.gone and not one.in_barrier for one in self._connections)
        if lost or len(waiting) == len(self._connections):
            for one in self._connections:
                one.in_barrier = False
            for one in waiting:
                self._say(one, f"cmd=barrier_out rc={-1 if lost else 0}")

    def _say(self, connection: Connection, line: str) -> None:
        with contextlib.suppress(OSError):  # it has just ended, which is reported by itself
            connection.socket.sendall(line.encode() + b"\n")


# The start of one rank's process. Tests replace `start_process`.

_RANK_MAIN = "telegrad.launch.rank_main"


@dataclass(frozen=True)
class Start:
    """What is to run. ``prefix`` stands before the command; ``environment`` is all of it; ``descriptors`` are inherited
    under the numbers that they have here."""

    target: str
    arguments: Sequence[str]
    prefix: Sequence[str]
    environment: Mapping[str, str]
    descriptors: Sequence[int]


@dataclass(frozen=True)
class Process:
    """A child of this process that leads a process group of its own, with its standard output and error.

    ``wait()`` blocks until it has ended, and returns its exit status: negative for a signal, as in ``subprocess``.
    """

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    wait: Callable[[], int]


def start_process(asked: Start) -> Process:
    """Raises ``OSError`` if the command cannot be run."""
    process = subprocess.Popen(
        [*asked.prefix, sys.executable, "-m", _RANK_MAIN, asked.target, *asked.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=asked.environment,
        pass_fds=asked.descriptors,
        # To be signalled as one. Not a session: Linux makes each a scheduling group of its own (autogroup), within
        # which alone sched_yield() yields, and ranks that outnumber cores must yield to each other.
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    return Process(process.pid, process.stdout, process.stderr, process.wait)


# MPICH's files in /dev/shm. Its ranks remove them in MPI_Finalize only, so killed ranks leave them.

_FILES = "/dev/shm/mpich_shm_"


def mpich_segments_of(processes: Iterable[int]) -> set[Path]:
    """MPICH's files in shared memory that these processes, which are still alive, have mapped: nobody else's."""
    found = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process}/maps").read_text(errors="surrogateescape")
        except OSError:  # it has just ended, or nobody may look
            continue
        for line in maps.splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(_FILES) and not path.endswith(" (deleted)"):
                found.add(Path(path))
    return found


def remove_mpich_segments(files: Iterable[Path]) -> None:
    """Removes those of ``files`` that are still there."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""An environment for ranks that share their cores: more threads would only fight for them."""

_KEPT_STDERR_BYTES = 32 << 10
_LONGEST_LINE_BYTES = 1 << 20
_TRACEBACK_S = 0.5  # for a hanging rank to say where it is
_GRACE_S = 2.0  # between asking a rank to end and killing it
_STRAGGLER_OUTPUT_S = 1.0  # a rank's own children may hold its output open


@dataclass(frozen=True)
class RankExit:
    """How a rank ended. ``returncode``: negative for a signal, as in ``subprocess``. ``stderr``: the last of it."""

    rank: int
    returncode: int
    stderr: str

    @property
    def how(self) -> str:
        """Such as ``"exit status 1"`` or ``"SIGSEGV"``; of SIGKILL also who it may be from."""
        if self.returncode >= 0:
            return f"exit status {self.returncode}"
        if self.returncode == -signal.SIGKILL:
            return "SIGKILL (where memory runs out it is the kernel's: `dmesg` says so)"
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:  # most real-time signals have no name
            return f"signal {-self.returncode}"

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {self.how}; its stderr:\n{self.stderr.rstrip() or '(empty)'}"


class LaunchError(Exception):
    """The ranks did not all end well."""


class RankFailed(LaunchError):  # noqa: N818
    """A rank ended with an error; ``exits`` holds those that had ended by then, the first failure first."""

    def __init__(self, exits: Sequence[RankExit]) -> None:
        super().__init__(str(exits[0]))
        self.exits = list(exits)


class RanksTimedOut(LaunchError):  # noqa: N818
    """The ranks were not done within ``timeout_s`` and have been killed; the message shows where each was, from its
    second line on."""

    def __init__(self, message: str, *, timeout_s: float | None = None) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


@dataclass
class _Rank:
    process: Process
    pidfd: int
    line: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    exit: RankExit | None = None


class Ranks:
    """``size`` processes of one program; use it in a ``with`` statement, which ends them in any case.

    ``target``: ``"module:function"``, called with ``arguments`` (strings), or a script's path. ``timeout_s``: seconds
    from the start after which all are killed. ``environment`` is added to this process's, ``environment_of(rank)`` on
    top of it; ``prefix_of(rank)`` is put before the command, such as ``["ip", "netns", "exec", "rank0"]`` (it must exec
    the command, not start a child). ``on_line(rank, line)`` gets each line of standard output. ``forward_stderr`` also
    shows standard error while it comes. With ``mpich`` the ranks may call MPICH's MPI_Init, which finds the same ranks.

    Ctrl-C reaches this process only; it ends the ranks on its way out. A rank that outlives this process is killed by
    the kernel.
    """

    def __init__(
        self,
        target: str,
        size: int,
        *,
        timeout_s: float,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        environment_of: Callable[[int], Mapping[str, str]] | None = None,
        prefix_of: Callable[[int], Sequence[str]] | None = None,
        on_line: Callable[[int, str], None] | None = None,
        forward_stderr: bool = False,
        mpich: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"size={size} must be at least 1: the number of ranks")
        if ":" not in target and not target.endswith(".py"):
            raise ValueError(f"target={target!r} must be 'module:function' or the path of a .py script")
        if target.endswith(".py") and not Path(target).is_file():
            raise ValueError(f"target={target!r} does not exist: give a script's path or 'module:function'")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be above 0 seconds: ranks must not hang for ever")
        self._target = target
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._environment_of = environment_of
        self._prefix_of = prefix_of
        self._on_line = on_line
        self._forward_stderr = forward_stderr
        self._mpich = mpich
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._size = size
        self._ranks: list[_Rank] = []
        self._exits: list[RankExit] = []  # in the order in which they happened
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._servers: list[RankServer] = []
        self._shared: set[Path] = set()  # files that killed ranks would leave

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts the processes; ``with`` does this."""
        exchange = ExchangeServer(self._size, self._selector)
        self._servers.append(exchange)
        pmi = PmiServer(self._size, self._selector) if self._mpich else None
        if pmi is not None:
            self._servers.append(pmi)
        for rank in range(self._size):
            self._ranks.append(self._start_rank(rank, exchange, pmi))
            for server in self._servers:
                server.started(rank)

    def _start_rank(self, rank: int, exchange: ExchangeServer, pmi: PmiServer | None) -> _Rank:
        own = self._environment_of(rank) if self._environment_of else {}
        about = {
            RANK: str(rank),
            WORLD_SIZE: str(self._size),
            EXCHANGE: str(exchange.end_of(rank)),
            LAUNCHER: str(os.getpid()),
            **(pmi.environment_of(rank) if pmi else {}),
        }
        process = start_process(
            Start(
                target=self._target,
                arguments=self._arguments,
                prefix=self._prefix_of(rank) if self._prefix_of else (),
                environment={**os.environ, **self._environment, **own, **about},
                descriptors=[server.end_of(rank) for server in self._servers],
            )
        )
        started = _Rank(process, os.pidfd_open(process.pid))
        self._listen(process.stdout, lambda data: self._take_output(rank, data))
        self._listen(process.stderr, lambda data: self._take_error(rank, data))
        self._selector.register(started.pidfd, selectors.EVENT_READ, lambda: self._reap(rank))
        return started

    def wait(self, *, until_all: bool = False) -> list[RankExit]:
        """Blocks until all ranks have ended; returns how, by rank.

        Raises ``RankFailed`` as soon as one ends with an error (with ``until_all`` it is only reported, and the others
        go on), ``RanksTimedOut`` after ``timeout_s``.
        """
        while any(rank.exit is None for rank in self._ranks):
            self.listen()
            if not until_all and (failed := [end for end in self._exits if end.returncode != 0]):
                raise RankFailed(failed)
        self._handle(_STRAGGLER_OUTPUT_S, lambda: not self._has_output())
        return [rank.exit for rank in self._ranks if rank.exit is not None]

    def listen(self, most_s: float = 1.0) -> None:
        """Handles what happens within ``most_s`` seconds; returns after the first thing. Raises ``RanksTimedOut``."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            self._give_up()
        self._handle_next(min(left_s, most_s))

    def _handle(self, most_s: float, over: Callable[[], bool]) -> None:
        end = time.monotonic() + most_s
        while not over() and (left_s := end - time.monotonic()) > 0:
            self._handle_next(left_s)

    def _handle_next(self, most_s: float) -> None:
        for key, _ in self._selector.select(most_s):
            if key.fileobj in self._selector.get_map():  # not removed by one of the others
                key.data()

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one rank; nothing if it has ended."""
        if self._ranks[rank].exit is None:
            signal.pidfd_send_signal(self._ranks[rank].pidfd, number)

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, started in enumerate(self._ranks) if started.exit is None]

    def close(self) -> None:
        """Ends all ranks that still run, first by SIGTERM, and frees everything. A second call does nothing."""
        self._on_line = None  # nobody's mistake may stop this
        try:
            self._note_shared()
            for rank in self.running():
                self._signal_group(rank, signal.SIGTERM)
            self._handle(_GRACE_S, lambda: not self.running())
        finally:  # also after a second Ctrl-C
            self._free()

    def _free(self) -> None:
        self._note_shared()
        for rank in self.running():
            self._signal_group(rank, signal.SIGKILL)
            self._reap(rank)
        remove_mpich_segments(self._shared)
        self._shared.clear()
        for server in self._servers:
            server.close()
        self._servers.clear()
        for started in self._ranks:
            started.process.stdout.close()
            started.process.stderr.close()
        self._ranks.clear()
        self._selector.close()

    def _note_shared(self) -> None:
        """Must come before a signal: what a dead process had mapped, nobody can say."""
        if self._mpich:
            self._shared |= mpich_segments_of(self._ranks[rank].process.pid for rank in self.running())

    def _signal_group(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._ranks[rank].process.pid, number)

    def _give_up(self) -> None:
        running = self.running()
        asked = [rank for rank in running if _catches(self._ranks[rank].process.pid, signal.SIGUSR1)]
        for rank in asked:  # the others it would kill
            self.signal(rank, signal.SIGUSR1)
        self._handle(_TRACEBACK_S, lambda: False)
        where = "\n".join(
            f"rank {rank} was here:\n{_text(self._ranks[rank].stderr)}"
            if rank in asked
            else f"rank {rank} was still being started"
            for rank in running
        )
        late = (
            f"ranks {running} of {self._size} were not done within {self._timeout_s:g} s: allow more by timeout_s, or "
            "by --timeout of a command"
        )
        raise RanksTimedOut(f"{late}\n{where}", timeout_s=self._timeout_s)

    def _listen(self, stream: IO[bytes], take: Callable[[bytes], None]) -> None:
        descriptor = stream.fileno()
        os.set_blocking(descriptor, False)

        def read() -> None:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(descriptor)
            take(data)

        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def _take_output(self, rank: int, data: bytes) -> None:
        line = self._ranks[rank].line
        line += data
        if not data and line:
            line += b"\n"
        while (end := line.find(b"\n")) >= 0 or len(line) > _LONGEST_LINE_BYTES:
            end = end if end >= 0 else _LONGEST_LINE_BYTES
            text = line[:end].decode(errors="replace")
            del line[: end + 1]
            if self._on_line is not None:
                self._on_line(rank, text)

    def _take_error(self, rank: int, data: bytes) -> None:
        kept = self._ranks[rank].stderr
        kept += data
        del kept[:-_KEPT_STDERR_BYTES]
        if self._forward_stderr:
            sys.stderr.write(data.decode(errors="replace"))

    def _has_output(self) -> bool:
        streams = [stream for rank in self._ranks for stream in (rank.process.stdout, rank.process.stderr)]
        return any(stream.fileno() in self._selector.get_map() for stream in streams)

    def _reap(self, rank: int) -> None:
        started = self._ranks[rank]
        if started.exit is not None:
            return
        self._signal_group(rank, signal.SIGKILL)  # what it has started itself; until wait() its number is nobody else's
        returncode = started.process.wait()
        self._selector.unregister(started.pidfd)
        os.close(started.pidfd)
        for stream in (started.process.stdout, started.process.stderr):  # what it said last
            if stream.fileno() in self._selector.get_map():
                self._selector.get_key(stream.fileno()).data()
        started.exit = RankExit(rank, returncode, _text(started.stderr))
        self._exits.append(started.exit)


def _catches(process: int, number: int) -> bool:
    """Whether ``process`` has a handler for the signal by now."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def _text(data: bytearray) -> str:
    return data.decode(errors="replace")
