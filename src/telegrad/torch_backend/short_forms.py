"""The short forms of a ProcessGroup's methods, ``group.allreduce(tensor)``, as the long ones that torch calls:
``group.allreduce([tensor], options)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from telegrad.torch_backend.group_work import GroupWork

Method = Callable[..., GroupWork]
_SUM = dist.ReduceOp.SUM


def with_short_form(short: Callable[..., tuple[Any, ...]], **renamed: str) -> Callable[[Method], Method]:
    """Makes a method of the long form one of both. ``short`` takes the short form's arguments but ``timeout``, and
    gives the long one's; ``renamed``: names that its arguments have in other forms. ``timeout``, a timedelta, is what
    the Work's ``wait()`` waits for at most, if it is given no other."""

    def decorate(long: Method) -> Method:
        @wraps(long)
        def method(self: Any, *arguments: Any, **named: Any) -> GroupWork:
            if "opts" in named or (arguments and _is_options(arguments[-1])):
                return long(self, *arguments, **named)
            timeout = named.pop("timeout", None)
            if arguments and (arguments[-1] is None or isinstance(arguments[-1], timedelta)):
                *rest, timeout = arguments
                arguments = tuple(rest)
            work = long(self, *short(*arguments, **{renamed.get(name, name): x for name, x in named.items()}))
            if timeout is not None:
                work.most = timeout
            return work

        return method

    return decorate


def _is_options(x: Any) -> bool:
    return hasattr(x, "reduceOp") or hasattr(x, "rootRank") or type(x).__name__.endswith("Options")


def _options(op: Any = _SUM, root: int = 0) -> SimpleNamespace:
    return SimpleNamespace(reduceOp=op, rootRank=root)


def _listed(x: Any) -> Any:
    """``[x]`` of one tensor."""
    return [x] if isinstance(x, torch.Tensor) else x


def _nested(blocks: Sequence[Any]) -> Sequence[Any]:
    """``[blocks]`` of one list of tensors."""
    return [blocks] if blocks and isinstance(blocks[0], torch.Tensor) else blocks


def allreduce(tensors: Any, op: Any = _SUM) -> tuple[Any, ...]:
    return _listed(tensors), _options(op)


def broadcast(tensor: Any, root: int = 0) -> tuple[Any, ...]:
    return _listed(tensor), _options(root=root)


def reduce(tensor: Any, root: int = 0, op: Any = _SUM) -> tuple[Any, ...]:
    return _listed(tensor), _options(op, root)


def allgather(output_tensors: Any, input_tensor: Any) -> tuple[Any, ...]:
    return _nested(output_tensors), _listed(input_tensor)


def gather(output_tensors: Any, input_tensor: Any, root: int = 0) -> tuple[Any, ...]:
    return _nested(output_tensors), _listed(input_tensor), _options(root=root)


def scatter(output_tensor: Any, input_tensors: Any, root: int = 0) -> tuple[Any, ...]:
    return _listed(output_tensor), _nested(input_tensors), _options(root=root)


def reduce_scatter(output: Any, input: Any, op: Any = _SUM) -> tuple[Any, ...]:
    return _listed(output), _nested(input), _options(op)


def reduce_scatter_single(output: Any, input: Any) -> tuple[Any, ...]:
    return output, input, _options()


def all_to_all_single(
    output: Any, input: Any, output_split_sizes: Sequence[int] = (), input_split_sizes: Sequence[int] = ()
) -> tuple[Any, ...]:
    return output, input, output_split_sizes, input_split_sizes


def barrier() -> tuple[Any, ...]:
    return ()
