"""The backend ``telegrad`` of torch.distributed, for tensors of the CPU and of CUDA: its options and its groups.

``init_process_group("telegrad")`` or ``init_process_group("cpu:telegrad")``; then DistributedDataParallel and the
collectives of ``torch.distributed`` run over telegrad, sub-groups by ``new_group`` too. ``import torch`` registers the
backend; importing this module does so too, where ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` forbids that.
docs/reference/torch-backend.md says what is not supported.
"""

from __future__ import annotations

try:
    import torch.distributed as dist
except ImportError as error:
    raise ImportError("telegrad.torch_backend needs torch: pip install 'telegrad[torch]'") from error

if not dist.is_available():
    raise ImportError(
        "telegrad.torch_backend needs torch.distributed: install a torch that was built with USE_DISTRIBUTED=1"
    )

from telegrad.torch_backend.process_group import Options, ProcessGroup
from telegrad_autoload import NAME, register

__all__ = ["NAME", "Options", "ProcessGroup"]

register()
