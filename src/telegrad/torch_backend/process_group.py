"""ProcessGroup: what torch.distributed calls, as operations of a Communicator.

torch calls all but ``send`` and ``recv`` on every rank in the same order. The methods' names and arguments are torch's
own; it calls some by their C++ names from DistributedDataParallel and its functional collectives."""

from __future__ import annotations

import contextlib
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._compile import _disable_dynamo  # compiler.disable() takes a second or two for Dynamo, which few need

from telegrad import _core
from telegrad.communicator import Communicator
from telegrad.communicator.cuda.nccl import SumWork, check_setting
from telegrad.communicator.cuda.runtime import has_runtime
from telegrad.communicator.groups import ranks_in_job
from telegrad.communicator.rendezvous.store_exchange import StoreExchange, attempt
from telegrad.communicator.torch_terms import address_of
from telegrad.communicator.work import Work
from telegrad.cost import Tuning
from telegrad.cost.tuning import HOST_TRANSFER, NCCL
from telegrad.errors import TimeoutExpired
from telegrad.torch_backend import short_forms
from telegrad.torch_backend.group_work import DeviceGroupWork, GroupWork, begun
from telegrad.torch_backend.short_forms import with_short_form

# From tensors as torch programs give them to tensors that a Communicator takes, and back: of any dtype, and not
# contiguous.

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
BITWISE = {"BAND": "band", "BOR": "bor", "BXOR": "bxor"}
OPS = {"SUM": "sum", "PREMUL_SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max", **BITWISE}
"""What a Communicator calls torch's reductions."""


@dataclass(frozen=True)
class Operand:
    """``held``: contiguous memory with ``tensor``'s elements, ``tensor``'s own where it can be. ``op``: what the
    Communicator is to do with it; ``divisor``: what integers, of which it has sums only, are divided by afterwards."""

    tensor: torch.Tensor
    held: torch.Tensor
    op: str = "sum"
    divisor: int = 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Both."""
        return [self.tensor, self.held]

    @property
    def finish(self) -> Callable[[], None] | None:
        """To be called once ``held`` has its contents; ``None`` where nothing is left to do."""
        return None if self._is_own and self.divisor == 1 else self.give_back

    @property
    def _is_own(self) -> bool:
        return self.held.data_ptr() == self.tensor.data_ptr() and self.held.dtype == self.tensor.dtype

    def give_back(self) -> None:
        """Gives ``tensor`` what ``held`` has now; called once."""
        if self.divisor != 1:
            self.held.div_(self.divisor, rounding_mode="trunc")  # towards zero, as NCCL does
        if not self._is_own:
            self.tensor.copy_(self.held.view(self.tensor.shape))


def moved(tensor: torch.Tensor) -> Operand:
    """For what moves elements without looking at them. Raises ``TypeError`` for tensors of devices that have no
    streams here, and for those that are not dense."""
    _check(tensor)
    plain = tensor.detach()
    return Operand(tensor.detach(), plain.contiguous())


def written(tensor: torch.Tensor) -> Operand:
    """As ``moved``, for what is filled. Raises as ``check_places``."""
    check_places([tensor])
    return moved(tensor)


def apart(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """It, or a copy where it has memory in common with what is written."""
    shared = output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    return input.clone() if shared else input


def check_places(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ``ValueError`` for those that ``expand()`` has made, which cannot be filled: torch would refuse it when
    the others have their results."""
    for x in tensors:
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} has one place for several elements, and "
                "is to be filled: use tensor.clone()"
            )


