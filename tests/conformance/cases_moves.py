"""The operations that move blocks, of equal lengths and of others: what is called, and what must come out.

A block's elements follow from who has it for whom, so that a block in a wrong place is seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator

Array = npt.NDArray[Any]

BLOCK_OPERATIONS = ("all_gather_blocks", "gather", "scatter", "all_to_all")
DIFFERS_BY_RANK = ("gather", "scatter", "all_to_all")
"""Operations whose results are not the same on all ranks."""


def block_cases(size: int, small: bool) -> list[tuple[str, int, str, int]]:
    """Operation, elements of a block (of the longest, in an unequal layout), layout, root."""
    counts = (0, 1, 63, 1000) if small else (0, 1, 63, 1000, 40_001)
    cases = []
    for name in BLOCK_OPERATIONS:
        roots = sorted({0, size // 2, size - 1}) if name in ("gather", "scatter") else [0]
        layouts = ("some_empty", "one_rank") if name == "all_gather_blocks" else ("equal", "some_empty", "one_rank")
        cases += [(name, count, layout, root) for layout in layouts for count in counts for root in roots]
    return cases


def count_of(layout: str, count: int, source: int, target: int, size: int) -> int:
    """Elements that ``source`` has for ``target``."""
    if layout == "equal":
        return count
    if layout == "one_rank":
        return count if source == size // 2 else 0
    return 0 if (source + 2 * target) % 3 == 0 else count * (source + target + 1) // (2 * size)


def block(source: int, target: int, count: int) -> npt.NDArray[np.int32]:
    """What ``source`` has for ``target``."""
    return (np.arange(count, dtype=np.int32) * 7 + source * 1009 + target * 100_003).astype(np.int32)


def _layout(operation: str, layout: str, count: int, size: int) -> list[int]:
    """Elements of each rank's block where all ranks know them."""
    return [count_of(layout, count, rank, 0, size) for rank in range(size)]


def begin_blocks(operation: str, count: int, layout: str, root: int, communicator: Communicator, blocking: bool) -> Any:
    """Begins it on one rank: the result if it blocks, else the Work."""
    rank, size = communicator.rank, communicator.world_size
    if operation == "all_to_all":
        sent, received = _exchanged(layout, count, rank, size)
        x = np.concatenate([block(rank, target, length) for target, length in enumerate(sent)])
        if layout == "equal":
            return communicator.all_to_all(x, async_op=not blocking)
        return communicator.all_to_all(x, send_counts=sent, receive_counts=received, async_op=not blocking)
    counts = _layout(operation, layout, count, size)
    options: dict[str, Any] = {"async_op": not blocking}
    if layout != "equal":
        options["counts"] = counts
    if operation == "scatter":
        whole = np.concatenate([block(root, target, length) for target, length in enumerate(counts)])
        return communicator.scatter(
            whole if rank == root else None, np.full(counts[rank], -1, np.int32), root, **options
        )
    mine = block(rank, 0, counts[rank])
    if operation == "gather":
        return communicator.gather(mine, root, **options)
    return communicator.all_gather(mine, **options)


def _exchanged(layout: str, count: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    sent = [count_of(layout, count, rank, target, size) for target in range(size)]
    received = [count_of(layout, count, source, rank, size) for source in range(size)]
    return sent, received


def fault_of_blocks(operation: str, count: int, layout: str, root: int, bits: Array, rank: int, size: int) -> str:
    """What is wrong with the result of ``rank``; empty if it is right."""
    counts = _layout(operation, layout, count, size)
    if operation == "all_to_all":
        received = _exchanged(layout, count, rank, size)[1]
        right = np.concatenate([block(source, rank, length) for source, length in enumerate(received)])
    elif operation == "scatter":
        right = block(root, rank, counts[rank])
    elif operation == "gather" and rank != root:
        right = np.empty(0, np.int32)
    else:
        right = np.concatenate([block(source, 0, length) for source, length in enumerate(counts)])
    return "" if np.array_equal(bits.reshape(-1), right) else f"{operation} gave other elements than the ranks had"
