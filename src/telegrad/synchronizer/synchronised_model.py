"""What a Synchronizer asks of a model, and of all ranks, before it begins."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import has_runtime
from telegrad.ddp.backward_watch import check_no_optimizer_in_backward
from telegrad.ddp.options import Cheapest, LowRank
from telegrad.errors import MismatchedCall
from telegrad.synchronizer.forward_hooks import check_takes_hooks
from telegrad.synchronizer.group_planning import TIMED
from telegrad.synchronizer.optimizer_step import check_steps_alone

_synchronised: dict[int, weakref.ref[nn.Parameter]] = {}  # parameters that have a Synchronizer, by id

STAGED_BYTES = 256 << 20
"""Of a model on a device at most so much, and one tensor, is in pinned memory at once while it is copied."""


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HOST_DTYPES = (torch.complex64, torch.complex128)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name. Raises ``ValueError`` where there are none, and for what a Synchronizer cannot hold."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not parameters:
        raise ValueError("model has no parameter that requires a gradient: there is nothing to synchronise")
    check_expanded(model)
    check_no_optimizer_in_backward(parameters, "the Synchronizer")
    for name, one in parameters.items():
        taken = one.dtype in _DTYPES or (one.dtype in _HOST_DTYPES and one.device.type == "cpu")
        if not _is_reached(one) or not taken:
            raise ValueError(
                f"parameter {name!r} is {one.dtype} on {one.device}: it must be of float32, float64, bfloat16 or "
                "float16, on the CPU or on CUDA, or complex64 or complex128, on the CPU. Use DistributedDataParallel "
                "for others"
            )
    for name, buffer in model.named_buffers():
        if not _is_reached(buffer) or buffer.layout != torch.strided:
            raise ValueError(
                f"buffer {name!r} is {buffer.layout} on {buffer.device}: it must be dense, on the CPU or on CUDA"
            )
    return parameters


def check_expanded(model: nn.Module) -> None:
    """Raises ``ValueError`` for a parameter or buffer whose elements share memory, which takes no copy."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, one in tensors:
            if one.layout == torch.strided and 0 in _strides_of_many(one):
                raise ValueError(
                    f"{kind} {name!r} of shape {tuple(one.shape)} is expanded, its elements share memory, so rank 0's "
                    f"cannot be copied there: make it with .expand(…).clone()"
                )


def _strides_of_many(x: torch.Tensor) -> list[int]:
    """Of the dimensions with more than one element."""
    sizes = zip(x.stride(), x.shape, strict=True)
    return [stride for stride, size in sizes if size > 1] if x.numel() else []


def _is_reached(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" or has_runtime(x.device.type)


def check_fits(plan: Any, compress: object) -> None:
    """Raises ``ValueError`` for a plan that does not go with that compression."""
    if plan == "greedy":
        raise ValueError("plan='greedy' looks at one cost, and compression has several: use plan='auto'")
    if isinstance(compress, LowRank) and plan == "optimal":
        raise ValueError(
            "plan='optimal' needs to know what groups cost, which depends on the shapes of a LowRank's matrices: use "
            "'auto' (groups of DDP's sizes), 'fixed', 'single', 'wfbp', or name the groups"
        )
    if isinstance(compress, Cheapest) and plan not in TIMED:
        raise ValueError(
            f"compress=Cheapest() is decided with the plan, and plan={plan!r} is not timed: use plan='auto'"
        )


def check_fits_nodes(plan: Any, compress: object, late: str) -> None:
    """Raises ``ValueError`` for what does not go with nodes of several ranks. ``late``: averages that come later than
    in their own step."""
    if plan in ("optimal", "greedy") or isinstance(compress, Cheapest):
        timed = f"plan={plan!r}" if plan in ("optimal", "greedy") else "compress=Cheapest()"
        raise ValueError(f"{timed} needs times of sums, which nodes lack: use 'auto'")
    if late:
        raise ValueError(f"node= shares averages in one order, and {late} waits for each in another: leave one out")


def check_waits(
    wait_in: str,
    delay: bool,
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    **options: Any,
) -> None:
    """Raises ``ValueError`` for ``options`` that do not go with waiting in the next forward pass, or with a delay."""
    plan, compress = options["plan"], options["compress"]
    if delay and wait_in != "backward":
        raise ValueError(f"delay=1 has the averages of the step before, and wait_in={wait_in!r} waits: leave one out")
    late = "delay=1" if delay else f"wait_in={wait_in!r}"
    if (delay or wait_in == "forward") and (plan in ("optimal", "greedy") or isinstance(compress, Cheapest)):
        what = "compress=Cheapest()" if isinstance(compress, Cheapest) else f"plan={plan!r}"
        raise ValueError(f"{what} is decided by when backward() ends, for which {late} does not wait: leave one out")
    if delay and getattr(compress, "feedback", None) == "steps":
        raise ValueError(
            "feedback='steps' holds steps of the learning rate of their pass, and delay=1 takes the next: use "
            "feedback='gradients'"
        )
    if wait_in != "forward":
        return
    for name in ("compress", "clip_norm"):
        if options[name] is not None:
            raise ValueError(f"{name}={options[name]!r:.80} is not for {late}: use wait_in='step'")
    for name, one in parameters.items():
        if type(one) is not nn.Parameter:
            raise ValueError(f"parameter {name!r} is a {type(one).__name__}, not a torch Parameter: use wait_in='step'")
    for optimizer in optimizers:
        check_steps_alone(optimizer)


def check_is_seen(model: nn.Module, plans: bool, wait_in: Any) -> None:
    """Raises ``ValueError`` where they need forward passes that cannot be seen. ``plans``: from times."""
    if plans or wait_in:
        check_takes_hooks(
            model, "give a plan that takes no times, such as plan='fixed', and no wait_in; its parts may be TorchScript"
        )


def check_free(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ``ValueError`` for a parameter that has a Synchronizer."""
    for name, one in parameters.items():
        held = _synchronised.get(id(one))
        if held is not None and held() is one:
            raise ValueError(f"parameter {name!r} has a Synchronizer already: close() that one first")


def ranks_apart(comm: Communicator, number: int) -> MismatchedCall:
    """What is raised where another rank is not in backward pass ``number``; it hears of it."""
    text = (
        f"rank {comm.rank} is in backward pass {number}, and another rank is not: such as where an exception has ended "
        "a pass on some ranks only; end the job on all ranks and go on from a checkpoint"
    )
    comm.abort(text)
    return MismatchedCall(text, rank=comm.rank, operation="all_reduce")


def claim(parameters: Iterable[nn.Parameter]) -> None:
    """They have a Synchronizer now."""
    _synchronised.update({id(one): weakref.ref(one) for one in parameters})


def release(parameters: Iterable[nn.Parameter]) -> None:
    """They have none any more."""
    for one in parameters:
        _synchronised.pop(id(one), None)


def copy_model_from_rank_0(model: nn.Module, comm: Communicator) -> None:
    """Parameters and buffers. Those on a device are copied in its stream, which may still be at it."""
    under_way = 0
    for tensor in (*model.parameters(), *model.buffers()):
        copy_from_rank_0(tensor.detach(), comm)
        under_way += tensor.nbytes
        if under_way >= STAGED_BYTES:
            comm.synchronize()
            under_way = 0


def copy_from_rank_0(tensor: torch.Tensor, comm: Communicator) -> None:
    """In place, whatever its strides, but for an expanded tensor, which ``check_expanded`` refuses."""
    whole = tensor.contiguous()
    comm.broadcast(whole, 0)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)
