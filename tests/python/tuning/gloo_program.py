"""What the ranks of test_gloo_sums.py do."""

from __future__ import annotations

import json

from telegrad.launch import join
from telegrad.tuning import sweep
from telegrad.tuning.sweep import measure_gloo


def main(case: str) -> None:
    """``plain``, or ``torchless``: rank 1 does as if torch had no Gloo, or ``elsewhere``: no wait is long. Prints what
    was found, and whether a process group is left."""
    import torch.distributed as dist

    sweep._GLOO_JOIN_S = 2.0 if case == "elsewhere" else 30.0
    with join(timeout_s=60.0) as communicator:
        if case == "torchless" and communicator.rank == 1:
            dist.is_gloo_available = lambda: False
        said: list[str] = []
        found = measure_gloo(communicator, 0.01, lambda part, what: said.append(f"{part:g} {what}"))
        line = None if found is None else [found.startup_s, found.s_per_byte]
        left = dist.is_initialized()
        print(json.dumps({"found": line, "said": said, "left": left}), flush=True)
