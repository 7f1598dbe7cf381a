"""Errors that ranks tell each other: every rank gets its own, whoever leaves first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from telegrad import Communicator
from telegrad.communicator.texts import all_gather_text, own_error_first


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


def test_who_leaves_first_does_not_silence_what_had_told_it() -> None:
    for trial in range(40):

        def act(comm: Communicator, trial: int = trial) -> None:
            told = all_gather_text(comm, "wrong" if comm.rank == trial % 4 else "")
            raise ValueError(f"on rank {comm.rank}: {told}")

        told = [""] * 4
        told[trial % 4] = "wrong"
        found = _found(Communicator.local(4, timeout_s=60.0), act)
        assert found == [f"ValueError: on rank {n}: {told}" for n in range(4)]


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


def test_texts_may_be_names_of_files() -> None:
    assert all_gather_text(Communicator.local(1)[0], "data-\udcff.svm") == ["data-\\udcff.svm"]
