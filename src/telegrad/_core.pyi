"""What the compiled core offers to Python. Pointers are plain ints to contiguous host memory that the caller keeps
alive.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad._core_kernels import *  # noqa: F403 (names of a stub)
from telegrad._core_linear import *  # noqa: F403

class DType(Enum):
    f32 = ...
    bf16 = ...
    u8 = ...
    f64 = ...
    f16 = ...
    i8 = ...
    i16 = ...
    i32 = ...
    i64 = ...
    u16 = ...
    u32 = ...
    u64 = ...
    bool = ...
    c64 = ...
    c128 = ...

class Reduction(Enum):
    sum = ...
    avg = ...
    prod = ...
    min = ...
    max = ...
    max_abs = ...
    band = ...
    bor = ...
    bxor = ...
    land = ...
    lor = ...
    lxor = ...

def has_reduction(dtype: DType, reduction: Reduction) -> bool: ...

class ValueEncoding(Enum):
    native = ...
    bf16 = ...
    f16 = ...
    int8 = ...
    qsgd8 = ...
    qsgd4 = ...
    qsgd2 = ...
    mean = ...
    e3m0 = ...
    codebook2 = ...

class Algorithm(Enum):
    auto = ...
    ring = ...
    recursive_doubling = ...
    split_allgather = ...
    split_dense_allgather = ...
    rabenseifner = ...
    two_level = ...
    mpi = ...

class IndexFormat(Enum):
    none = ...  # raw32 or blocked16, whichever is smaller
    raw32 = ...
    packed = ...

class NetworkCosts:
    def __init__(
        self, alpha_s: float, beta_s_per_byte: float, beta_exchange_s_per_byte: float, gamma_s_per_byte: float
    ) -> None: ...

def sparse_sum_costs(
    ranks: int,
    n: int,
    entries: float,
    overlap: float,
    dtype: DType,
    indices: IndexFormat,
    packs_values: bool,
    network: NetworkCosts,
) -> dict[str, float]: ...

class SparseReduction:
    def __init__(
        self,
        reduction: Reduction,
        algorithm: Algorithm,
        switch_factor: float,
        indices: IndexFormat = ...,
        values: ValueEncoding = ...,
        seed: int = 0,
        call: int = 0,
        residual: int = 0,  # float32, `elements` of them; 0: none
        elements: int = 0,
        balanced: bool = False,  # slices
        packs_values: bool = False,
        rounds_shares: bool = True,
    ) -> None: ...

class OkTopkState:
    # Of a call, in words, and of float32 in bytes: `most` is k', the larger of the local and the global count.
    @staticmethod
    def words_most(most: int, ranks: int) -> int: ...
    @staticmethod
    def bytes_most(
        most: int, k: int, ranks: int, n: int, cut: bool = True, exact: bool = True, balanced: bool = True
    ) -> int: ...
    def __init__(self, **settings: Any) -> None: ...  # those of telegrad.OkTopkState
    @property
    def in_use(self) -> bool: ...
    def get(self) -> tuple[int, float, list[int], bool, list[float]]: ...
    def set(self, calls: int, threshold: float, lengths: list[int], *more: Any) -> None: ...  # of get()

class BoundedTopkState:
    def __init__(self, k: int, slack: float, boundaries_every: int) -> None: ...
    @property
    def in_use(self) -> bool: ...
    def get(self) -> tuple[int, float, list[int]]: ...
    def set(self, calls: int, threshold: float, lengths: list[int]) -> None: ...

class GTopkState:
    def __init__(self, k: int) -> None: ...
    @property
    def in_use(self) -> bool: ...

class HostBuffer:
    def __init__(self, pointer: int, elements: int, nbytes: int, dtype: DType) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def elements(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> DType: ...

class FastPath:
    def __init__(self, method: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...

class WorkState:
    _request: Request
    _operation: str
    _rank: int
    _process: int  # read only
    _held: Any
    _finish: Callable[[Request], Any] | None
    _member: Any  # None, or what has _keep(request, held)

def buffer_of(owner: npt.NDArray[Any], writable: bool) -> HostBuffer | None: ...

# An operation that gets one begins once the word at `ready` (0: at once) has reached `value`, and writes `value` to the
# word at `done` when it is over; a failure fills the output with 0xFF bytes before that.
class Gate:
    def __init__(self, ready: int, done: int, value: int, output: int, output_bytes: int) -> None: ...

class StreamDriver:
    def __init__(self, library: str, context: int) -> None: ...

class DeviceFastPath:
    def __init__(self, driver: StreamDriver, device: Any, index: int, current_stream: Callable[[int], int]) -> None: ...
    def lend(self, bytes: int, input: int, output: int, ready: int, done: int, value: int, event: int) -> int: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def slot(self, number: int, communicator: Communicator) -> tuple[int, Request | None, bool]: ...
    def __len__(self) -> int: ...
    def all_reduce(
        self, member: Any, communicator: Communicator, x: Any, op: str, apart: bool = False
    ) -> Request | None: ...
    def use(self, inputs: int, results: int) -> None: ...
    def has_outstanding(self) -> bool: ...
    def take_outstanding(self, communicator: Communicator) -> list[tuple[Request, int]]: ...

class Request:
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    def span_s(self) -> tuple[float, float] | None: ...
    def source(self) -> int | None: ...
    def sparse_result(
        self,
    ) -> tuple[npt.NDArray[np.uint32] | None, npt.NDArray[np.float32] | npt.NDArray[np.uint16]]: ...
    def topk_result(
        self,
    ) -> tuple[
        tuple[npt.NDArray[np.uint32], npt.NDArray[Any]],
        tuple[npt.NDArray[np.uint32], npt.NDArray[Any]],
        tuple[int, int, int, int, int, int, int, int, int, bool, bool, bool],
    ]: ...
    def sparse_results(
        self,
    ) -> list[tuple[npt.NDArray[np.uint32] | None, npt.NDArray[np.float32] | npt.NDArray[np.uint16]]]: ...

class CompletionQueue:
    def __init__(self) -> None: ...
    def watch(self, request: Request, token: int) -> None: ...
    def next(self, timeout_s: float) -> list[int]: ...
    def close(self) -> None: ...

class Communicator:
    @staticmethod
    def local(
        size: int,
        timeout_s: float,
        report_folder: str = "",
        group: str = "",
        parent_ranks: Sequence[int] = (),
        stall_s: float = ...,
    ) -> list[Communicator]: ...
    @staticmethod
    def ucx(
        rank: int,
        size: int,
        exchange: Callable[[bytes], list[bytes]],
        timeout_s: float,
        liveness_timeout_s: float | None,
        interface: str | None,
        report_folder: str = "",
        checks: bool = True,
        group: str = "",
        parent_ranks: Sequence[int] = (),
        devices: str | None = None,
        stall_s: float = ...,
    ) -> Communicator: ...
    @staticmethod
    def over(
        driver: object,  # what telegrad._mpi.make_driver() returns
        exchange: Callable[[bytes], list[bytes]],
        timeout_s: float,
        liveness_timeout_s: float | None,
        report_folder: str = "",
        group: str = "",
        parent_ranks: Sequence[int] = (),
        stall_s: float = ...,
    ) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def driver(self) -> str: ...
    @property
    def shares_memory(self) -> bool: ...
    @property
    def has_network_sums(self) -> bool: ...
    @property
    def warning(self) -> str: ...
    # Empty: the built-in one; None: nothing was measured. The last two are of ranks on two levels.
    def use_allreduce_table(
        self,
        choices: list[tuple[int, Algorithm]],
        costs: NetworkCosts | None = None,
        inside: NetworkCosts | None = None,
        beta_alone_s_per_byte: float | None = None,
    ) -> None: ...
    # By rank; who has the same label is in the same node. Raises ValueError unless there is one for each rank.
    def use_nodes(self, labels: list[int]) -> None: ...
    def choose_allreduce(self, bytes: int) -> Algorithm: ...
    def all_reduce(
        self,
        input: int,
        output: int,
        count: int,
        dtype: DType,
        reduction: Reduction,
        algorithm: Algorithm,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    # Of a sum that goes by other means: over once all ranks have called the same. It moves no elements.
    def reduce_custom(
        self,
        input: int,
        output: int,
        count: int,
        dtype: DType,
        function: int,
        digest: int,
        root: int | None,
        counts: Sequence[int] | None,
        blocking: bool = False,
    ) -> Request: ...
    def announce_all_reduce(self, count: int, dtype: DType, reduction: Reduction) -> Request: ...
    def all_reduce_quantised(
        self,
        input: int,
        output: int,
        error: int,  # 0: not asked for
        count: int,
        reduction: Reduction,
        encoding: ValueEncoding,
        seed: int,
        call: int,
        blocking: bool = False,
    ) -> Request: ...
    def encoded_layout(self, count: int, encoding: ValueEncoding) -> list[int]:
        """Bytes; begin and end of this rank's own slice, in elements and in bytes."""
    def all_reduce_encoded(
        self,
        input: int,
        own: int,  # 0: of one or two ranks
        output: int,
        error: int,  # 0: not asked for, or nobody's
        count: int,
        reduction: Reduction,
        encoding: ValueEncoding,
        seed: int,
        call: int,
        gate: Gate,
    ) -> Request: ...
    def reduce(
        self,
        input: int,
        output: int,
        count: int,
        dtype: DType,
        reduction: Reduction,
        root: int,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def reduce_scatter(
        self,
        input: int,
        output: int,
        counts: list[int],
        dtype: DType,
        reduction: Reduction,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def all_reduce_sparse(
        self,
        indices: int,
        values: int,
        nnz: int,
        marks: int,
        n: int,
        dtype: DType,
        how: SparseReduction,
        blocking: bool = False,
    ) -> Request: ...
    def all_reduce_sparse_into(
        self,
        indices: int,
        values: int,
        nnz: int,
        marks: int,
        n: int,
        dtype: DType,
        how: SparseReduction,
        output: int,
        blocking: bool = False,
    ) -> Request: ...
    # Once the gate is open. `staged`: what StagedAddresses (bindings/reductions.hpp) takes. The int64 at its
    # `count` says how many of the staged entries there are. What becomes of the sum is said at `form` (int64): how
    # many entries it has, or -2: it is dense. A gate's failure leaves -1 there.
    def all_reduce_staged(
        self, staged: Sequence[int], n: int, dtype: DType, how: SparseReduction, gate: Gate
    ) -> Request: ...
    def reduce_scatter_staged(
        self, staged: Sequence[int], n: int, dtype: DType, how: SparseReduction, counts: list[int] | None, gate: Gate
    ) -> Request: ...
    # At `form` each rank's number of entries, which all have the same room.
    def all_gather_staged(
        self, staged: Sequence[int], n: int, dtype: DType, how: SparseReduction, gate: Gate
    ) -> Request: ...
    def average_gathered_staged(
        self, staged: Sequence[int], n: int, dtype: DType, how: SparseReduction, gate: Gate
    ) -> Request: ...
    # What the sum does not keep of this rank's entries is lost, too. Its topk_result() is as of all_reduce_topk.
    def all_reduce_topk_staged(
        self,
        staged: Sequence[int],
        n: int,
        dtype: DType,
        how: SparseReduction,
        state: OkTopkState | GTopkState | BoundedTopkState,
        gate: Gate,
    ) -> Request: ...
    def reduce_scatter_sparse(
        self,
        indices: int,
        values: int,
        nnz: int,
        n: int,
        counts: list[int] | None,
        dtype: DType,
        how: SparseReduction,
        blocking: bool = False,
    ) -> Request: ...
    # Its topk_result(): (indices, values) of the sum, the same of the rest, and the fields of a TopkReport.
    def all_reduce_topk(
        self,
        indices: int,
        values: int,
        nnz: int,
        n: int,
        dtype: DType,
        how: SparseReduction,
        state: OkTopkState | GTopkState | BoundedTopkState,
        blocking: bool = False,
    ) -> Request: ...
    def all_gather_sparse(
        self,
        indices: int,
        values: int,
        nnz: int,
        n: int,
        dtype: DType,
        how: SparseReduction,
        blocking: bool = False,
    ) -> Request: ...
    def all_gather(
        self,
        input: int,
        output: int,
        bytes: int,
        dtype: DType,
        lengths: list[int] | None = None,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def gather(
        self,
        input: int,
        output: int,
        bytes: int,
        dtype: DType,
        root: int,
        lengths: list[int] | None = None,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def scatter(
        self,
        input: int,
        output: int,
        bytes: int,
        dtype: DType,
        root: int,
        lengths: list[int] | None = None,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def all_to_all(
        self, input: int, output: int, bytes: int, dtype: DType, blocking: bool = False, gate: Gate | None = None
    ) -> Request: ...
    def all_to_all_v(
        self,
        input: int,
        output: int,
        sent: list[int],
        received: list[int],
        dtype: DType,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def broadcast(
        self, data: int, bytes: int, dtype: DType, root: int, blocking: bool = False, gate: Gate | None = None
    ) -> Request: ...
    def barrier(self, blocking: bool = False) -> Request: ...
    def send(
        self,
        data: int,
        bytes: int,
        dtype: DType,
        to: int,
        tag: int,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def recv(
        self,
        data: int,
        bytes: int,
        dtype: DType,
        source: int | None,
        tag: int,
        blocking: bool = False,
        gate: Gate | None = None,
    ) -> Request: ...
    def sendrecv(
        self,
        data: int,
        bytes: int,
        dtype: DType,
        to: int,
        into: int,
        into_bytes: int,
        into_dtype: DType,
        source: int,
        tag: int,
        blocking: bool = False,
    ) -> Request: ...
    def hint_at_stalls(self, at_once: str, later: str) -> None: ...
    def part(self) -> None: ...
    def close(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def counters(self) -> Any: ...  # telegrad.communicator.member.Stats
    @property
    def epoch(self) -> int: ...
    def start_trace(self, most: int) -> None: ...
    def traced(self) -> dict[str, Any]: ...
    def report(self) -> str: ...

class Simulation:
    """Ranks in virtual time."""

    @staticmethod
    def make(
        size: int,
        alpha_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float,
        jitter: float,
        seed: int,
        timeout_s: float | None = None,
        liveness_timeout_s: float | None = None,
    ) -> Simulation: ...
    def communicator(self, rank: int) -> Communicator: ...  # the class differs, its methods do not
    def now_s(self) -> float: ...
    def next_s(self) -> float: ...
    def advance(self, until_s: float) -> bool: ...
    def kill(self, rank: int, detect_s: float) -> None: ...
    def freeze(self, rank: int, duration_s: float) -> None: ...
    def abort(self, rank: int, reason: str) -> None: ...
    def part(self, rank: int) -> None: ...
    def joined(self, rank: int) -> bool: ...
    def over(self, rank: int) -> bool: ...
    def shut_down(self, rank: int) -> None: ...
    def finish_s(self, rank: int) -> float: ...

def measure(
    operation: str,
    algorithm: str,
    ranks: int,
    bytes: int,
    nnz: int = 0,
    overlap: float = 0.0,
    switch_factor: float = 1.0,
    indices: IndexFormat = ...,
    values: ValueEncoding = ...,
    root: int = 0,
    payloads: bool = False,
    seed: int = 0,
    calls: int = 1,
    costs: dict[str, float] = ...,
    links: bool = False,
    timeline: bool = False,
    packs_values: bool = False,
    keep: int = 0,
) -> dict[str, Any]: ...
def explore(first_seed: int, seeds: int, first_ranks: int, last_ranks: int, only: str = "") -> str: ...
def replay(seed: int, first_ranks: int, last_ranks: int) -> tuple[str, int, str]: ...
def ucx_version() -> str: ...
def join_remedy(reason: str) -> str: ...
def set_engine_core(core: int) -> None: ...
def report_on_signal(signal: int) -> None: ...
def leave_threads_behind() -> None: ...
def set_purpose(purpose: int) -> int:
    """Of this thread's next collectives: ranks whose calls are for different ones do not match. Returns the last one;
    0: none."""
