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

from telegrad.kernels.feedback.triton import updates
from telegrad.kernels.pack.triton import bits, blocks
from telegrad.kernels.quantise.triton import buckets, rounding
from telegrad.kernels.scatter.triton import entries
from telegrad.kernels.select.triton import cuts, draws, passes, passes_of_many, reuse
from telegrad.kernels.staging import DENSE
from telegrad.kernels.staging.triton import copies
from telegrad.kernels.triton import floats

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
    (cuts.find_kth_of_few, {**NEGATIVE, **BLOCK, "LOWEST": 1, "CUT": True}),
    (cuts.count_digits, {**BOTH, **BLOCK, "LOWEST": 0, "SHIFT": 23, "WIDTH": 8, "FIRST": True, "CUT": False}),
    (cuts.count_digits, {**BOTH, **BLOCK, "LOWEST": 0, "SHIFT": 0, "WIDTH": 7, "FIRST": False, "CUT": True}),
    (passes_of_many.fused_pass_of_many, {**BOTH, "BLOCK": 512, "HELD": True, "ADD": True}),
    (passes_of_many.count_marks_of_many, GROUPS),
    (passes_of_many.take_marked_of_many, GROUPS),
    (passes_of_many.count_digits_of_many, {**MANY, **DIGITS, "SHIFT": 23, "WIDTH": 8, "FIRST": True, "CUT": False}),
    (passes_of_many.count_digits_of_many, {**MANY, **DIGITS, "SHIFT": 0, "WIDTH": 7, "FIRST": False, "CUT": True}),
    (passes_of_many.count_cut_of_many, MANY),
    (passes_of_many.move_cut_of_many, MANY),
    (cuts.sample_bound, {**BOTH, "ADD": True, "SAMPLE": 8192, "UNLESS": 1 << 31}),
    (cuts.count_cut, {**NEGATIVE, **BLOCK}),
    (cuts.move_cut, {**BOTH, **BLOCK, "LISTED": True, "ALONE": False, "ENDS": False}),
    (cuts.move_cut, {**BOTH, **BLOCK, "LISTED": False, "ALONE": True, "ENDS": False}),
    (cuts.bucket_pass, {"ADD": True, "ROWS": 4, "WIDTH": 512}),
    (draws.draw_positions, BLOCK),
    (reuse.set_bounds, {"BEYOND": 1 << 31, "BLOCK": 128}),
    (reuse.decide_reuse, {"HELD": True, "BLOCK": 128}),
    (reuse.follow_reuse, {"GAIN": 0.1, "TINY": 1e-38, "HELD": True, "BLOCK": 128}),
]
QSGD = {"UNIT": 1.0, "ROWS": 2, "BUCKET": 1024}
INT8 = {"UNIT": 1 / 127, "ROWS": 8, "BUCKET": 256, "BITS": 8}
ENCODED = {"out": "*u8", "encoded": "*u8", "packed": "*u8", "error": "*fp32", "first": "i64"}
HALVES = {"out": "*i16", "encoded": "*i16", "error": "*fp32"}
WHOLE = {"HELD": False, "BLOCK": 1024}
STAGED = {"to_count": "*i64", "to_values": "*i32"}
BLOCKS = {"packed": "*u8", "words": "*i32", "missing": "*u32", "present": "*u32"}
FEEDBACK = {"faults": "*i32", "momentum": "fp32"}
UNITS = {"wanted": "*fp64", "ratios": "*fp64"}
COLLECTED = {"counts": "*i64", "faults": "*i32", "most": "fp32"}
# Those with types of their own where a name says another thing than in a selection.
OTHER_CASES: list[tuple[JITFunction, dict[str, Any], dict[str, str]]] = [
    (
        entries.scatter_entries,
        {"HOW": 1, "KIND": 0, "HELD": False, "BLOCK": 1024},
        {"dense": "*fp32", "base": "i64", "indices": "*i64"},
    ),
    (entries.scatter_entries, {"HOW": 1, "KIND": 1, **WHOLE}, {"dense": "*i16", "base": "i64", "values": "*i16"}),
    (entries.scatter_entries, {"HOW": 0, "KIND": 2, **WHOLE}, {"dense": "*i16", "base": "i64", "values": "*i16"}),
    (entries.scatter_entries, {"HOW": 0, "KIND": 0, **WHOLE, "HELD": True}, {"dense": "*fp32", "base": "i64"}),
    (entries.scatter_entries, {"HOW": 2, "KIND": 0, **WHOLE}, {"dense": "*fp32", "base": "i64"}),
    (copies.stage_entries, {"BLOCK": 1024}, {**STAGED, "indices": "*i64", "count": "*i32", "values": "*i32"}),
    (copies.stage_entries, {"BLOCK": 1024}, {**STAGED, "count": "*i64", "values": "*i16", "to_values": "*i16"}),
    (copies.begin_sum, {"DENSE": DENSE, "BLOCK": 1024}, {"out": "*i32", "dense": "*i32", "absent": "i32"}),
    (copies.add_dense, {"DENSE": DENSE, "BLOCK": 1024}, {"out": "*fp32", "dense": "*fp32"}),
    (copies.begin_sum, {"DENSE": DENSE, "BLOCK": 1024}, {"out": "*i16", "dense": "*i16", "absent": "i32"}),
    (
        updates.move_velocities,
        {"NESTEROV": True, "KIND": 0, "OUT_KIND": 0, "BLOCK": 1024},
        {**FEEDBACK, "out": "*fp32"},
    ),
    (
        updates.move_velocities,
        {"NESTEROV": False, "KIND": 1, "OUT_KIND": 1, "BLOCK": 1024},
        {**FEEDBACK, "gradient": "*i16", "out": "*i16"},
    ),
    (updates.collect_entries, {"KIND": 0, "MASKS": True, "LIMITS": True, "BLOCK": 1024}, COLLECTED),
    (
        updates.collect_entries,
        {"KIND": 1, "MASKS": False, "LIMITS": False, "BLOCK": 1024},
        {**COLLECTED, "to_values": "*i16"},
    ),
    (updates.clear_nonfinite, {"BLOCK": 8192}, COLLECTED),
    (updates.restore_elements, {"BLOCKS": 8, "BLOCK": 1024}, {"wanted": "*i32"}),
    (updates.set_units, {"BLOCK": 128}, UNITS),
    (updates.rescale_elements, {"BLOCKS": 8, "BLOCK": 1024}, UNITS),
    (entries.count_faults, {"BLOCK": 1024}, {"base": "i64"}),
    (buckets.quantise_buckets, {**QSGD, "BITS": 4, "STOCHASTIC": True, "ERROR": True}, ENCODED),
    (buckets.quantise_buckets, {**QSGD, "BITS": 2, "STOCHASTIC": True, "ERROR": False}, ENCODED),
    (buckets.quantise_buckets, {**INT8, "STOCHASTIC": False, "ERROR": True}, ENCODED),
    (buckets.dequantise_buckets, {**QSGD, "BITS": 2}, ENCODED),
    (buckets.dequantise_buckets, INT8, ENCODED),
    (rounding.narrow_values, {"KIND": 1, "ERROR": True, "BLOCK": 1024}, HALVES),
    (rounding.narrow_values, {"KIND": 2, "ERROR": True, "BLOCK": 1024}, HALVES),
    (rounding.widen_values, {"KIND": 2, "BLOCK": 1024}, HALVES),
    (rounding.tally_values, {"BLOCK": 1024}, {"seen": "*i32"}),
    (rounding.lose_mean, {"BLOCK": 1024}, {"mean": "*fp32", "error": "*fp32"}),
    (bits.pack_numbers, {"WIDTH": 5, "BLOCK": 1024}, {"numbers": "*u32", "out": "*u8", "bytes_": "i32"}),
    (bits.unpack_numbers, {"WIDTH": 13, "BLOCK": 1024}, {"packed": "*u8", "numbers": "*u32"}),
    (blocks.write_blocks, {}, {**BLOCKS, "indices": "*i64", "counts": "*i64"}),
    (blocks.find_blocks, {}, {**BLOCKS, "length": "i32", "wanted": "i32"}),
    (blocks.read_blocks, {"TILE": 1024}, BLOCKS),
    (blocks.read_runs, {}, BLOCKS),
]
CALLED_BY_KERNELS = {
    *(
        "narrowed",
        "ones_of",
        "put_sample_bound",
        "added",
        "put_marks",
        "mark_block",
        "move_block",
        "copy_marked",
        "tally_blocks",
        "move_blocks",
    ),
    *("number_of", "residual_of", "room_of", "marked", "cut_program_of", "said_of", "takes_part"),
    *("canonical", "rounded", "widened", "lost", "is_finite"),
    *("draw_words", "level_of"),
    *("part_of", "row_of", "add_digits", "put_digit"),
    *("put_field", "load_field", "put_sequence", "read_sequence", "bit_length", "best_width"),
}
MODULES = (
    passes,
    passes_of_many,
    cuts,
    draws,
    reuse,
    floats,
    entries,
    buckets,
    rounding,
    bits,
    blocks,
    copies,
    updates,
)

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
    "bucket",
    "per_bucket",
    "of_last",
    "k",
    "count",
    "call",
    "rank",
    "stream",
}
SMALL_COUNTS = {"counts", "sides", "tops", "largest", "peaks"}
WARPS = {"fused_pass": 1, "fused_pass_of_many": 1, "sample_bound": 16}
WHOLE_VECTORS = {"residual", "gradient", "size", "bucket"}  # aligned, as torch allocates, and of such lengths


def type_of(kernel: JITFunction, name: str) -> str:
    if name in FLOATS or (name == "moved" and kernel in (cuts.move_cut, passes_of_many.move_cut_of_many)):
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
