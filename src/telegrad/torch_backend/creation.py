"""Makes the groups that torch asks the backend for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from telegrad.communicator.groups import ranks_in_job
from telegrad.torch_backend.options import Options
from telegrad.torch_backend.process_group import ProcessGroup


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
