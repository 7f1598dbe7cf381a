"""The GPU's kernels for tests: as if they worked on numpy arrays, so that they can stand where the CPU's stand.

They run on the GPU, if there is one that torch sees, else in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="GPU kernels work on torch tensors")
pytest.importorskip(
    "triton", minversion="3.4", reason="GPU kernels are compiled, or interpreted, by Triton 3.4 or newer"
)

import triton  # noqa: E402

if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    pytest.skip("there is a GPU, but this torch does not see it: set TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
SMALL_BLOCK = 64 if DEVICE == "cpu" else 256
"""Elements of a program in tests: on a GPU as many as threads, each of which then has one of its own."""


def _spare_the_interpreter() -> None:
    """It puts its own functions into triton.language for every call of a function in a kernel, and takes them out again
    behind each kernel, though nothing is compiled in this process; it would copy tensors to the host and back, where
    they are already; and it would look up numpy's types in a table that it makes each time. Without sparing, these take
    more than half of its time. Half of the rest are types and shapes of blocks, which it makes anew for each operation,
    checks of integers for overflow, whose result it uses only in debug mode, and functions around each operation."""
    from triton.language import core
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    describe, make = core.block_type.__init__, core.tensor.__init__
    described: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {(): {}}
    """By shape: what tensors of it say of that."""

    def describe_once(self: Any, element_ty: Any, shape: Any) -> None:
        of_tensors = tuple(one.value if isinstance(one, core.constexpr) else one for one in shape)
        if isinstance(element_ty, core.pointer_type):  # it cannot be hashed
            describe(self, element_ty, shape)
            self.of_tensors = shapes.setdefault(of_tensors, {})
            return
        key = element_ty, of_tensors
        if key not in described:
            describe(self, element_ty, shape)
            described[key] = {**vars(self), "of_tensors": shapes.setdefault(of_tensors, {})}
        vars(self).update(described[key])

    def make_with_known_shape(self: Any, handle: Any, kind: Any) -> None:
        known = kind.of_tensors if kind.is_block() else shapes[()]
        if not known:
            make(self, handle, kind)
            known.update(numel=self.numel, shape=self.shape)
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = known["numel"], known["shape"]

    core.block_type.__init__, core.tensor.__init__ = describe_once, make_with_known_shape

    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, given, named: (list(given), dict(named))
    executor._restore_args_dev = lambda self, *arguments: None
    look_up, number = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, interpreter.tl.block_type) else kind  # the block cannot be hashed
        return look_up(element) if isinstance(element, interpreter.tl.pointer_type) else number(element)

    interpreter._get_np_dtype = numpy_type
    patch, patched = interpreter._patch_lang, set()

    class Kept:
        def restore(self) -> None:
            pass

    @functools.cache
    def patch_once(function: Any) -> Kept:
        modules = {id(value) for value in function.__globals__.values() if isinstance(value, ModuleType)}
        seen = frozenset(modules & {id(interpreter.tl), id(interpreter.tl.core)})
        if seen not in patched:
            patch(function)
            patched.add(seen)
        function.__signature__ = inspect.signature(function)  # which each launch asks for twice
        return Kept()

    interpreter._patch_lang = patch_once

    def call_at_once(obj: Any, name: str, member: Any, builder: Any, scope: Any = None) -> None:
        """The function itself, instead of two around it that give it, and want, its argument ``_semantic``."""
        inner = getattr(member, "__wrapped__", member)

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return inner(*arguments, **named)

        (scope.set_attr if scope else setattr)(obj, name, called)  # Triton 3.4 has no scopes

    interpreter._patch_attr = call_at_once
    _remember_types()
    _remember_operands()


def _remember_types() -> None:
    """Types of one name are one. The interpreter would make those of blocks anew for each operation, and compare them
    by the texts of their names and by their shapes, as tuples of Triton's; it would also look at the size of numpy's
    elements behind each operation of its own."""
    from triton.language import core
    from triton.runtime import interpreter

    unwrap, are_equal, with_element = core._unwrap_if_constexpr, core.dtype.__eq__, core.block_type.with_element_ty
    semantic, builder = type(interpreter.interpreter_semantic), type(interpreter.interpreter_builder)
    make_block, broadcast, cast = builder.get_block_ty, semantic.broadcast_impl_value, semantic.cast
    sequences = list, tuple, core.tuple
    kept: dict[tuple[Any, ...], Any] = {}

    def unwrap_at_once(one: Any) -> Any:
        if type(one) is core.constexpr:
            return one.value
        return unwrap(one) if isinstance(one, sequences) else one

    def with_element_once(self: Any, element: Any) -> Any:
        key = self.name, element.name
        if key not in kept:
            kept[key] = with_element(self, element)
        return kept[key]

    def make_block_once(self: Any, element: Any, shape: Any) -> Any:
        key = element.name, *shape
        if key not in kept:
            kept[key] = make_block(self, element, shape)
        return kept[key]

    def broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        kinds = lhs.type, rhs.type
        if kinds[0].is_block() and kinds[1].is_block() and kinds[0].of_tensors is kinds[1].of_tensors:
            return lhs, rhs
        return broadcast(self, lhs, rhs)  # type: ignore[no-any-return]

    def cast_at_once(self: Any, one: Any, target: Any, rounding: Any = None) -> Any:
        """Between integers; all else as ever."""
        source, element = one.dtype, target.scalar
        if source is element or source.name == element.name:
            return one
        if not source.is_int() or not element.is_int() or element.is_bool():
            return cast(self, one, target, rounding)
        if one.type.is_block():
            target = one.type.with_element_ty(element)
        is_signed = source.is_int_signed() and not source.is_bool()
        return core.tensor(self.builder.create_int_cast(one.handle, target.to_ir(self.builder), is_signed), target)

    core._unwrap_if_constexpr = unwrap_at_once
    core.dtype.__eq__ = lambda self, other: self is other or are_equal(self, other)
    core.block_type.with_element_ty, builder.get_block_ty = with_element_once, make_block_once
    semantic.broadcast_impl_value, semantic.cast = broadcast_what_differs, cast_at_once
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _remember_operands() -> None:
    """Operands of one type are taken as they are, and a number beside a block is made one once. The interpreter would
    find out for each operation anew what types, casts and shapes these come to, which took a third of its time."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_type_checking_impl
    builder = interpreter.interpreter_builder
    numbers = {bool, int, float}
    made: dict[tuple[Any, ...], Any] = {}
    """What stands for a number, by the block or scalar beside it, and by the operation's rules."""
    spread: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    """The types that operands become, by their own; ``None``: an operand stays as it is."""

    def check_once(self: Any, lhs: Any, rhs: Any, *how: Any, **named: Any) -> tuple[Any, Any]:
        if type(lhs) is not core.tensor:
            return check(self, lhs, rhs, *how, **named)  # type: ignore[no-any-return]
        if type(rhs) is core.tensor:
            key = lhs.type.name, rhs.type.name, *how, *named.items()
            if key in spread:
                return become(self, lhs, spread[key][0]), become(self, rhs, spread[key][1])
            found = check(self, lhs, rhs, *how, **named)
            given = lhs, rhs
            if all(keeps_shape(new.type, old.type) for new, old in zip(found, given, strict=True)):
                spread[key] = tuple(None if new is old else new.type for new, old in zip(found, given, strict=True))
            return found  # type: ignore[no-any-return]
        if type(rhs) not in numbers:
            return check(self, lhs, rhs, *how, **named)  # type: ignore[no-any-return]
        key = lhs.type.name, type(rhs), rhs, *how, *named.items()
        if key in made:
            return lhs, made[key]
        found = check(self, lhs, rhs, *how, **named)
        if found[0] is lhs:
            found[1].handle.data.flags.writeable = False
            made[key] = found[1]
        return found  # type: ignore[no-any-return]

    def keeps_shape(new: Any, old: Any) -> bool:
        return not old.is_block() or new.of_tensors is old.of_tensors

    def become(self: Any, one: Any, kind: Any) -> Any:
        if kind is None:
            return one
        if one.dtype.name != kind.scalar.name:
            one = self.cast(one, kind.scalar)
        if not kind.is_block() or one.type.is_block():
            return one
        return core.tensor(builder.create_splat(kind, one.handle), kind)

    semantic.binary_op_type_checking_impl = check_once


