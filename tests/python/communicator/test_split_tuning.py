"""What chooses the algorithms of sub-communicators: what is kept for them, else what their parent's costs say."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tunings import exchanges, tuning_of

from telegrad import Communicator, Tuning, _core
from telegrad.communicator.tuning_cache import store
from telegrad.cost import Place, allreduce_table

_SIZE = 4
_PART = 3


def _place(ranks: int, driver: str = "ucx") -> Place:
    return Place(driver, ((socket.gethostname(), ranks),))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK"):
        monkeypatch.delenv(name, raising=False)


def _tunings_of_parts(wanted: Tuning | str | None) -> list[Tuning | None]:
    """Of the first three of four ranks, by rank; the communicator of all four is given ``wanted``."""
    exchange = exchanges(_SIZE)

    def run(rank: int) -> Tuning | None:
        with Communicator.from_exchange(rank, _SIZE, exchange[rank], tuning=wanted) as comm:
            child = comm.split(0 if rank < _PART else None)
            if child is None:
                return None
            with child:
                x = np.full(1000, rank + 1, np.float32)
                child.all_reduce(x)
                assert set(x) == {6.0}
                assert child.place == _place(_PART)
                if child.tuning is not None:
                    chosen = child.tuning.allreduce.algorithm(4000)
                    assert child._core.choose_allreduce(4000) == getattr(_core.Algorithm, chosen)
                return child.tuning

    with ThreadPoolExecutor(_SIZE) as pool:
        return list(pool.map(run, range(_SIZE)))[:_PART]


def _derived(whole: Tuning, place: Place, *, shares_memory: bool = True) -> Tuning:
    derived = whole.for_part(place, shares_memory=shares_memory)
    assert derived.place == place
    assert derived.costs == whole.costs
    assert derived.allreduce == allreduce_table(place.ranks, whole.costs, shares_memory=shares_memory)
    return derived


def test_what_is_kept_for_the_part_counts_most() -> None:
    kept = tuning_of(_place(_PART), 5000)
    store(kept)
    assert _tunings_of_parts("auto") == [kept] * _PART
    assert _tunings_of_parts(tuning_of(_place(_SIZE), 100)) == [kept] * _PART


def test_else_the_costs_of_the_whole_choose_for_the_part() -> None:
    whole = tuning_of(_place(_SIZE), 100)
    derived = _derived(whole, _place(_PART))
    assert _tunings_of_parts(whole) == [derived] * _PART
    store(whole)
    assert _tunings_of_parts("auto") == [derived] * _PART


def test_without_any_the_built_in_choice_holds() -> None:
    assert _tunings_of_parts("auto") == [None] * _PART
    store(tuning_of(_place(_PART), 5000))
    assert _tunings_of_parts(None) == [None] * _PART  # asked for by the parent


def test_parts_of_one_process_are_tuned_by_the_whole(on_ranks: Callable[..., list[Any]]) -> None:
    whole = tuning_of(_place(_SIZE, "local"), 100)

    def run(comm: Communicator) -> Tuning | None:
        comm.use(whole)
        child = comm.split(0 if comm.rank < _PART else 1)
        assert child is not None
        with child:
            return child.tuning

    parts = [_derived(whole, _place(ranks, "local"), shares_memory=False) for ranks in (3, 3, 3, 1)]
    assert on_ranks(_SIZE, run) == parts
