"""Compiles selection kernels for GPUs that need not be there; prints what the code is like, as JSON.

python compile_kernels_program.py BACKEND ARCHITECTURE WARP [KERNEL], as cuda 90 32 fused_pass or hip gfx942 64
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from telegrad.ops.select.triton import cuts, draws, passes

BLOCK = {"BLOCK": 4096}
BOTH = {"FLIP": 0, "MASK": 0x7FFFFFFF}
NEGATIVE = {"FLIP": -0x80000000, "MASK": -1}
PASS = {"ADD": True, "SELECT": True, "MOMENTS": False}
CASES: list[tuple[JITFunction, dict[str, Any]]] = [
    (passes.fused_pass, {**BOTH, **BLOCK, **PASS}),
    (passes.fused_pass, {**NEGATIVE, **BLOCK, **PASS, "MOMENTS": True}),
    (passes.order_blocks, BLOCK),
    (passes.restore_blocks, BLOCK),
    (passes.move_listed, BLOCK),
    (passes.put_listed_back, BLOCK),
    (passes.normal_pass, {**BLOCK, "ADD": True}),
    (cuts.find_kth_of_few, {**NEGATIVE, **BLOCK, "LOWEST": 1}),
    (cuts.count_digits, {**BOTH, **BLOCK, "LOWEST": 0, "SHIFT": 20, "WIDTH": 11}),
    (cuts.find_digit, {"WIDTH": 11}),
    (cuts.count_cut, {**NEGATIVE, **BLOCK}),
    (cuts.move_cut, {**BOTH, **BLOCK, "LISTED": True}),
    (cuts.bucket_pass, {"ADD": True, "ROWS": 4, "WIDTH": 512}),
    (draws.draw_positions, BLOCK),
]
CALLED_BY_KERNELS = {"narrowed"}

FLOATS = {"residual", "gradient", "values", "to_values", "moved"}
INDICES = {"indices", "to_indices", "positions"}
NUMBERS = {"size", "room", "offset", "bucket", "per_bucket", "of_last", "k", "count", "call", "rank", "stream"}
SMALL_COUNTS = {"counts", "sides", "tops", "largest", "greater", "equal", "peaks"}
WHOLE_VECTORS = {"residual", "gradient", "size", "bucket"}  # aligned, as torch allocates, and of such lengths


def type_of(kernel: JITFunction, name: str) -> str:
    if name in FLOATS:
        return "*fp32"
    if name in NUMBERS:
        return "i32"
    if name.startswith("seed_"):
        return "i64"
    if name in ("sums", "squares"):
        return "*fp64"
    if name in SMALL_COUNTS:
        return "*i32"
    if name in INDICES and (name, kernel) not in (
        ("positions", passes.move_listed),
        ("positions", draws.draw_positions),
    ):
        return "*u32"
    return "*i64"


def compiled(kernel: JITFunction, constants: dict[str, Any], target: GPUTarget) -> dict[str, Any]:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(kernel, name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in WHOLE_VECTORS}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    text = compile(source, target=target, options={"num_warps": 8}).asm
    ptx = text.get("ptx", "")
    return {
        "kernel": kernel.__name__,
        "bytes": len(text["cubin" if target.backend == "cuda" else "hsaco"]),
        "vector_loads": len(re.findall(r"ld\.global\.v4", ptx)),
        "vector_stores": len(re.findall(r"st\.global\.v4", ptx)),
        "flushes_denormals": ".ftz" in ptx,
    }


if __name__ == "__main__":
    backend, architecture, warp, *only = sys.argv[1:]
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp))
    cases = [case for case in CASES if not only or case[0].__name__ in only]
    rows = [compiled(kernel, constants, target) for kernel, constants in cases]
    found = {
        name for module in (passes, cuts, draws) for name, one in vars(module).items() if hasattr(one, "arg_names")
    }
    json.dump(
        {"rows": rows, "left_out": sorted(found - CALLED_BY_KERNELS - {row["kernel"] for row in rows})}, sys.stdout
    )
