"""Staging with Triton kernels. Those of entries read and write pinned memory where it lies: what is not there does not
travel. Those of encoded vectors work in the GPU's memory, and the caller copies.

Bytes over the bus: of every staged entry 4 and its value; of a sparse sum as many, of a dense one its values. In the
GPU's memory: of every staged entry its index and value; of a sum all of ``out`` once, and 32 bytes around each place
of an entry that no neighbour shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from telegrad.kernels.staging import DENSE
from telegrad.kernels.triton import BLOCK, KINDS, bits_of, canonical, launch, rounded, widened
from telegrad.sparse_vector.formats import as_bits

# Triton kernels between a GPU's memory and pinned memory of the host. Values are bits. Positions are 64 bits wide.


@triton.jit(do_not_specialize=["room"])
def stage_entries(indices, values, count, room, to_count, to_indices, to_values, BLOCK: tl.constexpr):
    """Copies ``count`` and the entries that it counts, as far as there is ``room``. ``to_*``: pinned."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = tl.load(count).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(to_count, counted)
    inside = (lane < counted) & (lane < room)
    index = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    fits = (index >= 0) & (index < 0xFFFFFFFF)
    tl.store(to_indices + lane, tl.where(fits, index, 0xFFFFFFFF).to(tl.uint32), mask=inside)
    tl.store(to_values + lane, tl.load(values + lane, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["size", "absent"])
def begin_sum(out, form, dense, size, absent, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """All of ``out``: ``dense`` (pinned) if form is DENSE, ``absent`` if entries are to come, else ones in all bits."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    shape = tl.load(form)
    there = tl.load(dense + lane, mask=lane < tl.where(shape == DENSE, size, 0), other=0)
    without = tl.where(shape < 0, -1, absent).to(out.dtype.element_ty)
    tl.store(out + lane, tl.where(shape == DENSE, there, without), mask=inside)


@triton.jit(do_not_specialize=["size"])
def add_dense(out, form, dense, size, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """``out`` += ``dense`` (pinned) if form is DENSE; otherwise reads nothing."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < tl.where(tl.load(form) == DENSE, size, 0)
    added = tl.load(dense + lane, mask=inside, other=0.0)
    tl.store(out + lane, tl.load(out + lane, mask=inside, other=0.0) + added, mask=inside)


@triton.jit(do_not_specialize=["count", "size"])
def scatter_entries(
    dense,
    indices,
    values,
    count,
    size,
    held,  # int64: how many of the ``count`` entries there are
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dense[index] = value, or dense[index] + value where ADDS."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (lane < count) & (lane < tl.load(held))
    position = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    own = inside & (position >= 0) & (position < size)
    if ADDS:
        there = widened(tl.load(dense + position, mask=own, other=0), KIND)
        added = widened(tl.load(values + lane, mask=own, other=0), KIND)
        tl.store(dense + position, rounded(canonical(there + added), KIND), mask=own)
    else:
        tl.store(dense + position, tl.load(values + lane, mask=own, other=0), mask=own)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def stage(
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    to_count: torch.Tensor,
    to_indices: torch.Tensor,
    to_values: torch.Tensor,
) -> None:
    """``to_count[0] = count[0]``; as many entries as that says, of those that are given, into the other two.

    ``count`` (int32 or int64) has one element. What begins with ``to_`` is pinned: int64, uint32, and as
    ``values``. An int64 index beyond 32 bits becomes 2**32 - 1, which no stream has."""
    room = indices.numel()
    targets = (to_count, to_indices, _bits(to_values))
    launch(stage_entries, max(1, -(-room // BLOCK)), indices, _bits(values), count, room, *targets, BLOCK=BLOCK)


def write_sum(
    out: torch.Tensor,
    form: torch.Tensor,
    dense: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    absent: float,
) -> None:
    """Writes all of ``out``: the sum that ``form`` (int64, one element, on the GPU) tells of.

    A dense one is in ``dense``. Entries, in the first of ``indices`` (uint32) and ``values``, are written over
    ``absent``. Of one that failed, ones in all bits: NaN. These three are pinned."""
    size = out.numel()
    if size == 0:
        return
    given = (_bits(out), form, _bits(dense), size, _bits_of(absent, out.dtype))
    launch(begin_sum, -(-size // BLOCK), *given, DENSE=DENSE, BLOCK=BLOCK)
    scatter_set(out, indices, values, form)


def add_sum(
    out: torch.Tensor, form: torch.Tensor, dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> None:
    """Adds to ``out``, float32, what ``form`` tells of, which lies as for ``write_sum``; nothing of what failed."""
    size = out.numel()
    if size == 0:
        return
    launch(add_dense, -(-size // BLOCK), out, form, dense, size, DENSE=DENSE, BLOCK=BLOCK)
    scatter_add(out, indices, values, form)


def scatter_add(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, held: torch.Tensor) -> None:
    """``dense[index] += value`` of the first ``held`` entries (int64, beside ``dense``), whose indices differ.

    Sums are computed in float32 and rounded once; a NaN is the one quiet NaN. A place outside ``dense`` is not
    touched. Entries may also lie in pinned memory. Does not wait."""
    _scatter(dense, indices, values, held, adds=True)


def scatter_set(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, held: torch.Tensor) -> None:
    """``dense[index] = value``; all else as ``scatter_add``."""
    _scatter(dense, indices, values, held, adds=False)


def _scatter(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, held: torch.Tensor, adds: bool) -> None:
    count = indices.numel()
    if count:
        given, kind = (bits_of, KINDS[dense.dtype]) if adds else (_bits, 0)
        arguments = (given(dense), indices, given(values), count, dense.numel(), held)
        launch(scatter_entries, -(-count // BLOCK), *arguments, ADDS=adds, KIND=kind, BLOCK=BLOCK)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_BITS[x.element_size()])


def _bits_of(number: float, dtype: torch.dtype) -> int:
    """As a signed integer of its width. ``number``: 0, 1 or an infinity, of integers their largest or least one."""
    name = "uint16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    return int(as_bits(number, np.dtype(name)).view(f"i{dtype.itemsize}"))


# Encoded vectors. A program has one bucket: a header of four bytes (the scale) or eight (a codebook), and a code for
# each value; or as many 16-bit floats. LEVELS: 1 bfloat16, 2 float16, 3 even, 4 powers, 5 a codebook. They compute
# what core/kernels/quantise.cpp and narrow.cpp do, in their order.

_FORMATS = {  # LEVELS, BITS, BUCKET
    "bf16": (1, 16, BLOCK),
    "f16": (2, 16, BLOCK),
    "int8": (3, 8, 256),
    "qsgd8": (3, 8, 1024),
    "qsgd4": (3, 4, 1024),
    "qsgd2": (3, 2, 1024),
    "e3m0": (4, 4, 1024),
    "codebook2": (5, 2, 512),
}


@triton.jit
def draw_words(index, seed_low, seed_high, rank, call):
    """The random word of each of these indices, uint32: see core/kernels/philox.hpp."""
    counter = index // 64 * 16 + index % 16
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    none = tl.zeros_like(low)
    counters = (low, high, none + rank.to(tl.uint32), none + call.to(tl.uint32))
    keys = (none + seed_low.to(tl.uint32), none + seed_high.to(tl.uint32))
    first, second, third, fourth = tl.random.philox_impl(*counters, *keys)
    word = index % 64 // 16
    return tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))


@triton.jit
def next_of(four):
    return tl.gather(four, tl.minimum(tl.arange(0, 4) + 1, 3), axis=0)


@triton.jit
def place_among(x, edges):
    """How many of the first three ``edges`` it has reached."""
    reached = (x[:, None] >= edges[None, :]) & (tl.arange(0, 4) < 3)[None, :]
    return tl.sum(reached.to(tl.int32), axis=1)


@triton.jit
def bins_of(fixed, inside, edges):
    """Sums and numbers in four bins; in place of an empty one those of the nearest lower one, or else the lowest."""
    four = tl.arange(0, 4)
    is_in = (place_among(fixed, edges)[:, None] == four[None, :]) & inside[:, None]
    sums, counts = tl.sum(tl.where(is_in, fixed[:, None], 0), axis=0), tl.sum(is_in.to(tl.int32), axis=0)
    is_lower = (counts > 0)[None, :] & (four[None, :] <= four[:, None])
    lowest = tl.min(tl.where(counts > 0, four, 4), axis=0)
    held = tl.maximum(tl.max(tl.where(is_lower, four[None, :], 0), axis=1), lowest)
    return tl.gather(sums, held, axis=0), tl.gather(counts, held, axis=0)


@triton.jit
def codebook_of(fixed, inside, scale):
    """The bits of four levels, finite and never -0: two of Lloyd's iterations on parts of 2^20 of the largest value."""
    number = tl.sum(inside.to(tl.int32), axis=0)
    mean = tl.sum(fixed, axis=0) // number
    outer = tl.sum(tl.where(inside, tl.abs(fixed - mean), 0), axis=0) // number * 3 // 2
    edges = mean + (tl.arange(0, 4) - 1) * outer
    for _ in tl.static_range(2):
        sums, counts = bins_of(fixed, inside, edges)
        centers = sums // counts
        edges = (centers + next_of(centers)) >> 1
    sums, counts = bins_of(fixed, inside, edges)
    levels = sums.to(tl.float64) / counts.to(tl.float64) * (scale.to(tl.float64) / 1048576.0)
    stored = rounded(levels.to(tl.float32), 1).to(tl.int32) & 0xFFFF
    stored = tl.where((stored & 0x7FFF) >= 0x7F80, stored - 1, stored)
    return tl.where(stored == 0x8000, 0, stored)


@triton.jit
def value_of(code, levels, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """``levels``: the scale, or the bits of a codebook."""
    if LEVELS == 3:
        value = levels * (code.to(tl.float32) * (1.0 / ((1 << (BITS - 1)) - 1)))
    elif LEVELS == 4:
        power = ((tl.abs(code) + 120) << 23) | (code & -0x80000000)
        value = levels * tl.where(code == 0, 0, power).to(tl.float32, bitcast=True)
    else:
        value = (tl.gather(levels, code, axis=0) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit(do_not_specialize=["size", "seed_low", "seed_high", "rank", "call"])
def encode_bucket(
    values,
    size,
    out,
    error,
    seed_low,
    seed_high,
    rank,
    call,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ERROR: tl.constexpr,
):
    """Reads 4 bytes of every value, and writes what is encoded; and 4 of its error."""
    row = tl.program_id(0).to(tl.int64)
    place = row * BUCKET + tl.arange(0, BUCKET)
    inside = place < size
    x = tl.load(values + place, mask=inside, other=0.0)
    if LEVELS < 3:
        stored = rounded(x, LEVELS)
        tl.store(out + place, stored, mask=inside)
        value = widened(stored, LEVELS)
    else:
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        spoilt = largest >= 0x7F800000
        x = tl.where(spoilt, 0.0, x)
        bits = x.to(tl.int32, bitcast=True)
        scale = tl.where(spoilt, 0, largest).to(tl.float32, bitcast=True)
        magnify = tl.where(scale < 8.673617379884035e-19, 1.2676506002282294e30, 1.0)  # 2^-60, 2^100
        one: tl.constexpr = 1048576.0 if LEVELS == 5 else 1.0
        most: tl.constexpr = ((1 << (BITS - 1)) - 1) * 16777216.0 if LEVELS == 3 else one
        divisor = tl.where(scale > 0.0, scale * magnify, 1.0)
        factor = tl.where(scale > 0.0, tl.div_rn(tl.zeros_like(divisor) + most, divisor), 0.0)
        part = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * magnify * factor
        header: tl.constexpr = 8 if LEVELS == 5 else 4
        to = out + row * (header + BUCKET * BITS // 8)
        if LEVELS == 5:
            levels = codebook_of((x * magnify * factor).to(tl.int32), inside, scale)
            of_levels = (levels << 16).to(tl.float32, bitcast=True)
            code = tl.where(spoilt, 0, place_among(x, 0.5 * of_levels + 0.5 * next_of(of_levels)))
            written = tl.where(spoilt, 0x7FC0, levels).to(tl.int16)
            tl.store(to.to(tl.pointer_type(tl.int16)) + tl.arange(0, 4), written)
        else:
            levels = scale
            if LEVELS == 3:
                fraction = 0x800000
                if STOCHASTIC:
                    fraction = (draw_words(place, seed_low, seed_high, rank, call) >> 8).to(tl.int32)
                # Levels have 24 bits after the point: of 127, and a fraction more, 31 bits.
                magnitude = (tl.where(part < most, part, most).to(tl.int32) + fraction) >> 24
            else:
                exponent = (part.to(tl.int32, bitcast=True) + 0x400000) >> 23
                magnitude = tl.maximum(exponent - 120, (part >= 0.0078125).to(tl.int32))
            code = tl.where(bits < 0, -magnitude, magnitude)
            tl.store(to.to(tl.pointer_type(tl.int32)), tl.where(spoilt, 0x7FC00000, largest))
        value = tl.where(spoilt, 0.0, value_of(code, levels, LEVELS, BITS))
        per_byte: tl.constexpr = 8 // BITS
        fields = tl.reshape(tl.where(inside, code & ((1 << BITS) - 1), 0), [BUCKET // per_byte, per_byte])
        packed = tl.sum(fields << (tl.arange(0, per_byte) * BITS)[None, :], axis=1)
        byte = tl.arange(0, BUCKET // per_byte)
        end = (tl.minimum(size - row * BUCKET, BUCKET) * BITS + 7) // 8
        tl.store(to + header + byte, packed.to(tl.uint8), mask=byte < end)
    if ERROR:
        is_kept = (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        tl.store(error + place, tl.where(is_kept, x - value, 0.0), mask=inside)


@triton.jit
def decoded_bucket(encoded, row, place, inside, LEVELS: tl.constexpr, BITS: tl.constexpr, BUCKET: tl.constexpr):
    """The values, and whether memory holds ones in all bits instead, which nobody encodes."""
    if LEVELS < 3:
        stored = tl.load(encoded + place, mask=inside, other=0)
        value, fails = widened(stored, LEVELS), stored == -1
    else:
        header: tl.constexpr = 8 if LEVELS == 5 else 4
        at = encoded + row * (header + BUCKET * BITS // 8)
        bit = tl.arange(0, BUCKET) * BITS
        field = (tl.load(at + header + bit // 8, mask=inside, other=0).to(tl.int32) >> (bit % 8)) & ((1 << BITS) - 1)
        word = tl.load(at.to(tl.pointer_type(tl.int32)))
        if LEVELS == 5:
            levels = tl.load(at.to(tl.pointer_type(tl.int16)) + tl.arange(0, 4)).to(tl.int32)
            value = value_of(field, levels, LEVELS, BITS)
        else:
            sign: tl.constexpr = 1 << (BITS - 1)
            value = value_of((field ^ sign) - sign, word.to(tl.float32, bitcast=True), LEVELS, BITS)
        fails = word == -1
    return canonical(value), fails


@triton.jit(do_not_specialize=["size"])
def decode_bucket(
    encoded,
    mine,
    size,
    out,
    error,
    FACTOR: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    ADDS: tl.constexpr,
    ERROR: tl.constexpr,
):
    """Reads what is encoded, and writes 4 bytes of every value."""
    row = tl.program_id(0).to(tl.int64)
    place = row * BUCKET + tl.arange(0, BUCKET)
    inside = place < size
    value, fails = decoded_bucket(encoded, row, place, inside, LEVELS, BITS, BUCKET)
    if ADDS:
        added, _ = decoded_bucket(mine, row, place, inside, LEVELS, BITS, BUCKET)
        value = canonical((added + value) * FACTOR)
    tl.store(out + place, value, mask=inside)
    if ERROR:
        nan = tl.full([BUCKET], 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
        tl.store(error + place, nan, mask=inside & fails)


def encode(
    values: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None, wire: str, seed: int, rank: int, call: int
) -> None:
    """float32 ``values`` as ``wire`` has them, into ``out``, uint8 of exactly so many bytes.

    The bytes are those of the core for a vector of that ``seed``, ``rank`` and ``call``; ``error`` too, which gets what
    is lost: with it QSGD rounds to the nearest. No memory may be another's. Does not wait."""
    drawn = (seed & 0xFFFFFFFF, seed >> 32, rank, call)
    numbers = [number - ((number & 0x80000000) << 1) for number in drawn]  # signed: kernels are compiled by type
    stochastic = wire.startswith("qsgd") and error is None
    given = (values, values.numel(), _codes(out, wire), values if error is None else error, *numbers)
    _launch_buckets(encode_bucket, wire, values, *given, STOCHASTIC=stochastic, ERROR=error is not None)


def decode(
    encoded: torch.Tensor,
    mine: torch.Tensor | None,
    out: torch.Tensor,
    error: torch.Tensor | None,
    wire: str,
    factor: float,
) -> None:
    """``out``: what ``encoded`` holds, or with ``mine`` the sum of both, times ``factor``.

    Where ``encoded`` has ones in all bits, which is what a failed operation leaves, ``out`` and ``error`` become NaN;
    the rest of ``error`` is not touched. What is encoded must be sound. Does not wait."""
    given = (_codes(encoded, wire), _codes(encoded if mine is None else mine, wire), out.numel(), out)
    options = {"FACTOR": factor, "ADDS": mine is not None, "ERROR": error is not None}
    _launch_buckets(decode_bucket, wire, out, *given, out if error is None else error, **options)


def _codes(x: torch.Tensor, wire: str) -> torch.Tensor:
    return x.view(torch.int16) if _FORMATS[wire][1] == 16 else x


def _launch_buckets(kernel: Any, wire: str, vector: torch.Tensor, *given: Any, **options: Any) -> None:
    levels, bits, bucket = _FORMATS[wire]
    programs = -(-vector.numel() // bucket)
    if programs:
        launch(kernel, programs, *given, LEVELS=levels, BITS=bits, BUCKET=bucket, **options)