if DEVICE == "cpu":
    import kernel_memory

    _spare_the_interpreter()
    kernel_memory.BETWEEN.add(__file__)
    kernel_memory.watch()


def turn_blocks_round(patch: pytest.MonkeyPatch) -> None:
    """The interpreter runs the last block first: on a GPU they run in no order at all."""
    if DEVICE != "cpu":
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx
    patch.setattr(builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z))


def tensor_of(array: np.ndarray) -> Any:
    """A copy on the device; numpy has no bfloat16: it is uint16 there."""
    tensor = torch.from_numpy(array.copy())
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).to(DEVICE)


def array_of(tensor: Any) -> np.ndarray:
    """The other way."""
    host = tensor.cpu()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()  # type: ignore[no-any-return]


class OnArrays:
    """``name(*arguments)`` calls that function with tensors in place of arrays, and copies back what it writes."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)

        def call(*arguments: Any) -> Any:
            tensors: dict[int, tuple[np.ndarray, Any]] = {}  # one array given twice is one tensor

            def given(one: Any) -> Any:
                if isinstance(one, np.ndarray):
                    return tensors.setdefault(id(one), (one, tensor_of(one)))[1]
                return [given(part) for part in one] if isinstance(one, list) else one

            result = function(*map(given, arguments))
            for array, tensor in tensors.values():
                array[:] = array_of(tensor)
            return result

        return call
