"""A rank that waits in DDP's own broadcasts says so, once, and no rank whose broadcasts follow each other."""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
rank_checks = pytest.importorskip("telegrad.ddp.rank_checks")
LINE = (
    "telegrad: rank 3: has waited 8 s for DistributedDataParallel's broadcast before a forward pass, which sends "
    "buffers such as BatchNorm's; if another rank has fewer batches, train inside `with ddp.join():` on all ranks; "
    "for more: docs/how-to/hangs.md\n"
)


class Broadcasting(torch.nn.Module):  # type: ignore[name-defined, misc]
    """Has the method of DistributedDataParallel that broadcasts; it ends when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def _pre_forward(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self.begun.clear()
        self.may_end.clear()
        thread = threading.Thread(target=self._pre_forward)
        thread.start()
        assert self.begun.wait(60)
        try:
            yield
        finally:
            self.may_end.set()
            thread.join()


class Clock:
    """Stands for ``time``: 2 s pass in each sleep, in which a look's number is given to ``between``."""

    def __init__(self, between: Callable[[int], None]) -> None:
        self.now, self.looks, self.between = 100.0, 0, between

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds == 2
        self.now += seconds
        self.looks += 1
        self.between(self.looks)


def looked(monkeypatch: pytest.MonkeyPatch, models: list[Broadcasting], between: Callable[[int], None]) -> None:
    """Looks until ``models`` is empty."""
    reference = weakref.ref(models[0])
    monkeypatch.setattr(rank_checks, "time", Clock(between))
    rank_checks._look_at_broadcasts(reference, 3, 8.0)


def test_a_long_wait_is_told_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    models = [Broadcasting()]
    waits = contextlib.ExitStack()
    said: list[str] = []

    def between(look: int) -> None:
        said.append(capfd.readouterr().err)
        if look in (2, 14):
            waits.enter_context(models[0].one())
        elif look in (12, 20):
            waits.close()
        elif look == 21:
            models.clear()

    looked(monkeypatch, models, between)
    # Seen in looks 2 and 14 for the first time, told 8 s later, read one look later.
    assert [(number, text) for number, text in enumerate(said, 1) if text] == [(7, LINE), (19, LINE)]


def test_a_model_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(rank_checks, "DistributedDataParallel", Broadcasting)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    model, comm = Broadcasting(), types.SimpleNamespace(world_size=2, rank=0)
    for _ in range(2):
        rank_checks.tell_of_broadcasts(model, comm)
    rank_checks.tell_of_broadcasts(Broadcasting(), types.SimpleNamespace(world_size=1, rank=0))
    assert len(started) == 1


def test_broadcasts_one_after_the_other_are_no_wait(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    models = [Broadcasting()]
    calls = contextlib.ExitStack()

    def between(look: int) -> None:
        calls.close()
        if look == 40:
            models.clear()
        elif look % 10:
            calls.enter_context(models[0].one())

    looked(monkeypatch, models, between)
    assert capfd.readouterr().err == ""
