"""``import telegrad.torch_backend`` makes ``telegrad`` a backend of torch.distributed, for tensors of the CPU and
of CUDA.

``init_process_group("telegrad")`` or ``init_process_group("cpu:telegrad")``; then DistributedDataParallel and the
collectives of ``torch.distributed`` run over telegrad, sub-groups by ``new_group`` too. docs/torch-backend.md says what
is not supported.
"""

from __future__ import annotations

from typing import Any

try:
    import torch.distributed as dist
except ImportError as error:
    raise ImportError("telegrad.torch_backend needs torch: pip install 'telegrad[torch]'") from error

from telegrad.comm.groups import ranks_in_job
from telegrad.torch_backend.options import Options
from telegrad.torch_backend.process_group import ProcessGroup

NAME = "telegrad"

__all__ = ["NAME", "Options", "ProcessGroup"]


def _create(options: Any, backend_options: Any) -> ProcessGroup:
    """What torch calls for each group of which this process is a member."""
    if not (backend_options is None or isinstance(backend_options, Options)):
        raise TypeError(
            f"pg_options={backend_options!r}: give telegrad.torch_backend.Options(...) to the backend {NAME!r}"
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


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