def reduced(tensor: torch.Tensor, op: Any, size: int) -> Operand:
    """For sums and the like over ``size`` ranks: eight-bit floats in float32, averages of narrow integers as sums in 32
    bits, and all else as it is. Raises ``TypeError`` for what cannot be reduced."""
    _check(tensor)
    whole, name = tensor.detach(), name_of(op)
    plain = whole.resolve_conj()  # of which memory holds the opposite
    if plain.is_complex() and name not in ("SUM", "AVG", "PREMUL_SUM"):  # as torch's own backends
        raise TypeError(f"op={name} of {tensor.dtype}: complex numbers have sums and averages only")
    if name == "PREMUL_SUM":
        return _multiplied(whole, plain, op)
    if name in BITWISE and plain.is_floating_point():
        raise TypeError(f"op={name} of {plain.dtype}: bitwise reductions are of integers and booleans")
    if plain.dtype in _EIGHT_BITS:
        return Operand(whole, plain.float().contiguous(), OPS[name])
    if name == "AVG" and not (plain.is_floating_point() or plain.is_complex()):
        if plain.dtype == torch.bool:
            raise TypeError("op=AVG of torch.bool: booleans have no averages; use tensor.float()")
        wide = plain.to(torch.int32) if plain.dtype in _NARROW else plain
        return Operand(whole, wide.contiguous(), OPS["SUM"], size)
    return Operand(whole, plain.contiguous(), OPS[name])


def _multiplied(whole: torch.Tensor, plain: torch.Tensor, op: Any) -> Operand:
    """What each rank adds of a sum with a factor of its own (``PREMUL_SUM``)."""
    if not (plain.is_floating_point() or plain.is_complex()):
        raise TypeError(f"op=PREMUL_SUM of {plain.dtype}: its factor is for floats and complex numbers")
    state = op.__getstate__() if hasattr(op, "__getstate__") else None
    if not (isinstance(state, tuple) and len(state) == 2):
        raise ValueError("op=PREMUL_SUM has no factor: make one with torch.distributed._make_nccl_premul_sum(factor)")
    held = plain.float() if plain.dtype in _EIGHT_BITS else plain
    return Operand(whole, (held * state[1]).to(held.dtype).contiguous())


def name_of(op: Any) -> str:
    """``SUM``, ``AVG``, … of torch's ``ReduceOp``, whichever of its types it has."""
    return next(name for name in OPS if op == getattr(dist.ReduceOp, name))


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" and not has_runtime(tensor.device.type):
        raise TypeError(
            f"a tensor on {tensor.device}: the backend 'telegrad' is for tensors of the CPU and of CUDA; use "
            "tensor.cpu(), or a group with another backend for that device"
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout}: give a dense one; all_reduce takes sparse_coo tensors too"
        )


# The purpose of a call of torch's, where the Communicator's operation does not say it: ranks that call different
# operations raise.


