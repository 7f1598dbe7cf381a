"""Triton kernels that write and read blocks of packed indices, a program for each. Positions are 64 bits wide.

A sequence in Elias-Fano code is two sections: the low bits of its offsets, one behind the other, and bit
(offset >> width) + j of the high section for offset j. When it is read, each lane has a bit of the high section, and
counts the set bits before it. Gaps, in Golomb-Rice code, are such a sequence, if each offset is less by the low bits of
the gaps before: see gap_code.hpp of the core.
"""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.kernels.pack.triton.bits import load_field, put_field

_MOST: tl.constexpr = tl.constexpr(1024)  # indices of one block


@triton.jit
def bit_length(number):
    """Of an int64 from 0 to 2^32 - 1."""
    length = tl.zeros_like(number)
    for i in tl.static_range(33):
        length += (number >> i > 0).to(tl.int64)
    return length


@triton.jit
def best_width(count, spread):
    """floor(log2(spread / count)); 0 where that is less."""
    width = bit_length(spread // tl.maximum(count, 1)) - 1
    return tl.where((count > 0) & (spread >= count), width, 0)


@triton.jit
def put_sequence(words, lows, highs, rank, offset, width, wanted):
    """One number of a sequence whose sections begin at those bits."""
    put_field(words, lows + rank * width, offset & ((tl.zeros_like(offset) + 1 << width) - 1), wanted)
    put_field(words, highs + (offset >> width) + rank, tl.zeros_like(offset) + 1, wanted)


@triton.jit
def write_blocks(indices, size, counts, breaks, widths, runs, payloads, ends, words):
    """A block for every leaf at which one begins, into zeroed ``words``, int32.

    Reads 8 bytes of every index (int64), and makes two or three atomic operations on words of a cache.
    """
    leaf = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + leaf)
    if count > 0:
        begin = leaf * 64
        lane = tl.arange(0, _MOST).to(tl.int64)
        inside = lane < count
        index = tl.load(indices + begin + lane, mask=inside, other=0)
        first = tl.load(indices + begin)
        broken, width, of_runs = tl.load(breaks + leaf), tl.load(widths + leaf), tl.load(runs + leaf)
        payload = tl.load(payloads + leaf)
        head = (tl.load(ends + leaf) - payload - 8) * 8
        once = lane == 0
        rest = (count - 1) | (of_runs << 10) | (width << 11) | (payload << 16)
        put_field(words, head + lane, tl.zeros_like(lane) + first, once)
        put_field(words, head + 32 + lane, tl.zeros_like(lane) + rest, once)
        start = head + 64
        skipped = index - first - lane  # numbers before this one that are not in the block
        if of_runs > 0:
            follows = inside & (lane > 0)
            before = tl.load(indices + begin + lane - 1, mask=follows, other=0)
            ends_run = follows & (index - before != 1)
            rank = tl.cumsum(ends_run.to(tl.int64), 0) - 1
            held = count - 1 - broken
            present_width = best_width(broken, held)
            present_lows = start + 16 + (broken * width + 7) // 8 * 8
            present_highs = present_lows + (broken * present_width + 7) // 8 * 8
            missing_highs = present_highs + (broken + (held >> present_width) + 7) // 8 * 8
            put_field(words, start + lane, tl.zeros_like(lane) + broken, once)
            put_sequence(words, start + 16, missing_highs, rank, skipped - 1 - rank, width, ends_run)
            put_sequence(words, present_lows, present_highs, rank, lane - 1 - rank, present_width, ends_run)
        elif payload > 0:
            highs = start + ((count - 1) * width + 7) // 8 * 8
            follows = inside & (lane > 0)
            before = tl.load(indices + begin + lane - 1, mask=follows, other=0)
            low = tl.where(follows, (index - before - 1) & ((tl.zeros_like(index) + 1 << width) - 1), 0)
            put_sequence(words, start, highs, lane - 1, skipped - (tl.cumsum(low, 0) - low), width, follows)


