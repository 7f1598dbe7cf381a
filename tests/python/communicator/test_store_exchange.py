"""What ranks tell each other over a torch store, which may hold what an earlier attempt has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ports import free_port

from telegrad.communicator.rendezvous.store_exchange import StoreExchange
from telegrad.errors import RendezvousError


def _exchanges(size: int, timeout_s: float = 20.0) -> list[StoreExchange]:
    store = dist.HashStore()
    return [StoreExchange(store, rank, size, timeout_s) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_every_blob(size: int) -> None:
    exchanges = _exchanges(size)

    def run(rank: int) -> list[list[bytes]]:
        return [exchanges[rank](bytes([rank, turn]) * (rank * 100 + turn)) for turn in range(3)]

    with ThreadPoolExecutor(size) as pool:
        for got in pool.map(run, range(size)):
            assert got == [[bytes([r, turn]) * (r * 100 + turn) for r in range(size)] for turn in range(3)]


def test_a_missing_rank_is_named_on_all_others() -> None:
    exchanges = _exchanges(4, timeout_s=0.5)

    def run(rank: int) -> str:
        with pytest.raises(RendezvousError) as caught:
            exchanges[rank](b"here")
        assert caught.value.rank == rank
        return str(caught.value)

    start_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        texts = set(pool.map(run, (0, 1, 3)))
    assert time.monotonic() - start_s < 20
    (text,) = texts
    assert "no peers found: of 4 ranks, rank 2 did not join within 0.5 s" in text


def test_rank_zero_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = _exchanges(2, timeout_s=0.2)[1]
    monkeypatch.setattr("telegrad.communicator.rendezvous.store_exchange.RANK_0_GIVES_UP_FIRST_S", 0.1)
    with pytest.raises(RendezvousError, match="rank 1 of 2 heard nothing from rank 0 within 0.2 s: is rank 0 running"):
        exchange(b"here")


def _all(exchanges: list[StoreExchange], blob: bytes) -> list[list[bytes]]:
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(lambda one: one(blob), exchanges))


def _left_by_two_ranks() -> Any:
    store = dist.HashStore()
    _all([StoreExchange(store, rank, 2, 20.0) for rank in range(2)], b"here")
    return store


def _failed(call: Callable[[], Any]) -> RendezvousError:
    with pytest.raises(RendezvousError) as caught:
        call()
    return caught.value


def _failure(call: Callable[[], Any]) -> str:
    return str(_failed(call))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.communicator.rendezvous.store_exchange.RANK_0_GIVES_UP_FIRST_S", 0.1)


@pytest.mark.parametrize("first", [0, 1, 2], ids="rank {} is first again".format)
def test_what_an_earlier_attempt_has_left_is_not_believed(first: int) -> None:
    store = dist.HashStore()
    assert _all([StoreExchange(store, rank, 3, 20.0) for rank in range(3)], b"old") == [[b"old"] * 3] * 3
    again = [StoreExchange(store, rank, 3, 20.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        early = pool.submit(again[first], b"new")
        time.sleep(0.05)
        assert not early.done()
        others = [pool.submit(again[rank], b"new") for rank in range(3) if rank != first]
        assert [one.result() for one in [early, *others]] == [[b"new"] * 3] * 3
    assert len({one.session for one in again}) == 1


def test_nor_is_its_failure() -> None:
    store = dist.HashStore()
    early = [StoreExchange(store, rank, 3, 0.2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda one: _failure(lambda: one(b"old")), early))
    assert all("rank 2 did not join" in text for text in texts)
    assert _all([StoreExchange(store, rank, 3, 20.0) for rank in (2, 1, 0)], b"new") == [[b"new"] * 3] * 3


def test_a_rank_that_comes_when_the_others_have_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.communicator.rendezvous.store_exchange._SOON_S", 0.1)
    store = dist.HashStore()
    _failure(lambda: StoreExchange(store, 0, 2, 0.1)(b"here"))
    begin_s = time.monotonic()
    text = _failure(lambda: StoreExchange(store, 1, 2, 300.0)(b"here"))
    assert "of 2 ranks, rank 1 did not join within 0.1 s" in text
    assert time.monotonic() - begin_s < 60


@pytest.mark.usefixtures("hasty")
def test_a_rank_0_that_does_not_come_again() -> None:
    store = _left_by_two_ranks()
    same = _failure(lambda: StoreExchange(store, 1, 2, 0.1)(b"here"))
    assert "or that was before a restart, and since then rank 0 has not called from_torch()" in same
    later = _failure(lambda: StoreExchange(store, 1, 2, 0.1, attempt="1")(b"here"))
    assert "rank 1 of 2 heard nothing from rank 0 within 0.1 s: is rank 0 running" in later


def test_ranks_that_wait_for_ever_find_each_other() -> None:
    store = dist.HashStore()
    exchanges = [StoreExchange(store, rank, 2, float("inf")) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchanges[1], b"here")
        time.sleep(0.05)
        assert exchanges[0](b"here") == first.result() == [b"here"] * 2


def test_who_was_there_hears_at_once_that_another_was_not() -> None:
    exchanges = [StoreExchange(dist.HashStore(), 0, 4, 0.2)]
    exchanges += [StoreExchange(exchanges[0]._store, rank, 4, 60.0) for rank in (1, 3)]
    begin_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(lambda one: _failed(lambda: one(b"here")), exchanges))
    assert [error.peer for error in errors] == [2] * 3
    assert {str(error) for error in errors} == {
        "no peers found: of 4 ranks, rank 2 did not join within 0.2 s: look at the logs of those ranks; every rank "
        "must call from_torch()"
    }
    assert time.monotonic() - begin_s < 30


@pytest.mark.usefixtures("hasty")
def test_ranks_that_count_differently() -> None:
    store = dist.HashStore()
    exchanges = [StoreExchange(store, 0, 2, 2.0), StoreExchange(store, 1, 3, 2.0)]
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda one: _failed(lambda: one(b"here")), exchanges))
    assert [error.peer for error in errors] == [1] * 2
    assert all("counts 2 ranks, rank 1 (process" in str(error) for error in errors)
    assert all(str(error).endswith(") 3: give all processes the same WORLD_SIZE") for error in errors)
    beyond = _failure(lambda: StoreExchange(store, 2, 3, 0.1)(b"here"))
    assert "counts 2 ranks" in beyond


@pytest.mark.usefixtures("hasty")
def test_a_rank_beyond_those_that_have_joined() -> None:
    store = _left_by_two_ranks()
    text = _failure(lambda: StoreExchange(store, 2, 3, 0.1)(b"here"))
    assert "has joined 2 ranks, and this is rank 2 of 3: give all processes the same WORLD_SIZE" in text


@pytest.mark.usefixtures("hasty")
def test_two_processes_of_one_rank() -> None:
    store = _left_by_two_ranks()
    text = _failure(lambda: StoreExchange(store, 1, 2, 0.1)(b"here"))
    assert "has joined another process as rank 1: process " in text
    assert "Either these two have one RANK, or two jobs one MASTER_PORT" in text


@pytest.mark.usefixtures("hasty")
def test_two_jobs_at_one_port() -> None:
    store = dist.HashStore()
    ours = [StoreExchange(store, rank, 2, 20.0, job="one") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ours[0], b"here")
        store.wait(["job"])
        text = _failure(lambda: StoreExchange(store, 1, 2, 0.3, job="another")(b"there"))
        assert ours[1](b"here") == first.result() == [b"here"] * 2
    assert "is of the job 'another', and found the job 'one' at this address and port" in text


def test_the_store_goes() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\n in a stack of torch's")

    with pytest.raises(RendezvousError, match=r"rank 1 of 2 lost the store .* running\? \(Connection reset by peer\)"):
        StoreExchange(Gone(), 1, 2, 20.0)(b"here")


def test_a_store_that_goes_before_rank_0_has_answered() -> None:
    """As one that served a group of torch's that was destroyed, while rank 0 makes the next one."""
    port = free_port()
    old = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", port, 2, False)]

    def again(left_s: float) -> Any:
        assert 0 < left_s < 70
        stores.append(dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=left_s)))
        return stores[-1]

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(StoreExchange(stores[0], 1, 2, 60.0, again=again), b"there")
        time.sleep(0.1)
        del old
        served = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
        assert StoreExchange(served, 0, 2, 60.0)(b"here") == other.result() == [b"here", b"there"]
    assert len(stores) == 2


