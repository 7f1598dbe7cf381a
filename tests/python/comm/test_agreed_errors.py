"""Errors that all ranks raise: every rank gets its own, whoever leaves first."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from telegrad import Communicator, TransportError
from telegrad.comm.agreed_errors import own_error_first, raised_by_all
from telegrad.comm.texts import all_gather_text


def _found(comms: list[Communicator], act: Callable[[Communicator], None]) -> list[str]:
    def one(comm: Communicator) -> str:
        try:
            with comm:
                act(comm)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    with ThreadPoolExecutor(len(comms)) as pool:
        return list(pool.map(one, comms))


def test_nobody_leaves_before_all_are_about_to() -> None:
    left: list[int] = []

    def act(comm: Communicator) -> None:
        try:
            with raised_by_all(comm):
                if comm.rank == 2:
                    time.sleep(0.1)  # the others have come to their errors by now, and wait
                    assert left == []
                raise ValueError(f"wrong on rank {comm.rank}")
        finally:
            left.append(comm.rank)

    assert _found(Communicator.local(3, timeout_s=60.0), act) == [f"ValueError: wrong on rank {n}" for n in range(3)]


def test_an_own_error_is_raised_where_others_cannot_hear_of_it() -> None:
    def act(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort("the test says so")
        with own_error_first(ValueError("of this rank") if comm.rank == 1 else None):
            comm.all_gather(np.zeros(1))

    first, second, third = _found(Communicator.local(3, timeout_s=60.0), act)
    assert second == "ValueError: of this rank"
    assert "the test says so" in first
    assert "the test says so" in third


def test_what_the_network_says_is_raised_at_once() -> None:
    class Comm:
        def barrier(self) -> None:
            pytest.fail("nobody comes")

    with pytest.raises(TransportError, match="over"), raised_by_all(Comm()):  # type: ignore[arg-type]
        raise TransportError("over")


def test_texts_may_be_names_of_files() -> None:
    assert all_gather_text(Communicator.local(1)[0], "data-\udcff.svm") == ["data-\\udcff.svm"]