@triton.jit(do_not_specialize=["length", "wanted", "room"])
def find_blocks(packed, length, wanted, room, begins, starts, found):
    """One program goes from header to header: the first index and the payload's place of every block, int64.

    ``found``: two int64: how many blocks, and how many faults. A header says where the next one is: a step is one
    access to memory, which nothing hides.
    """
    at = tl.zeros([], tl.int64)
    done = tl.zeros([], tl.int64)
    blocks = tl.zeros([], tl.int64)
    fault = tl.zeros([], tl.int64)
    while (done < wanted) & (fault == 0):
        if (length - at < 8) | (blocks >= room):
            fault += 1
        else:
            rest = tl.load(packed + at + 4).to(tl.int64) | (tl.load(packed + at + 5).to(tl.int64) << 8)
            payload = tl.load(packed + at + 6).to(tl.int64) | (tl.load(packed + at + 7).to(tl.int64) << 8)
            count = (rest & 1023) + 1
            at += 8
            if (payload > 8191) | (payload > length - at) | (count > wanted - done):
                fault += 1
            else:
                tl.store(begins + blocks, done)
                tl.store(starts + blocks, at)
                blocks += 1
                done += count
                at += payload
    if at != length:
        fault += 1
    tl.store(found, blocks)
    tl.store(found + 1, fault)


@triton.jit
def read_sequence(packed, lows, highs, high_bytes, before, width, count, into, GAPS: tl.constexpr, TILE: tl.constexpr):
    """Writes ``count`` numbers, as uint32 says; sections begin at those bytes. GAPS: numbers are less by the low bits
    before them. Returns whether there are as many."""
    found = tl.zeros([], tl.int64)
    skipped = tl.zeros([], tl.int64)  # low bits of earlier tiles
    tile = tl.zeros([], tl.int64)
    while tile < 8 * high_bytes:
        place = tile + tl.arange(0, TILE).to(tl.int64)
        inside = place < 8 * high_bytes
        octet = tl.load(packed + highs + (place >> 3), mask=inside, other=0).to(tl.int64)
        is_set = (octet >> (place & 7)) & 1
        rank = found + tl.cumsum(is_set, 0) - is_set
        own = (is_set > 0) & (rank < count)
        widths = tl.zeros_like(place) + width
        low = load_field(packed, 8 * lows + rank * width, widths, own)
        number = before + 1 + rank + (((place - rank) << width) | low)
        if GAPS:
            number += skipped + tl.cumsum(low, 0) - low
            skipped += tl.sum(low)
        tl.store(into + rank, (number & 0xFFFFFFFF).to(tl.uint32), mask=own)
        found += tl.sum(is_set)
        tile += TILE
    return found == count


