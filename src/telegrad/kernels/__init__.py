"""Operations on arrays, one folder each.

``cpu`` calls the core's kernels, ``triton`` runs on a GPU; ``is_on_gpu`` says which of them an array is for. The
oracles of both are ``tests/python/*_reference.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def is_on_gpu(x: Any, name: str) -> bool:
    """Whether Triton's kernels are those for ``x``: a torch tensor on a GPU. A numpy array is none.

    ``name`` is what errors call it. Raises ``ModuleNotFoundError`` for a tensor on a GPU where Triton is not installed,
    ``ImportError`` where it is older than 3.4, and ``ValueError`` for a torch tensor elsewhere.
    """
    if isinstance(x, np.ndarray):
        return False
    try:
        import triton as compiler
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is a tensor on {x.device}, and kernels there need Triton: pip install telegrad[gpu]"
        ) from error
    knobs = getattr(compiler, "knobs", None)  # Triton 3.4 has them
    if x.device.type == "cpu" and not (knobs and knobs.runtime.interpret):
        raise ValueError(
            f"{name} is a torch tensor on the CPU: give the kernels for the CPU its memory, {name}.numpy(), or run "
            "those for GPUs in Triton's interpreter, with TRITON_INTERPRET=1"
        )
    if knobs is None:
        raise ImportError(
            f"{name} is a tensor on {x.device}, and kernels there need Triton 3.4 or newer, not "
            f"{compiler.__version__}: install torch 2.8 or newer, then pip install 'telegrad[gpu]'"
        )
    return True
