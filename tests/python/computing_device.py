"""Tensors of the fake device that its streams compute: what torch does with one is put into the thread's current
stream and runs there later, as kernels do; views are made at once. What would make the host wait for the device
(``item()``, a copy to the host) raises ``HostWaitError``, as ``torch.cuda.set_sync_debug_mode("error")`` does.

Memory that nobody holds is given, as by CUDA's allocator, to whatever its own stream does next: it is overwritten
there, also while other streams still have work with it, unless it was kept for them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from fake_device import DEVICE_TYPE, FakeCapture, FakeRuntime, FakeStream, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


_INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_}


class HostWaitError(RuntimeError):
    """The host would wait for the device."""


class Block:
    """Memory of the device that tensors share, made in the stream that was the current one."""

    def __init__(self, memory: torch.Tensor, runtime: FakeRuntime) -> None:
        self._storage, self._runtime = memory.untyped_storage(), runtime
        self._own: FakeStream | None = getattr(runtime._local, "stream", None)
        if isinstance(self._own, FakeCapture):
            self._own.made.append(self._storage)
        self.kept_for: list[FakeStream] = []
        self.is_seen = False  # a test has its plain memory

    def __del__(self) -> None:
        if self._own is not None and not self.is_seen:
            others = [self._runtime.record(stream) for stream in self.kept_for]
            self._own.put(functools.partial(_overwrite, self._storage, others))


def _overwrite(storage: torch.UntypedStorage, others: list[threading.Event]) -> None:
    if all(event.is_set() for event in others):  # else it is left alone for longer
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # type: ignore[call-overload]


class StreamTensor(FakeTensor):
    """``plain``: the same memory as a plain tensor."""

    plain: torch.Tensor
    runtime: FakeRuntime
    block: Block

    @classmethod
    def of(cls, memory: torch.Tensor, runtime: FakeRuntime, block: Block | None = None) -> StreamTensor:
        made: StreamTensor = torch.Tensor._make_subclass(cls, memory)  # type: ignore[assignment]
        made.plain, made.runtime, made.block = memory, runtime, block or Block(memory, runtime)
        return made

    @property
    def memory(self) -> torch.Tensor:
        """``plain``, for tests whose stream has come to it; it stays what it is."""
        self.block.is_seen = True
        return self.plain

    def cpu(self, *_: Any, **__: Any) -> Any:
        raise HostWaitError("cpu() makes the host wait for the device")

    def tolist(self) -> Any:
        raise HostWaitError("tolist() makes the host wait for the device")

    def new_tensor(self, *_: Any, **__: Any) -> Any:
        raise HostWaitError("new_tensor() copies from the host's memory, for which the host waits")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """torch itself knows no such device: what asks to be moved there is there."""
        to_host = any(isinstance(x, (str, torch.device)) and torch.device(x).type == "cpu" for x in args)
        to_host |= "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
        # torch's own functions that group tensors by device are told that of the memory.
        if to_host and not sys._getframe(1).f_globals["__name__"].startswith("torch."):
            raise HostWaitError("to('cpu') makes the host wait for the device")
        args = tuple(x for x in args if x != torch.device(DEVICE_TYPE, 0))
        if kwargs.get("device") == torch.device(DEVICE_TYPE, 0):
            kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "non_blocking")}
        return super().to(*args, **kwargs) if args or kwargs else self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        runtime = _runtime_of((args, kwargs))
        if func in _WAITING or _waits_by_its_arguments(func, args):
            raise HostWaitError(f"{func} makes the host wait for the device")
        if kwargs.get("device") == torch.device("meta"):  # of which only the shape is asked
            return func(*_each(_on_meta, args), **kwargs)
        plain_args, plain_kwargs = _each(_memory, args), _each(_memory, kwargs)
        if func is torch.ops.aten.copy_.default:
            _check_copy(args, runtime)
        if func.is_view:
            block = next(x for x in args if isinstance(x, StreamTensor)).block
            return _each(lambda x: _wrapped(x, runtime, block), func(*plain_args, **plain_kwargs))
        if func._schema.is_mutable:
            runtime.current_stream(torch.device(DEVICE_TYPE)).put(_without_gradients(func, plain_args, plain_kwargs))
            return _written(func, args, kwargs)
        made = _each(_room_for, _shapes_of(func, plain_args, plain_kwargs))

        def compute() -> None:
            _without_gradients(_fill, (made, func, plain_args, plain_kwargs), {})()

        runtime.current_stream(torch.device(DEVICE_TYPE)).put(compute)
        return _each(lambda x: _wrapped(x, runtime), made)


def computed_on(runtime: FakeRuntime, x: torch.Tensor) -> StreamTensor:
    """A copy of ``x`` there."""
    return StreamTensor.of(x.detach().clone(), runtime)


def model_on(runtime: FakeRuntime, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with its parameters and buffers there."""
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            if one is not None:
                module._parameters[name] = torch.nn.Parameter(computed_on(runtime, one), one.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = computed_on(runtime, buffer)
    return model


class _Unwaiting(TorchDispatchMode):
    """For kernels that torch launches on plain tensors: of a number that torch.where is given torch makes a tensor on
    the host, and copies it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING or func is torch.ops.aten.scalar_tensor.default:
            raise HostWaitError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


class ComputingRuntime(FakeRuntime):
    """A FakeRuntime whose copies and kernels know such tensors."""

    def keep(self, tensor: Any, stream: Any) -> None:
        if isinstance(tensor, StreamTensor):
            tensor.block.kept_for.append(stream)
        super().keep(_memory(tensor), stream)

    def launch(self, stream: Any, kernels: Callable[..., None], *tensors: torch.Tensor) -> None:
        plain = [_memory(x) for x in tensors]

        def run() -> None:
            with _Unwaiting():
                kernels(*plain)

        super().launch(stream, _without_gradients(run, (), {}))

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(target, StreamTensor) or isinstance(source, StreamTensor):
            assert target.dtype == source.dtype
            assert target.is_contiguous()
            assert source.is_contiguous()
            to, given = _memory(target), _memory(source)
            stream.put(lambda: to.copy_(given))
        else:
            super().copy(stream, target, source)


def _memory(x: Any) -> Any:
    return x.plain if isinstance(x, StreamTensor) else x


def _wrapped(x: Any, runtime: FakeRuntime, block: Block | None = None) -> Any:
    return StreamTensor.of(x, runtime, block) if isinstance(x, torch.Tensor) else x


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """``change`` of each leaf, as torch's tree_map, which takes several times as long as most operations here."""
    if isinstance(x, (list, tuple)):
        made = [_each(change, one) for one in x]
        return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
    if isinstance(x, dict):
        return {name: _each(change, one) for name, one in x.items()}
    return change(x)


def _runtime_of(arguments: Any) -> FakeRuntime:
    found: list[FakeRuntime] = []
    _each(lambda x: found.append(x.runtime) if isinstance(x, StreamTensor) else None, arguments)
    return found[0]


def _waits_by_its_arguments(func: Any, args: Any) -> bool:
    """torch.where copies a number to the device; a mask of places is counted there, for which the host waits."""
    if func.overloadpacket is torch.ops.aten.where:
        return not all(isinstance(x, StreamTensor) for x in args)
    if func.overloadpacket in _INDEXED:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return False


def _check_copy(args: Any, runtime: FakeRuntime) -> None:
    target, source = args[0], args[1]
    non_blocking = bool(args[2]) if len(args) > 2 else False
    on_device = [isinstance(x, StreamTensor) for x in (target, source)]
    if on_device[0] != on_device[1] and not non_blocking:
        raise HostWaitError("a copy between host and device makes the host wait")


def _on_meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, torch.device):
        return torch.device("meta")
    return x