@triton.jit
def read_blocks(packed, begins, starts, indices, missing, present, faults, TILE: tl.constexpr):
    """Blocks of gaps; of those of runs the two sequences, into ``missing`` and ``present`` (uint32, as ``indices``).

    Reads the packed bytes, the high ones eight times from a cache, and writes 4 bytes of every index. Adds faults to
    ``faults``, int64.
    """
    block = tl.program_id(0).to(tl.int64)
    begin, start = tl.load(begins + block), tl.load(starts + block)
    first = tl.zeros([], tl.int64)
    for byte in tl.static_range(4):
        first |= tl.load(packed + start - 8 + byte).to(tl.int64) << (8 * byte)
    rest = tl.load(packed + start - 4).to(tl.int64) | (tl.load(packed + start - 3).to(tl.int64) << 8)
    payload = tl.load(packed + start - 2).to(tl.int64) | (tl.load(packed + start - 1).to(tl.int64) << 8)
    count, of_runs, width = (rest & 1023) + 1, (rest >> 10) & 1, (rest >> 11) & 31
    fault = tl.zeros([], tl.int64)
    if of_runs == 0:
        tl.store(indices + begin, first.to(tl.uint32))
        if payload == 0:
            lane = tl.arange(0, _MOST).to(tl.int64)
            tl.store(indices + begin + lane, ((first + lane) & 0xFFFFFFFF).to(tl.uint32), mask=lane < count)
        else:
            lows = ((count - 1) * width + 7) // 8
            if lows > payload:
                fault += 1
            else:
                into = indices + begin + 1
                high = start + lows
                whole = read_sequence(packed, start, high, payload - lows, first, width, count - 1, into, True, TILE)
                fault += (whole == 0).to(tl.int64)
    elif payload < 2:
        fault += 1
    else:
        broken = tl.load(packed + start).to(tl.int64) | (tl.load(packed + start + 1).to(tl.int64) << 8)
        if broken >= count:
            fault += 1
        else:
            held = count - 1 - broken
            present_width = best_width(broken, held)
            present_lows = start + 2 + (broken * width + 7) // 8
            present_highs = present_lows + (broken * present_width + 7) // 8
            high_bytes = tl.where(broken > 0, (broken + (held >> present_width) + 7) // 8, 0)
            missing_highs = present_highs + high_bytes
            left = start + payload - missing_highs
            if left < 0:
                fault += 1
            else:
                zero = tl.zeros([], tl.int64)
                into = missing + begin
                whole = read_sequence(packed, start + 2, missing_highs, left, zero, width, broken, into, False, TILE)
                fault += (whole == 0).to(tl.int64)
                into = present + begin
                whole = read_sequence(
                    packed, present_lows, present_highs, high_bytes, zero, present_width, broken, into, False, TILE
                )
                fault += (whole == 0).to(tl.int64)
    tl.atomic_add(faults, fault, sem="relaxed")


@triton.jit
def read_runs(packed, begins, starts, indices, missing, present, faults):
    """The indices of blocks of runs, whose two sequences have been read without a fault.

    Reads 4 bytes of every index ten times, from a cache, and writes as many.
    """
    block = tl.program_id(0).to(tl.int64)
    begin, start = tl.load(begins + block), tl.load(starts + block)
    rest = tl.load(packed + start - 4).to(tl.int64) | (tl.load(packed + start - 3).to(tl.int64) << 8)
    count = (rest & 1023) + 1
    if (rest >> 10) & 1:
        first = tl.zeros([], tl.int64)
        for byte in tl.static_range(4):
            first |= tl.load(packed + start - 8 + byte).to(tl.int64) << (8 * byte)
        # Of damaged blocks whose faults have been counted: nothing is read outside.
        payload = tl.load(packed + start - 2).to(tl.int64) | (tl.load(packed + start - 1).to(tl.int64) << 8)
        held = payload > 1
        broken = tl.load(packed + start, mask=held, other=0).to(tl.int64)
        broken |= tl.load(packed + start + 1, mask=held, other=0).to(tl.int64) << 8
        broken = tl.minimum(broken, count - 1)
        lane = tl.arange(0, _MOST).to(tl.int64)
        own = lane < broken
        end = tl.load(present + begin + lane, mask=own, other=0).to(tl.int64)
        last = tl.load(present + begin + lane - 1, mask=own & (lane > 0), other=0).to(tl.int64)
        wrong = own & ((end <= last) | (end >= count))
        tl.atomic_add(faults, tl.sum(wrong.to(tl.int64)), sem="relaxed")
        # Of every index the runs that have begun before it or with it, but for the first run: the largest such number.
        begun = tl.zeros_like(lane)
        for step in tl.static_range(10):
            further = begun + (512 >> step)
            reached = further <= broken
            there = tl.load(present + begin + further - 1, mask=reached, other=0).to(tl.int64)
            begun = tl.where(reached & (there <= lane), further, begun)
        skipped = tl.load(missing + begin + begun - 1, mask=begun > 0, other=0).to(tl.int64)
        index = (first + lane + skipped) & 0xFFFFFFFF
        tl.store(indices + begin + lane, index.to(tl.uint32), mask=lane < count)
