"""Measures the time, memory and descriptors that ``Communicator.from_torch()`` takes among ranks of one host.

``--beside`` names a Python whose telegrad is another version: both join in turn, in one run. Ranks are forked from a
process that has imported torch and telegrad. This file is their program, too, so it imports nothing of the lab above.

torch's store asks the name server for the name of each peer's address, one after another. Root measures without a name
server, so that the time is of joining and not of the server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Row = dict[str, Any]

THIS, BESIDE = "this", "beside"
_WITHOUT_NAME_SERVER = ("unshare", "-m", "sh", "-c", 'mount --bind /dev/null /etc/resolv.conf && exec "$@"', "sh")
_IDLE_S = 1.5  # by then each rank has sent a heartbeat
_ROUND_S = 300.0
ABOUT = {
    "wall_s": "from the first rank's call of from_torch() until it has returned on the last one",
    "cpu_ms": "processor time of from_torch(), of all threads: the mean of the ranks",
    "memory_mib": "what joining adds, anonymous and shared: the median rank; then after heartbeats and a sum",
    "name_server": "whether torch's store could ask one for the names of addresses",
    "descriptors": "that joining adds to a rank that does not serve the store, at most; then the same",
}
"""The meaning of a row's fields, for result files."""


def _held() -> tuple[float, int]:
    """MiB of memory that is of no file, and open descriptors."""
    with open("/proc/self/status") as file:
        kib = sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))
    return kib / 1024, len(os.listdir("/proc/self/fd")) - 1


def _rank(rank: int, ready: int, go: int, out: int) -> None:
    import numpy as np

    import telegrad

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    before_mib, before = _held()
    os.write(ready, b"r")
    os.read(go, 1)
    begun_s, spent_s = time.time(), time.process_time()
    communicator = telegrad.Communicator.from_torch()
    joined_s, spent_s = time.time(), time.process_time() - spent_s
    mib, descriptors = _held()
    time.sleep(_IDLE_S)
    communicator.all_reduce(np.ones(4, np.float32))
    used_mib, used = _held()
    communicator.barrier()
    communicator.close()
    said = [begun_s, joined_s, spent_s, mib - before_mib, used_mib - before_mib, descriptors - before, used - before]
    os.write(out, (json.dumps([rank, *said]) + "\n").encode())


def _main(size: int) -> None:
    """The ranks' parent; prints what they measured as JSON, by rank."""
    import torch.distributed  # noqa: F401 - so that no rank's time holds the import

    import telegrad  # noqa: F401

    for late in ("membership", "rendezvous.joining"):
        with contextlib.suppress(ImportError):  # an older version has other modules
            importlib.import_module(f"telegrad.communicator.{late}")
    held = socket.socket()  # without listening, so that nobody else gets the port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    port = held.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    (ready, says_ready), (go, says_go), (out, says) = os.pipe(), os.pipe(), os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for descriptor in (ready, says_go, out):
                    os.close(descriptor)
                _rank(rank, says_ready, go, says)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for descriptor in (says_ready, go, says):
        os.close(descriptor)
    come = 0
    while come < size and (some := os.read(ready, size)):
        come += len(some)
    os.write(says_go, b"g" * size)
    with os.fdopen(out) as lines:
        said = sorted(json.loads(line) for line in lines)
    if any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) or len(said) != size:
        sys.exit("a rank has failed")
    print(json.dumps([one[1:] for one in said]))


def measured(python: Path, size: int) -> Row:
    """One join of ``size`` ranks. Raises ``CalledProcessError`` where a rank failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*(_WITHOUT_NAME_SERVER if os.geteuid() == 0 else ()), str(python), "-", str(size)],
        input=Path(__file__).read_text(),
        env=environment,
        cwd="/",  # no telegrad but that Python's
        stdout=subprocess.PIPE,
        timeout=_ROUND_S,
        check=True,
        text=True,
    )
    begun, joined, spent, mib, used_mib, descriptors, used = zip(*json.loads(done.stdout.splitlines()[-1]), strict=True)
    return {
        "wall_s": max(joined) - min(begun),
        "cpu_ms": 1e3 * sum(spent) / size,
        "name_server": os.geteuid() != 0,
        "memory_mib": [statistics.median(mib), statistics.median(used_mib)],
        "descriptors": [max(descriptors[1:]), max(used[1:])],
    }


def command(
    ranks: Annotated[str, typer.Option(help="Numbers of processes: 2,8,32,64.")] = "2,8,32,64",
    rounds: Annotated[int, typer.Option(min=1, help="Joins of each version, in turn.")] = 5,
    other_python: Annotated[
        Path | None,
        typer.Option("--beside", help="A Python whose telegrad is another version.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows, the machine and the commit here.")
    ] = None,
) -> None:
    """Measure time, memory and descriptors of joining, by processes of this host, and of another version beside it."""
    from rich.console import Console

    from lab.common.commands import rank_counts
    from telegrad.tools.bench.machine import describe_machine
    from telegrad.tools.cli.outputs import check_writable, write_result

    counts = rank_counts(ranks)
    if min(counts) < 2:
        raise typer.BadParameter("joining takes 2 ranks or more", param_hint="--ranks")
    check_writable(json_file, "--json")
    console = Console()
    versions = {THIS: Path(sys.executable), **({} if other_python is None else {BESIDE: other_python})}
    rows: list[Row] = []
    for size in counts:
        for _ in range(rounds):
            rows += [{"version": name, "ranks": size, **measured(python, size)} for name, python in versions.items()]
        for name in versions:
            console.print(_line(name, size, rows), highlight=False, soft_wrap=True)
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "about": ABOUT, "machine": describe_machine()})


def _line(version: str, size: int, rows: Sequence[Row]) -> str:
    own = [row for row in rows if (row["version"], row["ranks"]) == (version, size)]

    def median(of: Callable[[Row], float]) -> float:
        return statistics.median(of(row) for row in own)

    return (
        f"{version:6} {size:3} ranks: {median(lambda row: row['wall_s']):6.2f} s, at least "
        f"{min(row['wall_s'] for row in own):.2f} s; processor {median(lambda row: row['cpu_ms']):5.1f} ms a rank; "
        f"{median(lambda row: row['memory_mib'][0]):5.1f} MiB, in use {median(lambda row: row['memory_mib'][1]):.1f}; "
        f"{median(lambda row: row['descriptors'][0]):.0f} descriptors, in use "
        f"{median(lambda row: row['descriptors'][1]):.0f}"
    )


if __name__ == "__main__":
    _main(int(sys.argv[1]))