_known_shapes: dict[Any, Any] = {}


def _shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors as long as the operation's results, on torch's device "meta", which takes milliseconds to say: once for
    all alike arguments."""
    try:
        key = func, _key_of(args), _key_of(kwargs)
        if key in _known_shapes:
            return _known_shapes[key]
    except TypeError:  # an argument that cannot be hashed
        return func(*_each(_on_meta, args), **_each(_on_meta, kwargs))
    found = _known_shapes[key] = func(*_each(_on_meta, args), **_each(_on_meta, kwargs))
    return found


def _key_of(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.size(), x.stride(), x.dtype
    if isinstance(x, (list, tuple)):
        return tuple(map(_key_of, x))
    if isinstance(x, dict):
        return tuple((name, _key_of(one)) for name, one in sorted(x.items()))
    return type(x), x


def _room_for(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(1)


def _fill(made: Any, func: Any, args: Any, kwargs: Any) -> None:
    computed = func(*args, **kwargs)
    for target, x in zip(_flat(made), _flat(computed), strict=True):
        target.copy_(x)


def _flat(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [one for part in x for one in _flat(part)] if isinstance(x, (list, tuple)) else []


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that writes in place returns what it has written."""
    if not func._schema.returns:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [given[one.name] for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _without_gradients(call: Callable[..., object], args: Any, kwargs: Any) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            call(*args, **kwargs)

    return run


def wait_for(streams: Any) -> None:
    """The host waits for all of these streams."""
    for stream in streams:
        stream.synchronize()
