"""How the programs of one launch find which of many parts, arrays of their own, each is for: by a table on the device.

A table is int64, rows of a number for each part and one more. Its first rows tell which programs are a part's: from
that number on, up to the next part's; behind the last part is how many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(table, parts, ROW: tl.constexpr):
    """Where it begins."""
    return table + ROW * (parts + 1)


@triton.jit
def part_of(firsts, parts, steps, program):
    """The part that ``program`` is for, by the row ``firsts``; ``steps``: halvings of ``parts`` until one is left."""
    part = program * 0
    behind = part + parts
    for _ in range(steps):
        middle = (part + behind) // 2
        reaches = tl.load(firsts + middle) <= program
        part = tl.where(reaches, middle, part)
        behind = tl.where(reaches, behind, middle)
    return part