def test_a_store_over_tcp() -> None:
    served = dist.TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=20), wait_for_workers=False)
    stores = [served, *(dist.TCPStore("127.0.0.1", served.port, 3, False) for _ in range(2))]
    for blob in (b"once", b"again"):
        exchanges = [StoreExchange(store, rank, 3, 20.0) for rank, store in enumerate(stores)]
        assert _all(exchanges, blob) == [[blob] * 3] * 3


class _Clock:
    """Time passes by sleeping alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _Looked:
    """A store that nobody writes to, and in which nobody may wait."""

    def __init__(self) -> None:
        self.looks = 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return False


@pytest.mark.parametrize(("size", "most"), [(2, 400), (1000, 150)])
def test_a_rank_that_waits_does_not_keep_the_store_busy(monkeypatch: pytest.MonkeyPatch, size: int, most: int) -> None:
    monkeypatch.setattr("telegrad.communicator.rendezvous.store_exchange.time", _Clock())
    store = _Looked()
    _failure(lambda: StoreExchange(store, 1, size, 5.0)(b"here"))  # rank 0 has 5 s more
    assert store.looks <= 2 * most  # for the session, and for another job


def test_a_late_rank_makes_nobody_write_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's client writes a warning each time that a wait in the store is over without a value."""
    served = dist.TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=20), wait_for_workers=False)
    stores = [served, *(dist.TCPStore("127.0.0.1", served.port, 3, False) for _ in range(2))]
    exchanges = [StoreExchange(store, rank, 3, 20.0) for rank, store in enumerate(stores)]
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(exchanges[rank], b"here") for rank in (0, 1)]
        time.sleep(1.0)
        assert exchanges[2](b"here") == [b"here"] * 3
        assert [one.result() for one in early] == [[b"here"] * 3] * 2
    assert capfd.readouterr().err == ""


