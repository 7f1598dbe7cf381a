"""The GPU's selections for tests: as if they worked on numpy arrays, so that they can stand where the CPU's stand.

They run on the GPU, if there is one that torch sees, else in Triton's interpreter.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="GPU kernels work on torch tensors")
pytest.importorskip("triton", reason="GPU kernels are compiled, or interpreted, by Triton")

import triton  # noqa: E402

if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    pytest.skip("there is a GPU, but this torch does not see it: set TRITON_INTERPRET=1", allow_module_level=True)

from telegrad.ops.select import triton as kernels  # noqa: E402

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"


def _patch_the_language_once() -> None:
    """The interpreter puts its own functions into triton.language for every call of a function in a kernel, and takes
    them out again behind each kernel; that takes half of its time, and nothing is compiled in this process."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    class Kept:
        def restore(self) -> None:
            pass

    def patch_once(function: Any) -> Kept:
        modules = {id(value) for value in function.__globals__.values() if isinstance(value, ModuleType)}
        seen = frozenset(modules & {id(interpreter.tl), id(interpreter.tl.core)})
        if seen not in patched:
            patch(function)
            patched.add(seen)
        return Kept()

    interpreter._patch_lang = patch_once


if DEVICE == "cpu":
    _patch_the_language_once()


def tensor_of(array: np.ndarray) -> Any:
    """A copy on the device."""
    return torch.from_numpy(array.copy()).to(DEVICE)


class OnArrays:
    """``name(*arguments)`` calls that selection with tensors in place of arrays, and copies back what it writes."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(kernels, name)

        def call(*arguments: Any) -> Any:
            pairs = [(one, tensor_of(one)) if isinstance(one, np.ndarray) else (None, one) for one in arguments]
            result = function(*(given for _, given in pairs))
            for array, tensor in pairs:
                if array is not None:
                    array[:] = tensor.cpu().numpy()
            return result

        return call
