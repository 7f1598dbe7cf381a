"""Up to which size a peer takes part. Its calls' times are made up."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from telegrad import Communicator
from telegrad.tools.bench import allreduce
from telegrad.tools.bench.plan import AllreducePlan


@dataclass
class _Peer:
    name: str
    seconds: Callable[[int], float]  # of a call of so many bytes
    clock: list[float]
    called: list[int] = field(default_factory=list)

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        self.called.append(x.nbytes)
        self.clock[0] += self.seconds(x.nbytes)

    def close(self) -> None:
        pass


def test_a_peer_goes_as_far_as_its_calls_are_bearable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(allreduce.time, "perf_counter", lambda: clock[0])
    sizes = (64 << 20, 16 << 20, 1 << 20, 4)
    plan = AllreducePlan(
        benchmark="allreduce", network="shm", ranks=1, sizes=sizes, algorithms=("auto",), samples=3, seconds=1
    )
    fast = _Peer("fast", lambda size: size / 1e9, clock)
    slow = _Peer("slow", lambda size: 0.01 + size / 2e5, clock)
    (communicator,) = Communicator.local(1)
    with communicator:
        vector = np.zeros(max(sizes) // 4, np.float32)
        longest = allreduce._within_reach(plan, communicator, [fast, slow], vector)
    assert longest == {"fast": 64 << 20, "slow": 4 << 16}
    assert slow.called == [4, *(4 << 2 * power for power in range(9))]
    assert json.loads(capsys.readouterr().out) == {
        "missing": "slow",
        "why": "too slow above 256 KiB, where a call took 1.3 s",
    }
