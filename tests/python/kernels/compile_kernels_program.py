"""Compiles kernels for GPUs that need not be there; prints what the code is like, as JSON.

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

from telegrad.kernels import triton as shared
from telegrad.kernels.feedback import triton as feedback
from telegrad.kernels.select.triton import passes, passes_of_many
from telegrad.kernels.staging import DENSE
from telegrad.kernels.staging import triton as staging

BLOCK = {"BLOCK": 4096}
PASS_BLOCK = {"BLOCK": 512, "KNOWN": False}
BOTH = {"FLIP": 0, "MASK": 0x7FFFFFFF}
NEGATIVE = {"FLIP": -0x80000000, "MASK": -1}
PASS = {"HELD": False, "ADD": True, "SELECT": True, "MOMENTS": False}
MANY = {**BOTH, **BLOCK}
DIGITS = {"LOWEST": 0, "STRIDE": 1028}
GROUPS = {"WORDS": 16, "GROUP": 1024}
CASES: list[tuple[JITFunction, dict[str, Any]]] = [
    (passes.fused_pass, {**BOTH, **PASS_BLOCK, **PASS}),
    (passes.fused_pass, {**NEGATIVE, **PASS_BLOCK, **PASS, "MOMENTS": True}),
    (passes.fused_pass, {**BOTH, **PASS_BLOCK, **PASS, "HELD": True}),
    (passes.count_marks, {"GROUP": 1024}),
    (passes.take_marked, {"DECIDE": True, "FEWER": True, "CLEAR": False, "ENDS": False, "GROUP": 1024}),
    (passes.move_listed, BLOCK),
    (passes.put_listed_back, BLOCK),
    (passes.normal_pass, {**BLOCK, "ADD": True}),
    (passes.find_kth_of_few, {**NEGATIVE, **BLOCK, "LOWEST": 1, "CUT": True}),
    (passes.count_digits, {**BOTH, **BLOCK, "LOWEST": 0, "SHIFT": 23, "WIDTH": 8, "FIRST": True, "CUT": False}),
    (passes.count_digits, {**BOTH, **BLOCK, "LOWEST": 0, "SHIFT": 0, "WIDTH": 7, "FIRST": False, "CUT": True}),
    (passes_of_many.fused_pass_of_many, {**BOTH, "BLOCK": 512, "HELD": True, "ADD": True}),
    (passes_of_many.count_marks_of_many, GROUPS),
    (passes_of_many.take_marked_of_many, GROUPS),
    (passes_of_many.count_digits_of_many, {**MANY, **DIGITS, "SHIFT": 23, "WIDTH": 8, "FIRST": True, "CUT": False}),
    (passes_of_many.count_digits_of_many, {**MANY, **DIGITS, "SHIFT": 0, "WIDTH": 7, "FIRST": False, "CUT": True}),
    (passes_of_many.count_cut_of_many, MANY),
    (passes_of_many.move_cut_of_many, MANY),
    (passes.sample_bound, {**BOTH, "ADD": True, "SAMPLE": 8192, "UNLESS": 1 << 31}),
    (passes.count_cut, {**NEGATIVE, **BLOCK}),
    (passes.move_cut, {**BOTH, **BLOCK, "LISTED": True, "ALONE": False, "ENDS": False}),
    (passes.move_cut, {**BOTH, **BLOCK, "LISTED": False, "ALONE": True, "ENDS": False}),
    (passes.bucket_pass, {"ADD": True, "HELD": True, "ROWS": 4, "WIDTH": 512}),
    (passes.search_cut, {"LOWEST": 1}),
    (passes.normal_cut, {"LOWERED_BY": 0.9, "LOWERED_MOST": 20}),
    (passes.draw_positions, BLOCK),
    (passes_of_many.set_bounds, {"BEYOND": 1 << 31, "BLOCK": 128}),
    (passes_of_many.decide_reuse, {"SEARCHES": True, "HELD": True, "BLOCK": 128}),
    (passes_of_many.follow_reuse, {"GAIN": 0.1, "TINY": 1e-38, "HELD": True, "BLOCK": 128}),
]
WHOLE = {"BLOCK": 1024}
STAGED = {"to_count": "*i64", "to_values": "*i32"}
FEEDBACK = {"faults": "*i32", "momentum": "fp32"}
UNITS = {"wanted": "*fp64", "ratios": "*fp64"}
DRAWN = dict.fromkeys(("seed_low", "seed_high", "rank", "call"), "i32")
CODES = {"encoded": "*u8", "mine": "*u8", "out": "*fp32", "error": "*fp32"}
HALVES = {**CODES, "encoded": "*i16", "mine": "*i16"}
COLLECTED = {"counts": "*i64", "faults": "*i32", "most": "fp32"}
FORMATS = ((1, 16, 1024), (2, 16, 1024), (3, 8, 256), (3, 2, 1024), (4, 4, 1024), (5, 2, 512))
# Those with types of their own where a name says another thing than in a selection.
OTHER_CASES: list[tuple[JITFunction, dict[str, Any], dict[str, str]]] = [
    (staging.scatter_entries, {"ADDS": True, "KIND": 0, **WHOLE}, {"dense": "*fp32", "indices": "*i64"}),
    (staging.scatter_entries, {"ADDS": True, "KIND": 1, **WHOLE}, {"dense": "*i16", "values": "*i16"}),
    (staging.scatter_entries, {"ADDS": False, "KIND": 2, **WHOLE}, {"dense": "*i16", "values": "*i16"}),
    (staging.scatter_entries, {"ADDS": False, "KIND": 0, **WHOLE}, {"dense": "*fp32"}),
    (staging.stage_entries, {"BLOCK": 1024}, {**STAGED, "indices": "*i64", "count": "*i32", "values": "*i32"}),
    (staging.stage_entries, {"BLOCK": 1024}, {**STAGED, "count": "*i64", "values": "*i16", "to_values": "*i16"}),
    (staging.begin_sum, {"DENSE": DENSE, "BLOCK": 1024}, {"out": "*i32", "dense": "*i32", "absent": "i32"}),
    (staging.add_dense, {"DENSE": DENSE, "BLOCK": 1024}, {"out": "*fp32", "dense": "*fp32"}),
    (staging.begin_sum, {"DENSE": DENSE, "BLOCK": 1024}, {"out": "*i16", "dense": "*i16", "absent": "i32"}),
    (
        feedback.move_velocities,
        {"NESTEROV": True, "KIND": 0, "OUT_KIND": 0, "BLOCK": 1024},
        {**FEEDBACK, "out": "*fp32"},
    ),
    (
        feedback.move_velocities,
        {"NESTEROV": False, "KIND": 1, "OUT_KIND": 1, "BLOCK": 1024},
        {**FEEDBACK, "gradient": "*i16", "out": "*i16"},
    ),
    (feedback.collect_entries, {"KIND": 0, "MASKS": True, "LIMITS": True, "BLOCK": 1024}, COLLECTED),
    (
        feedback.collect_entries,
        {"KIND": 1, "MASKS": False, "LIMITS": False, "BLOCK": 1024},
        {**COLLECTED, "to_values": "*i16"},
    ),
    (feedback.clear_nonfinite, {"BLOCK": 8192}, COLLECTED),
    (feedback.restore_elements, {"BLOCKS": 8, "BLOCK": 1024}, {"wanted": "*i32"}),
    (feedback.set_units, {"BLOCK": 128}, UNITS),
    (feedback.rescale_elements, {"BLOCKS": 8, "BLOCK": 1024}, UNITS),
    *(
        (
            staging.encode_bucket,
            {"LEVELS": levels, "BITS": bits, "BUCKET": bucket, "STOCHASTIC": loses is False, "ERROR": loses},
            {**DRAWN, "out": "*i16" if bits == 16 else "*u8", "error": "*fp32"},
        )
        for levels, bits, bucket in FORMATS
        for loses in (False, True)
    ),
    *(
        (
            staging.decode_bucket,
            {"FACTOR": 0.5, "LEVELS": levels, "BITS": bits, "BUCKET": bucket, "ADDS": True, "ERROR": True},
            HALVES if bits == 16 else CODES,
        )
        for levels, bits, bucket in FORMATS
    ),
]
CALLED_BY_KERNELS = {
    *(
        "narrowed",
        "key_of",
        "put_cut",
        "ones_of",
        "added",
        "put_marks",
        "mark_block",
        "move_block",
        "copy_marked",
        "tally_blocks",
        "move_blocks",
    ),
    *("number_of", "residual_of", "room_of", "marked", "cut_program_of", "said_of", "takes_part"),
    *("canonical", "rounded", "widened", "is_finite"),
    *("part_of", "row_of", "add_digits", "put_digit"),
    *("draw_words", "next_of", "place_among", "bins_of", "codebook_of", "value_of", "decoded_bucket"),
}
MODULES = (passes, passes_of_many, shared, staging, feedback)

FLOATS = {"residual", "gradient", "values", "to_values"}
INDICES = {"marks", "indices", "to_indices", "positions"}
NUMBERS = {
    "mark_words",
    "blocks",
    "interval",
    "least",
    "most",
    "parts",
    "steps",
    "size",
    "room",
    "offset",
    "halvings",
    "bucket",
    "per_bucket",
    "of_last",
    "k",
    "count",
    "rank",
    "stream",
}
SMALL_COUNTS = {"counts", "sides", "tops", "largest", "peaks"}
WARPS = {"fused_pass": 1, "fused_pass_of_many": 1, "sample_bound": 16}
WHOLE_VECTORS = {"residual", "gradient", "size", "bucket"}  # aligned, as torch allocates, and of such lengths


def type_of(kernel: JITFunction, name: str) -> str:
    if name in FLOATS or (name == "moved" and kernel in (passes.move_cut, passes_of_many.move_cut_of_many)):
        return "*fp32"
    if name in NUMBERS:
        return "i32"
    if name.startswith("seed_"):
        return "i64"
    if name in ("sums", "squares") or (name == "total" and kernel is passes.search_cut):
        return "*fp64"
    if name in SMALL_COUNTS:
        return "*i32"
    if name in INDICES and (name, kernel) not in (
        ("positions", passes.move_listed),
        ("positions", passes.draw_positions),
    ):
        return "*u32"
    return "*i64"


def compiled(
    kernel: JITFunction, constants: dict[str, Any], types: dict[str, str], target: GPUTarget
) -> dict[str, Any]:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name) or type_of(kernel, name) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in WHOLE_VECTORS}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    text = compile(
        source, target=target, options={"num_warps": WARPS.get(kernel.__name__, 8), "enable_fp_fusion": False}
    ).asm
    ptx = text.get("ptx", "")
    return {
        "kernel": kernel.__name__,
        "bytes": len(text["cubin" if target.backend == "cuda" else "hsaco"]),
        "vector_loads": len(re.findall(r"ld\.global\.v4", ptx)),
        "vector_stores": len(re.findall(r"st\.global\.v4", ptx)),
        "flushes_denormals": ".ftz" in ptx or "denorm_mode_32 3" not in text.get("amdgcn", "denorm_mode_32 3"),
        "fuses": "fma.rn" in ptx,
        "approximates": ".approx" in ptx or "div.full" in ptx,
        "orders_atomics": len(re.findall(r"tt\.atomic_\w+ \w+, (?!relaxed)", text["ttir"])),
    }


if __name__ == "__main__":
    backend, architecture, warp, *only = sys.argv[1:]
    target = GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp))
    cases = [(*case, {}) for case in CASES] + OTHER_CASES
    rows = [compiled(*case, target) for case in cases if not only or case[0].__name__ in only]
    found = {name for module in MODULES for name, one in vars(module).items() if hasattr(one, "arg_names")}
    json.dump(
        {"rows": rows, "left_out": sorted(found - CALLED_BY_KERNELS - {row["kernel"] for row in rows})}, sys.stdout
    )
