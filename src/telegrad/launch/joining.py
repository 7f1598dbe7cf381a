"""What a rank that the launcher started does first: it reads who it is, and joins the others."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial

from telegrad.communicator import Communicator
from telegrad.cost import Tuning
from telegrad.errors import RendezvousError

# An allgather of a few bytes among the processes of one launcher, by which they learn each other's addresses.
# Each rank inherits one end of a socket pair, which works across network namespaces where a port would not, and which
# no stranger can reach. Wire format, little-endian: a rank says `length, bytes` for each round; the answer is `1,
# P times (length, bytes)`, or `0, length, text` if a rank cannot come any more.

MAX_BLOB_BYTES = 1 << 20
"""More than any address."""

_LENGTH = struct.Struct("<I")
_REFUSED, _GATHERED = b"\x00", b"\x01"
_SEND_TIMEOUT_S = 10.0


class SocketExchange:
    """One rank's end; call it with this rank's bytes to get all ranks', by rank. Raises ``RendezvousError`` if that
    cannot be."""

    repeats = True

    def __init__(self, descriptor: int, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        try:
            self._socket = socket.socket(fileno=descriptor)
            self._socket.set_inheritable(False)
            self._socket.settimeout(timeout_s)
        except OSError as error:
            raise self._lost(
                f"descriptor {descriptor} is no exchange ({error}): start ranks with telegrad.launch"
            ) from error

    def __call__(self, blob: bytes) -> list[bytes]:
        if len(blob) > MAX_BLOB_BYTES:
            raise ValueError(f"blob has {len(blob)} bytes: an exchange carries at most {MAX_BLOB_BYTES}")
        try:
            self._socket.sendall(_LENGTH.pack(len(blob)) + blob)
            if self._read(1) == _REFUSED:
                raise self._lost(self._read(self._read_length()).decode(errors="replace"))
            return [self._read(self._read_length()) for _ in range(self._size)]
        except TimeoutError as error:
            raise self._lost(
                f"the other ranks did not join within {self._timeout_s:g} s: look at their output"
            ) from error
        except OSError as error:
            raise self._lost(f"the exchange broke ({error}): the process that started the ranks is gone") from error

    def _read_length(self) -> int:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return int(length)

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionResetError("closed by the other end")
            data += piece
        return bytes(data)

    def _lost(self, reason: str) -> RendezvousError:
        return RendezvousError(f"rank {self._rank} of {self._size}: {reason}", rank=self._rank)


@dataclass
class Connection:
    """The launcher's end to one rank."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    blob: bytes | None = None  # this rank's, for the round under way
    in_barrier: bool = False
    gone: str = ""  # how the rank ended


class RankServer(ABC):
    """The launcher's ends to all ranks. It has no thread: whoever runs ``selector`` calls the registered functions
    (``key.data``)."""

    def __init__(self, size: int, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._connections: list[Connection] = []
        self._ends: list[socket.socket] = []  # the ranks' own
        for _ in range(size):
            ours, theirs = socket.socketpair()
            self._connections.append(Connection(ours))
            self._ends.append(theirs)
            selector.register(ours, selectors.EVENT_READ, partial(self._take, self._connections[-1]))

    def end_of(self, rank: int) -> int:
        """The descriptor that process ``rank`` inherits."""
        return self._ends[rank].fileno()

    def started(self, rank: int) -> None:
        """Process ``rank`` has its own copy of the descriptor now."""
        self._ends[rank].close()

    def close(self) -> None:
        for connection, end in zip(self._connections, self._ends, strict=True):
            if not connection.gone:
                self._selector.unregister(connection.socket)
            connection.socket.close()
            end.close()

    def _take(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if data:
            self._read(connection)
        else:
            self._lose(connection, "ended")

    @abstractmethod
    def _read(self, connection: Connection) -> None:
        """Something has been received."""

    def _lose(self, connection: Connection, how: str) -> None:
        """Nothing will come from this rank any more; those who wait for it, now or later, are told ``how`` it ended."""
        connection.gone = how
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._conclude()

    @abstractmethod
    def _conclude(self) -> None:
        """Answers those who wait, once all have come or one cannot come any more."""


class ExchangeServer(RankServer):
    """For their ``SocketExchange``."""

    def _read(self, connection: Connection) -> None:
        received = connection.received
        if len(received) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(received)
        if length > MAX_BLOB_BYTES:
            self._lose(connection, f"announced {length} bytes, more than {MAX_BLOB_BYTES},")
        elif len(received) >= _LENGTH.size + length and connection.blob is None:
            connection.blob = bytes(received[_LENGTH.size : _LENGTH.size + length])
            del received[: _LENGTH.size + length]
            self._conclude()

    def _conclude(self) -> None:
        lost = [rank for rank, other in enumerate(self._connections) if other.blob is None and other.gone]
        waiting = [other for other in self._connections if other.blob is not None]
        if lost:
            text = f"rank {lost[0]} {self._connections[lost[0]].gone} before it joined".encode()
            answer = _REFUSED + _LENGTH.pack(len(text)) + text
        elif len(waiting) == len(self._connections):
            blobs = [other.blob or b"" for other in waiting]
            answer = _GATHERED + b"".join(_LENGTH.pack(len(blob)) + blob for blob in blobs)
        else:
            return
        for connection in waiting:
            connection.blob = None
            try:
                connection.socket.settimeout(_SEND_TIMEOUT_S)
                connection.socket.sendall(answer)
                connection.socket.setblocking(False)
            except OSError:
                pass  # it has just ended, which is reported by itself


RANK, WORLD_SIZE, EXCHANGE = "TELEGRAD_RANK", "TELEGRAD_WORLD_SIZE", "TELEGRAD_EXCHANGE"
LAUNCHER = "TELEGRAD_LAUNCHER"
"""The launcher's process id, without which a rank does not want to live."""

_exchange: SocketExchange | None = None  # one connection serves all communicators of the process


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are. Raises ``RendezvousError`` if no launcher started it."""
    missing = [name for name in (RANK, WORLD_SIZE, EXCHANGE) if not os.environ.get(name)]
    if missing:
        raise RendezvousError(
            f"no peers found: the environment has no {', '.join(missing)}: "
            "start this function with telegrad.launch.Ranks, or use Communicator.from_torch() inside torchrun"
        )
    return int(os.environ[RANK]), int(os.environ[WORLD_SIZE])


def exchange(join_timeout_s: float) -> SocketExchange:
    """How this process swaps bytes with the others. Raises ``RendezvousError`` if no launcher started it."""
    global _exchange
    rank, size = rank_and_size()
    if _exchange is None:
        _exchange = SocketExchange(int(os.environ[EXCHANGE]), rank, size, join_timeout_s)
    return _exchange


def join(
    *,
    timeout_s: float = 1800.0,
    liveness_timeout_s: float | None = 8.0,
    interface: str | None = None,
    join_timeout_s: float = 300.0,
    tuning: Tuning | str | None = "auto",
) -> Communicator:
    """A communicator of all ranks that the launcher started; each calls this. Arguments as in
    ``Communicator.from_torch``."""
    rank, size = rank_and_size()
    return Communicator.from_exchange(
        rank,
        size,
        exchange(join_timeout_s),
        timeout_s=timeout_s,
        liveness_timeout_s=liveness_timeout_s,
        interface=interface,
        tuning=tuning,
    )


# A process ends with the one that started it, however that ends. Linux only.

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """``parent``: the id of the process that started this one, in a thread that lasts as long as it does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)
