"""torchrun, whose ranks are forked from it, as its own options have it: it has imported what they import.

A rank that is executed imports torch, and torch's compiler as soon as it makes an optimizer: 3 s of processor time, and
torchrun has done both. A script must be named by its absolute path. Ranks are executed by ``test_site.py`` (as the
README says), ``test_ddp.py`` and ``test_named_backend.py``.
"""

from __future__ import annotations

import sys

import torch._dynamo
import torch.nn.parallel
import torch.optim  # noqa: F401
from torch.distributed.run import main

import telegrad.ddp  # noqa: F401

if __name__ == "__main__":
    main(["--run-path", "--start-method=fork", *sys.argv[1:]])
