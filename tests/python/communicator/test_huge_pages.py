"""What ranks of one host read from each other again and again lies in huge pages, unless the environment says no."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from telegrad.launch import Ranks, join

MIB = 1 << 20
_COLLAPSE = 25  # MADV_COLLAPSE


def _huge_mib() -> int:
    smaps = Path("/proc/self/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"AnonHugePages:\s+(\d+) kB", smaps))) // 1024


def _in_small_pages(mib: int) -> np.ndarray:
    memory = mmap.mmap(-1, (mib + 4) * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # also where all memory has huge ones
    array = np.frombuffer(memory, np.uint8)
    array = array[-array.ctypes.data % (2 * MIB) :][: mib * MIB]
    array.fill(0)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return array.view(np.float32)


def _kernel_collapses() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        return False
    array = _in_small_pages(2)
    address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    return any(ctypes.CDLL(None).madvise(address, size, _COLLAPSE) == 0 for _ in range(5))  # it may be busy


def main() -> None:
    with join(timeout_s=60, join_timeout_s=60) as communicator:
        array = _in_small_pages(16)
        array += communicator.rank + 1
        communicator.all_reduce(array)
        before = _huge_mib()
        for _ in range(20):  # some more than need be: blocks that are being read are tried again
            communicator.all_reduce(array)
        assert (array == 3 * communicator.world_size**20).all()
        print(_huge_mib() - before, flush=True)


@pytest.mark.parametrize(("wanted", "least", "most"), [("1", 12, 24), ("0", 0, 6)])
def test_sums_of_one_array(wanted: str, least: int, most: int) -> None:
    if not _kernel_collapses():
        pytest.skip("this system puts no memory into huge pages as it stands (Linux 6.1, not set to never)")
    moved: list[int] = []
    with Ranks(
        f"{Path(__file__).resolve()}",
        2,
        timeout_s=120,
        environment={"TELEGRAD_HUGE_PAGES": wanted},
        on_line=lambda rank, line: moved.append(int(line)),
    ) as ranks:
        ranks.wait()
    assert len(moved) == 2
    assert all(least <= mib <= most for mib in moved), moved


if __name__ == "__main__":
    sys.exit(main())