@contextlib.contextmanager
def compared(operation: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """In it this thread's collectives match only those of ranks that say the same: an operation's name, dtypes and
    numbers of elements of ``tensors``, and what was said around it."""
    before = _core.set_purpose(0)
    said = repr((before, operation, [(x.dtype, x.numel()) for x in tensors]))
    _core.set_purpose(zlib.crc32(said.encode()) or 1)
    try:
        yield
    finally:
        _core.set_purpose(before)


def compared_as_given(
    tensors: Sequence[torch.Tensor], operands: Sequence[Operand], op: str
) -> contextlib.AbstractContextManager[None]:
    """The same, where a sum of ``operands`` says less than torch's call of ``tensors`` does: several that are summed as
    one, those that are summed in another dtype, averages of integers, and sums with factors."""
    alike = all(x.dtype == one.held.dtype and one.divisor == 1 for x, one in zip(tensors, operands, strict=True))
    as_given = len(tensors) <= 1 and alike and op != "PREMUL_SUM"
    return contextlib.nullcontext() if as_given else compared(op, tensors)


# Options of the Communicator behind a group, which torch hands through.


@dataclass(frozen=True)
class Options:
    """``init_process_group("telegrad", pg_options=Options(...))`` and ``new_group(pg_options=...)``: the arguments of
    these names of ``Communicator.from_torch``, which checks them. A group that is given none has the defaults."""

    liveness_timeout_s: float | None = 8.0
    interface: str | None = None
    tuning: Tuning | str | None = "auto"
    device_algorithm: str = "auto"

    @property
    def _timeout(self) -> None:
        """torch's device meshes ask for it (``backend_override``): their groups have the default."""


# NCCL for the ranks of a group of this backend: it sums CUDA tensors there, as in torch's own groups.


class OwnNccl:
    """See telegrad.communicator.cuda.nccl.SumGroup. Its ranks connect in the first sum, which all begin. ``session``:
    gives then a name that no group before this one had in ``store``."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, session: Callable[[], str]) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._session = session
        self._lock = threading.Lock()
        self._backend: Any = None

    def begin_sum(self, x: torch.Tensor) -> SumWork:
        """As a SumGroup's."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        if hasattr(options, "asyncOp"):
            options.asyncOp = True  # on a stream of NCCL's own; torch that has no such option does that in any case
        work: SumWork = self._opened().allreduce([x], options)
        return work

    def close(self) -> None:
        """Ends what is under way; called twice it does nothing."""
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            # Older ones of torch, 2.6 among them, have it by the other name.
            (backend.shutdown if hasattr(backend, "shutdown") else backend._shutdown)()

    def _opened(self) -> Any:
        with self._lock:
            if self._backend is None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                store = PrefixStore(f"nccl/{self._session()}", self._store)
                self._backend = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            return self._backend


def own_nccl(
    setting: str, store: Any, rank: int, size: int, timeout: timedelta, session: Callable[[], str]
) -> OwnNccl | None:
    """``None`` where ``setting`` (``device_algorithm``) forbids it, or torch has no NCCL. Raises ``ValueError`` where
    it demands NCCL and torch has none, and for what is no setting."""
    if check_setting(setting) == HOST_TRANSFER:
        return None
    if dist.is_nccl_available():
        return OwnNccl(store, rank, size, timeout, session)
    if setting == NCCL:
        raise ValueError(
            f"device_algorithm={setting!r} needs a torch that was built with NCCL, and this one was not: install "
            "torch for CUDA, or give device_algorithm='auto'"
        )
    return None


# torch.compile calls the methods of a group and does not compile them.

Group = TypeVar("Group", bound=type)

_WHEN_MADE = {"__init__", "getBackendName", "_set_group_name", "_set_group_desc", "_get_backend"}
"""What torch calls of every group, also where nothing is compiled; these need no communicator."""


def uncompiled(group: Group) -> Group:
    """Compiled programs call the methods of this class as they are: Dynamo takes a process group for one of torch's
    own, which has no attributes but those it knows. It is imported when one of them is first called."""
    for name, method in list(vars(group).items()):
        if isinstance(method, FunctionType) and name not in _WHEN_MADE:
            setattr(group, name, _disable_dynamo(method))
    return group


# torch's stubs know more forms of these methods than torch calls.
# mypy: disable-error-code="override, assignment"


Tensors = list[torch.Tensor]


@uncompiled
class ProcessGroup(dist.ProcessGroup):
    """A group of torch's whose operations ``communicator`` performs. torch makes it: ``init_process_group("telegrad")``
    and ``new_group(backend="telegrad")``.

    Operations begin at once and run in the background; ``async_op=True`` gives a Work whose ``wait()`` fills the
    tensors. What fails raises ``TransportError`` in ``wait()``, inside DDP a ``RuntimeError`` with its message."""

    def __init__(self, communicator: Communicator, nccl: OwnNccl | None = None) -> None:
        super().__init__(communicator.rank, communicator.world_size)  # type: ignore[call-arg]  # the form for subclasses
        self.communicator, self._nccl = communicator, nccl
        self._name = self._description = ""

    @classmethod
    def join(
        cls,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Options | None = None,
        job_ranks: Sequence[int] = (),
    ) -> ProcessGroup:
        """The ranks of a group find each other by its store; ``timeout`` bounds that and each of its operations.
        ``job_ranks``: see ``Communicator.from_exchange``."""
        options = Options() if options is None else options
        seconds = timeout.total_seconds()
        store = PrefixStore("telegrad", store)
        call = "init_process_group() or new_group()"
        exchange = StoreExchange(store, rank, size, seconds, call=call, attempt=attempt(), address=address_of(store))
        nccl = own_nccl(options.device_algorithm, store, rank, size, timeout, lambda: exchange.session)
        communicator = Communicator.from_exchange(
            rank,
            size,
            exchange,
            timeout_s=seconds,
            liveness_timeout_s=options.liveness_timeout_s,
            interface=options.interface,
            tuning=options.tuning,
            device_algorithm=options.device_algorithm,
            device_group=nccl,
            job_ranks=job_ranks,
        )
        return cls(communicator, nccl)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "telegrad"

    # torch's own keep names in C++ backends, of which this group has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    # torch asks them of a device's backend, as init_process_group(device_id=) does.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        """Asked by what needs a group for CPU tensors, as ``torch.distributed.checkpoint.async_save``."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if device.type != "cpu" and not has_runtime(device.type):
            raise ValueError(
                f"device={device}: the backend 'telegrad' is for tensors of the CPU and of CUDA; make another group"
            )
        return self

    @property
    def group_name(self) -> str:
        """As torch has named it: functional collectives find the group by it."""
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def set_timeout(self, timeout: timedelta) -> None:
        """Raises ``NotImplementedError``: ranks have agreed on it when they joined."""
        raise NotImplementedError(
            f"set_timeout({timeout}): a group of the backend 'telegrad' keeps the timeout that it was made with; make "
            "another group, or give wait() a timeout"
        )

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Raises ``NotImplementedError``: torch 2.15 runs hooks in its dispatcher, which this group bypasses."""
        raise NotImplementedError(
            f"hook_id={hook_id}: a group of the backend 'telegrad' runs no hooks around its collectives; wrap the calls"
        )

    register_post_hook = register_pre_hook

    def shutdown(self) -> None:
        """Closes the communicator: what ``destroy_process_group`` calls."""
        self.communicator.close()
        if self._nccl is not None:
            self._nccl.close()

    def abort(self) -> None:
        self.communicator.abort("the process group was aborted")

    # Reductions

    @with_short_form(short_forms.allreduce, tensor="tensors")
    def allreduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        (tensor,) = tensors
        if tensor.layout == torch.sparse_coo:
            return self._allreduce_sparse(tensor, opts)
        return self._all_reduced(tensors, opts)

    @with_short_form(short_forms.allreduce)
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> GroupWork:
        return self._all_reduced(tensors, opts)

    @with_short_form(short_forms.reduce, tensors="tensor")
    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        (tensor,) = tensors
        root: int = opts.rootRank
        if root == self.rank():
            check_places(tensors)
        op = name_of(opts.reduceOp)
        if tensor.device.type != "cpu" and self._nccl is not None:  # which sums to all ranks, and faster
            copy = tensor.detach().clone()
            then = (lambda: tensor.detach().copy_(copy)) if root == self.rank() else None
            with compared(f"reduce to {root}", tensors):
                return self._all_reduced([copy], opts, then, [tensor])
        operand = reduced(tensor, opts.reduceOp, self.size())
        with compared_as_given(tensors, [operand], op):
            work = self.communicator.reduce(operand.held, root, operand.op, async_op=True)
        return begun([work], tensors, operand.finish if root == self.rank() else None, operand.tensors)

    @with_short_form(short_forms.reduce_scatter, output_tensors="output", input_tensors="input")
    def reduce_scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> GroupWork:
        (out,), (blocks,) = output_tensors, input_tensors
        self._check_blocks(blocks, "input_list")
        own = blocks[self.rank()]
        if own.numel() != out.numel() or own.dtype != out.dtype:
            raise ValueError(
                f"output has {out.numel()} elements of {out.dtype}, but input_list[{self.rank()}] has {own.numel()} of "
                f"{own.dtype}: give both the same"
            )
        return self._reduce_scattered(out, _joined(blocks), [block.numel() for block in blocks], opts)

    @with_short_form(short_forms.reduce_scatter_single, outputTensor="output", inputTensor="input")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> GroupWork:
        self._check_whole("input", input, "output", output)
        input = apart(input, output)
        return self._reduce_scattered(output, input, [output.numel()] * self.size(), opts)

    @with_short_form(short_forms.reduce_scatter_single, outputs="output", inputs="input")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        return _all_of([self.reduce_scatter_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    # Moves

    @with_short_form(short_forms.broadcast, tensors="tensor")
    def broadcast(self, tensors: Tensors, opts: Any) -> GroupWork:
        (tensor,) = tensors
        gives = opts.rootRank == self.rank()
        operand = moved(tensor) if gives else written(tensor)
        work = self.communicator.broadcast(operand.held, opts.rootRank, async_op=True)
        return begun([work], tensors, None if gives else operand.finish, operand.tensors)

    @with_short_form(short_forms.allgather, input_tensors="input_tensor")
    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> GroupWork:
        (blocks,), (tensor,) = output_tensors, input_tensors
        self._check_blocks(blocks, "tensor_list")
        own = blocks[self.rank()]
        if own.numel() != tensor.numel() or own.dtype != tensor.dtype:
            raise ValueError(
                f"tensor_list[{self.rank()}] has {own.dtype} of shape {tuple(own.shape)}, but this rank's tensor has "
                f"{tensor.dtype} of {tuple(tensor.shape)}: give tensor_list[r] the dtype and shape of rank r's tensor"
            )
        gathered = _room_for(blocks)
        counts = [block.numel() for block in blocks]
        work = self.communicator.all_gather(_flat(tensor), out=gathered, counts=counts, async_op=True)
        return begun([work], blocks, lambda: _deal(gathered, blocks), blocks)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """``output_lists``: by rank, then by tensor."""
        by_tensor = [[of_rank[i] for of_rank in output_lists] for i in range(len(inputs))]
        return _all_of([self.allgather([blocks], [x]) for blocks, x in zip(by_tensor, inputs, strict=True)])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        return self._gathered(output, input, self.communicator.all_gather)

    def _gathered(self, output: torch.Tensor, input: torch.Tensor, gather: Callable[..., Any]) -> GroupWork:
        self._check_whole("output", output, "input", input)
        operand = written(output)
        work = gather(_flat(input), out=operand.held.view(self.size(), input.numel()), async_op=True)
        return begun([work], [output], operand.finish, operand.tensors)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        return _all_of([self.all_gather_single(out, x) for out, x in zip(outputs, inputs, strict=True)])

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> GroupWork:
        """``torch.distributed.gather_single`` and ``gather_into_tensor`` of torch 2.15."""
        gather = functools.partial(self.communicator.gather, root=opts.rootRank)
        if self.rank() != opts.rootRank:
            return begun([gather(_flat(input), async_op=True)], [])
        return self._gathered(output, input, gather)

    @with_short_form(short_forms.gather, input_tensors="input_tensor")
    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> GroupWork:
        (tensor,), root = input_tensors, opts.rootRank
        if self.rank() != root:
            return begun([self.communicator.gather(_flat(tensor), root, async_op=True)], [])
        (blocks,) = output_tensors
        self._check_blocks(blocks, "gather_list", like=tensor)
        check_places(blocks)
        gathered = tensor.new_empty(self.size(), tensor.numel())
        work = self.communicator.gather(_flat(tensor), root, out=gathered, async_op=True)
        return begun([work], blocks, lambda: _deal(gathered.view(-1), blocks), blocks)

    @with_short_form(short_forms.scatter, output_tensors="output_tensor")
    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> GroupWork:
        (out,), root = output_tensors, opts.rootRank
        operand = written(out)
        blocks = None
        if self.rank() == root:
            (given,) = input_tensors
            self._check_blocks(given, "scatter_list", like=out)
            blocks = _joined(given).view(self.size(), out.numel())
        work = self.communicator.scatter(blocks, operand.held.view(-1), root, async_op=True)
        return begun([work], output_tensors, operand.finish, operand.tensors)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> GroupWork:
        for name, blocks in (("output_tensor_list", output_tensors), ("input_tensor_list", input_tensors)):
            self._check_blocks(blocks, name)
        given, taken = input_tensors[self.rank()], output_tensors[self.rank()]
        if given.numel() != taken.numel() or given.dtype != taken.dtype:
            raise ValueError(
                f"input_tensor_list[{self.rank()}] has {given.dtype} of shape {tuple(given.shape)}, but "
                f"output_tensor_list[{self.rank()}] {taken.dtype} of {tuple(taken.shape)}: what a rank keeps for "
                "itself is one tensor, give both the same"
            )
        received = _room_for(output_tensors)
        work = self.communicator.all_to_all(
            _joined(input_tensors),
            out=received,
            send_counts=[block.numel() for block in input_tensors],
            receive_counts=[block.numel() for block in output_tensors],
            async_op=True,
        )
        return begun([work], output_tensors, lambda: _deal(received, output_tensors), output_tensors)

    @with_short_form(short_forms.all_to_all_single)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        """Split sizes count rows; none: as many for each rank."""
        operand = written(output)
        work = self.communicator.all_to_all(
            _flat(apart(input, output)),
            out=operand.held.view(-1),
            send_counts=self._elements(input, input_split_sizes, "input"),
            receive_counts=self._elements(output, output_split_sizes, "output"),
            async_op=True,
        )
        return begun([work], [output], operand.finish, operand.tensors)

    @with_short_form(short_forms.barrier)
    def barrier(self, opts: Any = None) -> GroupWork:
        """Of the ranks' hosts: what is in their streams is not waited for."""
        return begun([self.communicator.barrier(async_op=True)], [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says who has not come, within ``timeout``; then the group is of no more use. torch's function
        of this name asks for Gloo: call the group's. ``wait_all_ranks`` is of no account: all of them are named."""
        work = self.barrier()
        try:
            work.wait(timedelta(0) if timeout is None else timeout)
        except TimeoutExpired as error:
            absent = self._absent()
            text = (
                f"monitored_barrier on rank {self.rank()} timed out after {timeout}: rank "
                f"{', '.join(map(str, absent)) or 'unknown'} has not called it, as far as this rank has heard"
            )
            self.communicator.abort(text)
            peer = absent[0] if absent else None
            raise TimeoutExpired(text, rank=self.rank(), peer=peer, operation="monitored_barrier") from error

    def _absent(self) -> list[int]:
        """The ranks that have called fewer operations than this one, as their heartbeats say."""
        report = self.communicator.report()
        return [peer["rank"] for peer in report["peers"] if (peer["called"] or 0) < report["called"]]

    # Between two ranks

    def send(self, tensors: Tensors, dst_rank: int, tag: int) -> GroupWork:
        (tensor,) = tensors
        work = self.communicator.send(moved(tensor).held, dst_rank, tag=tag, async_op=True)
        return begun([work], tensors)

    def recv(self, tensors: Tensors, src_rank: int | None, tag: int) -> GroupWork:
        (tensor,) = tensors
        operand = written(tensor)
        work = self.communicator.recv(operand.held, src_rank, tag=tag, async_op=True)
        return begun([work], tensors, operand.finish, operand.tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> GroupWork:
        return self.recv(tensors, None, tag)

    # Names of torch before 2.13

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_reduced(
        self, tensors: Tensors, opts: Any, then: Callable[[], object] | None = None, used: Sequence[torch.Tensor] = ()
    ) -> GroupWork:
        """Tensors of one dtype are summed as one: each message has its price. ``then`` is called last and uses also
        the tensors ``used``."""
        check_places(tensors)
        op = name_of(opts.reduceOp)
        operands = [reduced(tensor, opts.reduceOp, self.size()) for tensor in tensors]
        works, parts = [], []
        with compared_as_given(tensors, operands, op):
            for dtype in dict.fromkeys(operand.held.dtype for operand in operands):
                alike = [operand for operand in operands if operand.held.dtype == dtype]
                whole = alike[0].held if len(alike) == 1 else _joined([operand.held for operand in alike])
                works.append(self.communicator.all_reduce(whole, alike[0].op, async_op=True))
                parts.append((whole, alike))

        def finish() -> None:
            for whole, alike in parts:
                if len(alike) > 1:
                    _deal(whole, [operand.held for operand in alike])
                for operand in alike:
                    operand.give_back()
            if then is not None:
                then()

        is_done = then is None and all(
            len(alike) == 1 and alike[0].finish is None for _, alike in parts
        )  # by the sum itself
        touched = [x for operand in operands for x in operand.tensors]
        return begun(works, tensors, None if is_done else finish, [*touched, *used])

    def _allreduce_sparse(self, tensor: torch.Tensor, opts: Any) -> GroupWork:
        if (op := name_of(opts.reduceOp)) in (*BITWISE, "PREMUL_SUM"):
            raise TypeError(f"op={op} of a sparse tensor is not supported: use SUM, AVG, PRODUCT, MIN or MAX")
        work: Work = self.communicator.all_reduce(tensor.detach(), OPS[op], async_op=True)

        def finish() -> None:
            with torch.no_grad():  # what detach() gives of a sparse tensor has entries of its own
                tensor.copy_(work.result())

        return GroupWork([work], [tensor], finish)

    def _reduce_scattered(self, out: torch.Tensor, x: torch.Tensor, counts: list[int], opts: Any) -> GroupWork:
        check_places([out])
        op = name_of(opts.reduceOp)
        source, target = (reduced(one, opts.reduceOp, self.size()) for one in (x, out))
        with compared_as_given([x], [source], op):
            work = self.communicator.reduce_scatter(
                source.held.view(-1), source.op, out=target.held.view(-1), counts=counts, async_op=True
            )
        return begun([work], [out], target.finish, target.tensors)

    def _check_whole(self, name: str, whole: torch.Tensor, other: str, block: torch.Tensor) -> None:
        wanted = block.numel() * self.size()
        if whole.numel() != wanted or whole.dtype != block.dtype:
            raise ValueError(
                f"{name} has {whole.numel()} elements of {whole.dtype}, but {other} has {block.numel()} of "
                f"{block.dtype} on each of {self.size()} ranks: {name} must have {wanted}"
            )

    def _check_blocks(self, blocks: Tensors, name: str, like: torch.Tensor | None = None) -> None:
        if len(blocks) != self.size():
            raise ValueError(f"{name} has {len(blocks)} tensors, but the group {self.size()} ranks: give one for each")
        if len({block.dtype for block in blocks}) > 1:
            raise ValueError(
                f"{name} has tensors of {', '.join(sorted({str(x.dtype) for x in blocks}))}: give one dtype"
            )
        for rank, block in enumerate(blocks):
            if like is not None and (block.shape != like.shape or block.dtype != like.dtype):
                raise ValueError(
                    f"{name}[{rank}] has {block.dtype} of shape {tuple(block.shape)}, but the tensor has {like.dtype} "
                    f"of {tuple(like.shape)}: give all the same"
                )

    def _elements(self, x: torch.Tensor, split_sizes: Sequence[int], name: str) -> list[int]:
        rows = x.shape[0] if x.dim() else 0
        if not split_sizes:
            if rows % self.size():
                raise ValueError(
                    f"{name} has {rows} rows, which {self.size()} ranks cannot share evenly: give {name}_split_sizes"
                )
            return [x.numel() // self.size()] * self.size()
        if len(split_sizes) != self.size() or sum(split_sizes) != rows:
            raise ValueError(
                f"{name}_split_sizes={list(split_sizes)} must be {self.size()} numbers of rows whose sum is {name}'s "
                f"{rows}"
            )
        return [size * (x.numel() // max(rows, 1)) for size in split_sizes]


def _all_of(works: Sequence[GroupWork]) -> GroupWork:
    def finish() -> None:
        for work in works:
            work.wait()

    operations = [one for work in works for one in work.operations]
    tensors = [tensor for work in works for tensor in work.tensors]
    in_streams = any(isinstance(work, DeviceGroupWork) for work in works)  # which have all that is to be done
    return begun(operations, tensors, None if in_streams else finish)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return moved(tensor).held.view(-1)


def _joined(blocks: Tensors) -> torch.Tensor:
    return torch.cat([_flat(block) for block in blocks])


def _room_for(blocks: Tensors) -> torch.Tensor:
    check_places(blocks)
    return moved(blocks[0]).tensor.new_empty(sum(block.numel() for block in blocks))


def _deal(whole: torch.Tensor, blocks: Tensors) -> None:
    """Gives each of ``blocks`` its elements of ``whole``, one after the other."""
    for block, part in zip(blocks, torch.split(whole, [block.numel() for block in blocks]), strict=True):
        block.detach().copy_(part.view(block.shape))


# The groups that torch asks the backend for.


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """A group by torch's ``options`` (store, rank, size, timeout) and the ``pg_options`` of the user. Raises
    ``TypeError`` if these are not ``Options``."""
    if not (backend_options is None or isinstance(backend_options, Options)):
        raise TypeError(
            f"pg_options={backend_options!r}: give telegrad.torch_backend.Options(...) to the backend 'telegrad'"
        )
    ranks = options.global_ranks_in_group  # none of the group that torch makes first, which is the job
    return ProcessGroup.join(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        backend_options,
        ranks_in_job(ranks, dist.get_world_size()) if ranks else (),
    )