def _gone(left_s: float) -> Any:
    raise RendezvousError("no peers found: is rank 0 running there? (Connection refused)", operation="rendezvous")


class _Leaving:
    """A store of the job ``job`` that is gone after so many looks."""

    def __init__(self, job: str, looks: int) -> None:
        self._job, self._looks = job, looks

    def check(self, keys: list[str]) -> bool:
        self._looks -= 1
        if self._looks < 0:
            raise RuntimeError("Connection reset by peer\nframe #0: of torch's")
        return keys == ["job"]

    def get(self, key: str) -> bytes:
        return self._job.encode()


@pytest.mark.parametrize("again", [_gone, None], ids=["with another try", "without"])
def test_two_jobs_at_one_port_of_which_the_other_ends_first(again: Callable[[float], Any] | None) -> None:
    error = _failed(
        lambda: StoreExchange(_Leaving("one", 4), 1, 2, 20.0, job="another", again=again, address="a")(b"there")
    )
    assert "is of the job 'another', and found the job 'one' at this address and port" in str(error)
    assert error.__cause__ is None
    assert error.__suppress_context__  # no frames of torch's below it


def test_a_job_that_loses_its_own_store_is_told_so() -> None:
    error = _failed(lambda: StoreExchange(_Leaving("mine", 4), 1, 2, 20.0, job="mine", again=_gone)(b"there"))
    assert "is rank 0 running there" in str(error)
    assert error.__suppress_context__


def test_a_store_that_is_gone_when_it_is_written_to() -> None:
    class Closed:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe\nframe #0: of torch's")

    error = _failed(lambda: StoreExchange(Closed(), 0, 2, 20.0)(b"here"))
    assert "rank 0 of 2 lost the store" in str(error)
    assert "(Broken pipe)" in str(error)
    assert error.__suppress_context__
