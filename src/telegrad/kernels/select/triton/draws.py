"""The Triton kernel of the random sequence that a random subset is made of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "size", "call", "rank", "stream", "seed_low", "seed_high"])
def draw_positions(positions, count, size, call, rank, stream, seed_low, seed_high, BLOCK: tl.constexpr):
    """The first ``count`` positions of the sequence, each below ``size``, as int64.

    A position is made of two words of Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011). Counters come in groups of
    16: all their first words are used, then all their second ones, and so on.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = (lane % 32) // 8
    counter = lane // 32 * 16 + lane % 8 * 2
    words: tl.constexpr = 0xFFFFFFFF
    high = tl.zeros([BLOCK], tl.uint64)
    low = tl.zeros([BLOCK], tl.uint64)
    for half in tl.static_range(2):
        w0 = (counter + half).to(tl.uint64) & words
        w1 = tl.zeros([BLOCK], tl.uint64) + call.to(tl.uint64)
        w2 = tl.zeros([BLOCK], tl.uint64) + rank.to(tl.uint64)
        w3 = tl.zeros([BLOCK], tl.uint64) + stream.to(tl.uint64)
        k0 = tl.zeros([BLOCK], tl.uint64) + seed_low.to(tl.uint64)
        k1 = tl.zeros([BLOCK], tl.uint64) + seed_high.to(tl.uint64)
        for _ in range(10):
            a = w0 * 0xD2511F53
            b = w2 * 0xCD9E8D57
            w0 = (b >> 32) ^ w1 ^ k0
            w1 = b & words
            w2 = (a >> 32) ^ w3 ^ k1
            w3 = a & words
            k0 = (k0 + 0x9E3779B9) & words
            k1 = (k1 + 0xBB67AE85) & words
        chosen = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
        if half == 0:
            high = chosen
        else:
            low = chosen
    wide = size.to(tl.uint64)
    position = (high * wide + ((low * wide) >> 32)) >> 32
    tl.store(positions + lane, position.to(tl.int64), mask=lane < count)
