"""Operations on device tensors that break off at any of their steps."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from device_ranks import RANKS, values
from fake_device import DEVICE_TYPE, FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator
from telegrad.communicator.cuda import staging as stagings
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.staging import Lease, Staging
from telegrad.communicator.cuda.transfers import Pieces
from telegrad.errors import TransportError

pytestmark = pytest.mark.filterwarnings("ignore:an operation on device tensors has failed:RuntimeWarning")

N = 48
STEPS = (
    *("enter", "current_stream", "new_stream", "pinned", "copy_to_host", "copy_to_device", "write_value"),
    *("wait_value", "record", "wait_event", "keep"),
)


class Watched(Staging):
    """Knows where its leases are."""

    def check_all_came_back(self) -> None:
        with self._lock:
            self._take_back()
        counts = self.counts
        assert (counts.lent_bytes, counts.messages) == (0, 0)
        free = [lease for shelf in self._shelves.values() for lease in shelf]
        assert len({id(lease) for lease in free}) == len(free)
        words = [lease.words.ready for lease in free] + [words.ready for words in self._words]
        assert len(set(words)) == len(words)  # none is there twice
        assert len(free) + counts.dropped == counts.allocated
        assert counts.kept_bytes == sum(lease.nbytes for lease in free)
        assert not self._stranded


class Break:
    """Raises at the ``at``-th call of the runtime by this thread, before or after it."""

    def __init__(self, runtime: FakeRuntime, error: type[BaseException], *, at: int, after: bool) -> None:
        self.calls, self._thread = 0, threading.get_ident()
        self._at, self._error, self._after = at, error, after
        self._before = {name: getattr(runtime, name) for name in STEPS}
        self._runtime = runtime

    def __enter__(self) -> Break:
        for name, call in self._before.items():
            setattr(self._runtime, name, self._broken(call))
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._before:
            delattr(self._runtime, name)

    def _broken(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*arguments)
            self.calls += 1
            if self.calls != self._at:
                return call(*arguments)
            if self._after:
                call(*arguments)
            raise self._error("broken off here")

        return broken


@pytest.fixture
def staging(device: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched(device)
    monkeypatch.setitem(stagings._stagings, device, made)
    return made


@pytest.fixture
def streams(device: FakeRuntime) -> list[FakeStream]:
    return [device.new_stream() for _ in range(RANKS)]


CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "blocking": lambda comm, x: comm.all_reduce(x),
    "async": lambda comm, x: comm.all_reduce(x, async_op=True),
    "broadcast": lambda comm, x: comm.broadcast(x, 0, async_op=True),
    "gather": lambda comm, x: comm.all_gather(x),
}


class Lines:
    """Ctrl-C before the ``at``-th line that this thread runs of what puts an operation into streams; but not where a
    lock is held, since Python then looks at signals in fewer places than between any two lines."""

    FUNCTIONS = ("_leave", "_put", "_put_some", "stage", "begin", "fetch", "spoilt", "prepare")

    def __init__(self, _runtime: FakeRuntime, *, at: int) -> None:
        self.calls, self._at = 0, at

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        ours = "/communicator/cuda/" in code.co_filename and code.co_name in self.FUNCTIONS
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.calls += 1
            if self.calls == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt("broken off here")
        return self._line


def trial(
    device: FakeRuntime, staging: Watched, streams: list[FakeStream], call: Callable[..., Any], breaking: Any
) -> bool:
    """The first of three ranks calls, and breaks off. False: it did not."""
    comms = Communicator.local(RANKS, timeout_s=60.0)
    tensors = [on_fake_device(values(rank, N)) for rank in range(RANKS)]
    reasons: list[str] = []
    abort = comms[0].abort
    comms[0].abort = lambda reason: [reasons.append(reason), abort(reason)][1]  # type: ignore[method-assign]

    def run(rank: int) -> None:
        with device.on(streams[rank]):
            call(comms[rank], tensors[rank])

    broke = False
    with device.on(streams[0]), breaking:
        try:
            call(comms[0], tensors[0])
        except (KeyboardInterrupt, MemoryError):
            broke = True
    if reasons:
        assert broke
        for rank in range(RANKS):
            with pytest.raises(TransportError, match="of device tensors broke off: .*: broken off here"):
                [run(rank), comms[rank].synchronize()]
    else:
        for rank in range(1 - broke, RANKS):
            run(rank)
        for comm in comms:
            comm.synchronize()
    for stream in device.streams:
        stream.synchronize()
    found = tensors[0].as_subclass(torch.Tensor)
    if reasons:
        assert bool((found.isnan() | (found == values(0, N))).all())
    elif call is not CALLS["gather"]:
        root = call is CALLS["broadcast"]
        assert torch.equal(found, values(0, N) if root else sum(values(rank, N) for rank in range(RANKS)))
    for comm in comms:
        comm.close()
    for stream in device.streams:
        stream.synchronize()
    staging.check_all_came_back()
    return broke


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("error", "after"), [(MemoryError, False), (KeyboardInterrupt, True)])
def test_at_every_call_of_the_runtime(
    device: FakeRuntime,
    staging: Watched,
    streams: list[FakeStream],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    chunk_bytes: int,
    error: type[BaseException],
    after: bool,
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", chunk_bytes)
    at = 1
    while trial(device, staging, streams, CALLS[call], Break(device, error, at=at, after=after)):
        at += 1
    assert at > 6  # enter, current_stream, two copies, two words, and an event


@pytest.mark.parametrize("call", CALLS)
def test_between_any_two_lines(
    device: FakeRuntime, staging: Watched, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 100)
    at = 1
    while trial(device, staging, streams, CALLS[call], Lines(device, at=at)):
        at += 1
    assert at > 50


def in_use(staging: Watched) -> set[int]:
    """Addresses of buffers that are lent again by now."""
    leases: list[Lease] = []
    staging.lease([(1, 1)] * 4, leases)
    stream = staging._runtime.new_stream(torch.device(DEVICE_TYPE, 0))
    staging.give_back(stream, staging._runtime.record(stream), leases)
    stream.synchronize()  # type: ignore[attr-defined]
    return {lease.input_address for lease in leases}


def called(comm: Communicator, x: Any, device: FakeRuntime, stream: FakeStream) -> None:
    with device.on(stream), pytest.raises(KeyboardInterrupt):
        comm.all_reduce(x)


def test_memory_is_lent_again_once_streams_are_done_with_it(
    device: FakeRuntime, staging: Watched, streams: list[FakeStream]
) -> None:
    held, seen = threading.Event(), set[int]()
    streams[0].put(held.wait)
    copy = device.copy_to_host

    def copied(stream: FakeStream, address: int, *arguments: Any) -> None:
        copy(stream, address, *arguments)
        seen.add(address)
        raise KeyboardInterrupt

    (alone,) = Communicator.local(1)
    with alone, pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "copy_to_host", copied)
        called(alone, on_fake_device(values(0, N)), device, streams[0])
        assert len(seen) == 1
        assert not in_use(staging) & seen
        held.set()
        streams[0].synchronize()
        assert in_use(staging) >= seen
    staging.check_all_came_back()


def test_memory_is_not_lent_again_while_the_engine_has_it(
    device: FakeRuntime, staging: Watched, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    comms, seen = Communicator.local(2), set[int]()

    def waited(*_: Any) -> None:
        seen.update(lease.input_address for _, lease in comms[0]._transfers[DEVICE_TYPE]._outstanding)
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "wait_value", waited)
    monkeypatch.setattr(comms[0], "abort", lambda _: None)  # the engine goes on
    called(comms[0], on_fake_device(values(0, N)), device, streams[0])
    streams[0].synchronize()
    assert len(seen) == 1
    assert not in_use(staging) & seen
    for comm in comms:
        comm.close()
    assert not in_use(staging) & seen  # of what failed
    staging.check_all_came_back()


def test_what_the_engine_may_have_is_kept_until_close(
    device: FakeRuntime, staging: Watched, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, seen = Pieces.begin, set[int]()

    def begun(self: Pieces, lease: Lease, gate: Any) -> Any:
        seen.add(lease.input_address)
        begin(self, lease, gate)  # nobody hears of this request
        raise KeyboardInterrupt("broken off here")

    comms = Communicator.local(2)
    with monkeypatch.context() as patched:
        patched.setattr(Pieces, "begin", begun)
        called(comms[0], on_fake_device(values(0, N)), device, streams[0])
    with device.on(streams[1]), pytest.raises(TransportError, match="KeyboardInterrupt: broken off here"):
        [comms[1].all_reduce(on_fake_device(values(1, N))), comms[1].synchronize()]
    streams[0].synchronize()
    assert not in_use(staging) & seen
    for comm in comms:
        comm.close()
    for stream in streams:
        stream.synchronize()
    assert in_use(staging) >= seen
    staging.check_all_came_back()


def test_memory_of_which_nobody_knows_is_not_lent_again(
    device: FakeRuntime, staging: Watched, streams: list[FakeStream]
) -> None:
    """The device does nothing any more."""
    seen: set[int] = set()

    def fail(stream: FakeStream, address: int = 0, *_: Any) -> None:
        seen.add(address)
        raise RuntimeError("the device is lost")

    (alone,) = Communicator.local(1)
    with alone, device.on(streams[0]), pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "copy_to_host", fail)
        patched.setattr(device, "record", fail)
        with pytest.raises(RuntimeError, match="the device is lost"):
            alone.all_reduce(on_fake_device(values(0, N)))
    assert not in_use(staging) & seen
    assert staging.counts.lent_bytes == 4 * 2 * 4096  # what has just been used, and not that
    assert len(staging._stranded) == 1
