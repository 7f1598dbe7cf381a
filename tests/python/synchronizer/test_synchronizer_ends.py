"""A Synchronizer's sums, which have a communicator of their own, end with the one that it was made with."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from synchronised_net import OnRanks, loss_of, model_of

from telegrad import Communicator, PeerFailed, Synchronizer, TransportError


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda comm: comm.close(), "closed its communicator"),
        (lambda comm: comm.abort("no data is left"), "no data is left"),
    ],
    ids=["close", "abort"],
)
def test_ranks_in_a_pass_hear_of_the_end(on_ranks: OnRanks, end: Callable[[Communicator], None], said: str) -> None:
    heard, both_have_one = threading.Event(), threading.Barrier(2)

    def run(comm: Communicator) -> None:
        model = model_of(comm.rank)
        sync = Synchronizer(model, comm, plan="single")
        both_have_one.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 1:
            end(comm)
            assert heard.wait(30), "rank 0 waits for a rank that has gone"
            with pytest.raises(TransportError):  # it is over on the rank that has ended it, too
                loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
        else:
            with pytest.raises(PeerFailed, match=said) as failure:
                loss_of(model, 0, comm.rank).backward()  # type: ignore[no-untyped-call]
            assert failure.value.peer == 1
            heard.set()
        sync.close()

    on_ranks(2, run)
