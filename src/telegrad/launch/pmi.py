"""What MPICH's MPI_Init asks of whoever started the process: its rank, and a place where ranks leave their addresses.

A server for version 1.1 of PMI, the wire protocol between MPICH's ranks and their process manager: lines of
``cmd=NAME key=value …`` on an inherited socket. With it our own launcher starts MPI ranks as it starts others, and
keeps its hold on them; mpiexec would put its own processes between. It serves MPICH and its relatives; other MPIs do
not ask, and find themselves alone. Source: MPICH, src/pmi.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST_KEY_BYTES, _MOST_VALUE_BYTES = 64, 1024
_LONGEST_LINE_BYTES = 1 << 14


@dataclass
class _PmiConnection:
    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    in_barrier: bool = False
    gone: bool = False


class PmiServer:
    """The launcher's end. It has no thread: whoever runs ``selector`` calls the registered functions (``key.data``)."""

    def __init__(self, size: int, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._connections: list[_PmiConnection] = []
        self._ends: list[socket.socket] = []  # the ranks' own
        self._values: dict[str, str] = {}
        # MPICH names its shared memory after this: two jobs of one name, or what a killed one left, would meet in it.
        self._keyspace = f"telegrad_{os.getpid()}_{uuid.uuid4().hex}"
        for rank in range(size):
            ours, theirs = socket.socketpair()
            self._connections.append(_PmiConnection(ours))
            self._ends.append(theirs)
            selector.register(ours, selectors.EVENT_READ, lambda rank=rank: self._take(self._connections[rank]))

    def end_of(self, rank: int) -> int:
        """The descriptor that process ``rank`` inherits."""
        return self._ends[rank].fileno()

    def environment_of(self, rank: int) -> Mapping[str, str]:
        """By what MPI_Init finds the descriptor and who it is."""
        return {"PMI_FD": str(self.end_of(rank)), "PMI_RANK": str(rank), "PMI_SIZE": str(len(self._ends))}

    def started(self, rank: int) -> None:
        """Process ``rank`` has its own copy of the descriptor now."""
        self._ends[rank].close()

    def close(self) -> None:
        for connection, end in zip(self._connections, self._ends, strict=True):
            if not connection.gone:
                self._lose(connection)
            end.close()

    def _take(self, connection: _PmiConnection) -> None:
        try:
            data = connection.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        if not data or len(connection.received) > _LONGEST_LINE_BYTES:
            self._lose(connection)
            self._conclude_barrier()
            return
        while not connection.gone and (end := connection.received.find(b"\n")) >= 0:
            line = connection.received[:end].decode(errors="replace")
            del connection.received[: end + 1]
            words = dict(word.partition("=")[::2] for word in line.split())
            if answer := self._answer(connection, words):
                self._say(connection, answer)

    def _answer(self, connection: _PmiConnection, words: Mapping[str, str]) -> str:
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
                self._conclude_barrier()
                return ""
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case _:  # such as spawn and abort: the one is not offered, after the other the rank ends, which is seen
                return ""

    def _conclude_barrier(self) -> None:
        """Lets all go on once all have come, with an error if one cannot come any more."""
        waiting = [one for one in self._connections if one.in_barrier and not one.gone]
        lost = any(one.gone and not one.in_barrier for one in self._connections)
        if lost or len(waiting) == len(self._connections):
            for one in self._connections:
                one.in_barrier = False
            for one in waiting:
                self._say(one, f"cmd=barrier_out rc={-1 if lost else 0}")

    def _say(self, connection: _PmiConnection, line: str) -> None:
        with contextlib.suppress(OSError):  # it has just ended, which is reported by itself
            connection.socket.sendall(line.encode() + b"\n")

    def _lose(self, connection: _PmiConnection) -> None:
        connection.gone = True
        self._selector.unregister(connection.socket)
        connection.socket.close()
