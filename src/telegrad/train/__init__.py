"""Training with torch: the hook for DistributedDataParallel. Needs torch."""

from telegrad.train.ddp import DDPState, ddp_hook

__all__ = ["DDPState", "ddp_hook"]
