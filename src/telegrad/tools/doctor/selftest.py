"""The self-test: real ranks on this machine, each collective against the known sum, and two failures that must be
named. Each case prints one line of JSON; numbers are small integers, so that the known sums are exact in any order.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector, TransportError
from telegrad.launch import LaunchError, RankExit, Ranks, RanksTimedOut, join

Floats = npt.NDArray[np.float32]

_TIMEOUT_S = 10.0
_LIVENESS_S = 8.0
_COUNTS = (1, 1000, 300_007)  # also several segments with a short last one
_LENGTH = 50_000  # of sparse vectors
_LATE_S = 0.1
_MANY_TIMES = 1_000_000


def collectives(interface: str) -> None:
    """All cases, one after another. After one that failed by an exception nothing more can be done."""
    with _joined(interface) as communicator:
        for name, case in CASES.items():
            try:
                fault = case(communicator)
            except TransportError as error:
                _say(case=name, fault=f"{type(error).__name__}: {error}")
                return
            _say(case=name, fault=fault)


def reduce_for_ever(interface: str) -> None:
    """Until a peer fails; the self-test kills one."""
    communicator = _joined(interface)
    x = np.ones(1000, np.float32)
    try:
        for number in range(_MANY_TIMES):
            communicator.all_reduce(x, "avg")
            if number == 5:
                _say(ready=True)
    except TransportError as error:
        _say(error=type(error).__name__, peer=error.peer, text=str(error))
    communicator.close()


def call_differently(interface: str) -> None:
    """The last rank reduces one element more than the others."""
    communicator = _joined(interface)
    odd = communicator.rank == communicator.world_size - 1
    x = np.ones(1000 + odd, np.float32)
    try:
        communicator.barrier()  # so that nobody hears of it while it still joins
        communicator.all_reduce(x)
    except TransportError as error:
        _say(error=type(error).__name__, peer=error.peer, text=str(error), untouched=bool((x == 1).all()))
    communicator.close()


def _joined(interface: str) -> Communicator:
    return join(
        timeout_s=_TIMEOUT_S, liveness_timeout_s=_LIVENESS_S, interface=interface or None, join_timeout_s=_TIMEOUT_S
    )


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _dense_input(rank: int, count: int) -> Floats:
    return ((np.arange(count) * (rank + 3) + 7 * rank) % 17 - 8).astype(np.float32)


def _dense_sum(size: int, count: int) -> Floats:
    total = np.zeros(count, np.float32)
    for rank in range(size):
        total += _dense_input(rank, count)
    return total


def _sparse_input(rank: int) -> tuple[npt.NDArray[np.uint32], Floats]:
    """Every 97th entry, at another place on each rank, and a stretch that all have."""
    own = np.arange(rank * 5, _LENGTH, 97)
    indices = np.union1d(own, np.arange(1000, 1100)).astype(np.uint32)
    return indices, _dense_input(rank, _LENGTH)[indices]


def _sparse_sum(size: int) -> Floats:
    total = np.zeros(_LENGTH, np.float32)
    for rank in range(size):
        indices, values = _sparse_input(rank)
        total[indices] += values
    return total


def _compared(got: npt.NDArray[Any], right: npt.NDArray[Any], what: str) -> str:
    """What is wrong with ``got``; empty if it is right."""
    if got.shape != right.shape:
        return f"{what} has shape {got.shape} instead of {right.shape}"
    wrong = got != right
    if not wrong.any():
        return ""
    at = tuple(int(place) for place in np.argwhere(wrong)[0])
    first = ", ".join(map(str, at))
    return f"{int(wrong.sum())} of {got.size} values of {what} are wrong: [{first}] is {got[at]} instead of {right[at]}"


def _dense(algorithm: str) -> Callable[[Communicator], str]:
    def case(communicator: Communicator) -> str:
        rank, size = communicator.rank, communicator.world_size
        faults = []
        for count in _COUNTS:  # all of them, also after a wrong one: the other ranks go on too
            x = _dense_input(rank, count)
            communicator.all_reduce(x, algorithm=algorithm)
            faults.append(_compared(x, _dense_sum(size, count), f"the sum of {count} elements"))
        return _first(faults)

    return case


def _first(faults: list[str]) -> str:
    return next(filter(None, faults), "")


def _same_bits(communicator: Communicator) -> str:
    """Sums of numbers that round: any rank may err in the last bits, but all alike."""
    x = np.random.default_rng(communicator.rank).standard_normal(10_001).astype(np.float32)
    communicator.all_reduce(x, "avg")
    everybody = communicator.all_gather(x.view(np.uint32))
    return _compared(everybody, np.broadcast_to(everybody[0], everybody.shape), "the ranks' bits")


def _sparse(communicator: Communicator) -> str:
    indices, values = _sparse_input(communicator.rank)
    total = communicator.all_reduce(SparseVector(indices, values, _LENGTH))
    return _compared(np.asarray(total.to_dense()), _sparse_sum(communicator.world_size), "the sparse sum")


def _sparse_into(communicator: Communicator) -> str:
    indices, values = _sparse_input(communicator.rank)
    out = np.full(_LENGTH, np.nan, np.float32)
    communicator.all_reduce_into(SparseVector(indices, values, _LENGTH), out)
    return _compared(out, _sparse_sum(communicator.world_size), "the sum of sparse vectors")


def _all_gather(communicator: Communicator) -> str:
    rank, size = communicator.rank, communicator.world_size
    gathered = communicator.all_gather(np.arange(5000, dtype=np.int64) * (rank + 1))
    right = np.stack([np.arange(5000, dtype=np.int64) * (other + 1) for other in range(size)])
    return _compared(gathered, right, "what was gathered")


def _broadcast(communicator: Communicator) -> str:
    faults = []
    for root in range(communicator.world_size):
        x = np.arange(5000, dtype=np.int32) * (communicator.rank + 1)
        communicator.broadcast(x, root)
        right = np.arange(5000, dtype=np.int32) * (root + 1)
        faults.append(_compared(x, right, f"what rank {root} sent"))
    return _first(faults)


def _barrier(communicator: Communicator) -> str:
    """Nobody may leave before the last has come. One machine has one monotonic clock."""
    if communicator.rank == communicator.world_size - 1:
        time.sleep(_LATE_S)
    came_s = time.monotonic()
    communicator.barrier()
    left_s = time.monotonic()
    last_came_s = communicator.all_gather(np.array([came_s])).max()
    return "" if left_s >= last_came_s else f"left {last_came_s - left_s:.3f} s before the last rank had come"


def _in_flight(communicator: Communicator) -> str:
    rank, size = communicator.rank, communicator.world_size
    vectors = [_dense_input(rank, 100 * number) for number in range(1, 17)]
    works = [communicator.all_reduce(x, async_op=True) for x in vectors]
    for work in reversed(works):
        work.wait()
    return _first([_compared(x, _dense_sum(size, x.size), f"the sum of {x.size} elements") for x in vectors])


def _join(communicator: Communicator) -> str:
    return "" if communicator.driver == "ucx" else f"the driver is {communicator.driver!r} instead of 'ucx'"


CASES: Mapping[str, Callable[[Communicator], str]] = {
    "ranks start and join": _join,
    "dense, ring": _dense("ring"),
    "dense, recursive doubling": _dense("recursive_doubling"),
    "same bits on all ranks": _same_bits,
    "sparse": _sparse,
    "sparse into dense": _sparse_into,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "16 operations in flight": _in_flight,
}
"""By name: a function that does one collective and says what is wrong with its result."""


NETWORKS: Mapping[str, str] = {"shared memory": "shm,tcp,self", "tcp": "tcp,self"}
"""The networks that the self-test tries, each with the transports that UCX may use then."""
PROGRAM = "telegrad.tools.doctor.selftest"
KILLED, MISMATCHED = "a killed rank is named", "a mismatched call is named"


@dataclass(frozen=True)
class CheckOutcome:
    """One line of the self-test. ``fault``: what is wrong, empty if nothing."""

    network: str
    check: str
    fault: str
    took_s: float | None = None


@dataclass(frozen=True)
class SelfTest:
    """``ranks``: at least 2. ``interface``: the one that TCP uses, None for UCX's choice. ``timeout_s``: for all of it.

    ``networks``: names of NETWORKS. ``program``: the module with what the ranks do; tests put in one that is wrong.
    """

    ranks: int = 2
    timeout_s: float = 30.0
    interface: str | None = None
    networks: tuple[str, ...] = tuple(NETWORKS)
    program: str = PROGRAM
    environment: Mapping[str, str] | None = None


Say = Callable[[CheckOutcome], None]
_Lines = dict[int, list[dict[str, Any]]]


def checks_of(test: SelfTest) -> list[tuple[str, str]]:
    """Network and name of everything that ``run`` will report, in that order."""
    return [(network, check) for network in test.networks for check in (*CASES, KILLED, MISMATCHED)]


def run(test: SelfTest, *, on_outcome: Say = lambda _: None) -> list[CheckOutcome]:
    """Runs it; ``on_outcome`` sees each line as it comes. Never raises for what is tested; ends its ranks in any case.

    Raises ``ValueError`` for bad arguments.
    """
    if test.ranks < 2:
        raise ValueError(f"ranks={test.ranks} must be at least 2: one rank alone has nobody to talk to")
    deadline = time.monotonic() + test.timeout_s
    outcomes: list[CheckOutcome] = []

    def say(outcome: CheckOutcome) -> None:
        outcomes.append(outcome)
        on_outcome(outcome)

    for network in test.networks:
        _Part(test, network, deadline, say).run()
    return outcomes


def as_json(outcomes: Sequence[CheckOutcome], test: SelfTest) -> dict[str, object]:
    """What ``telegrad test --json`` prints."""
    return {
        "kind": "telegrad self-test",
        "version": 1,
        "ranks": test.ranks,
        "passed": all(not outcome.fault for outcome in outcomes),
        "checks": [asdict(outcome) for outcome in outcomes],
    }


class _Part:
    """The checks over one network."""

    def __init__(self, test: SelfTest, network: str, deadline: float, say: Say) -> None:
        self._test = test
        self._network = network
        self._deadline = deadline
        self._say = say
        self._began_s = time.monotonic()

    def run(self) -> None:
        self._collectives()
        self._killed()
        self._mismatched()

    def _collectives(self) -> None:
        """Each case is told as soon as all ranks have said how it went."""
        told = 0
        names = tuple(CASES)
        lines: _Lines = {rank: [] for rank in range(self._test.ranks)}

        def tell() -> None:
            nonlocal told
            while told < len(names) and all(len(said) > told for said in lines.values()):
                case = names[told]
                faults = [_fault_of(rank, said[told], case) for rank, said in lines.items()]
                self._tell(case, "; ".join(filter(None, faults)))
                told += 1

        def take(rank: int, line: dict[str, Any]) -> None:
            lines[rank].append(line)
            tell()

        exits, fault = self._start("collectives", take)
        fault = fault or _ended_badly(exits)
        if told < len(names):
            self._tell(names[told], fault or "the ranks ended before they had done it")
            for case in names[told + 1 :]:
                self._tell(case, "not reached")
        elif fault:
            self._tell("ranks end cleanly", fault)

    def _killed(self) -> None:
        """The last rank is killed while all reduce; each of the others must get PeerFailed naming it."""
        victim = self._test.ranks - 1
        lines: _Lines = {rank: [] for rank in range(self._test.ranks)}

        def take(rank: int, line: dict[str, Any]) -> None:
            lines[rank].append(line)

        def kill(ranks: Ranks) -> None:
            while not all(lines.values()):
                if len(ranks.running()) < self._test.ranks:
                    return  # one ended too early, which its exit tells
                ranks.listen()
            ranks.signal(victim, signal.SIGKILL)

        exits, fault = self._start("reduce_for_ever", take, kill)
        faults = [fault] if fault else []
        if not fault and (exits[victim].returncode != -signal.SIGKILL or not all(lines.values())):
            faults = [_ended_badly(exits) or f"rank {victim} was to be killed and ended by itself"]
        if not faults:
            for rank in range(victim):
                failure = next((line for line in lines[rank] if "error" in line), {})
                if (failure.get("error"), failure.get("peer")) != ("PeerFailed", victim):
                    faults.append(f"rank {rank} got {_told(failure)} instead of PeerFailed of rank {victim}")
                elif exits[rank].returncode != 0:
                    faults.append(_ended_badly([exits[rank]]))
        self._tell(KILLED, "; ".join(faults))

    def _mismatched(self) -> None:
        """The last rank reduces another length; all must get MismatchedCall."""
        lines: _Lines = {rank: [] for rank in range(self._test.ranks)}
        exits, fault = self._start("call_differently", lambda rank, line: lines[rank].append(line))
        faults = [fault or _ended_badly(exits)]
        if not faults[0]:
            for rank, said in lines.items():
                failure = next((line for line in said if "error" in line), {})
                if failure.get("error") != "MismatchedCall":
                    faults.append(f"rank {rank} got {_told(failure)} instead of MismatchedCall")
                elif not failure.get("untouched"):
                    faults.append(f"rank {rank}'s vector was changed all the same")
        self._tell(MISMATCHED, "; ".join(filter(None, faults)))

    def _start(
        self,
        function: str,
        take: Callable[[int, dict[str, Any]], None],
        once_started: Callable[[Ranks], None] = lambda _: None,
    ) -> tuple[list[RankExit], str]:
        """How the ranks ended, and why they did not (empty if they did)."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return [], f"not reached within {self._test.timeout_s:g} s"

        def parse(rank: int, line: str) -> None:
            with contextlib.suppress(ValueError):  # UCX may speak too
                if isinstance(said := json.loads(line), dict):
                    take(rank, said)

        interface = self._test.interface if self._network == "tcp" else None
        try:
            with Ranks(
                f"{self._test.program}:{function}",
                self._test.ranks,
                timeout_s=left_s,
                arguments=[interface or ""],
                environment={
                    "OMP_NUM_THREADS": "1",
                    **(self._test.environment or {}),
                    "UCX_TLS": NETWORKS[self._network],
                },
                on_line=parse,
            ) as ranks:
                once_started(ranks)
                return ranks.wait(until_all=True), ""
        except RanksTimedOut as error:
            return [], f"not done within {self._test.timeout_s:g} s{_where(str(error))}"
        except LaunchError as error:
            return [], str(error)

    def _tell(self, check: str, fault: str) -> None:
        now_s = time.monotonic()
        self._say(CheckOutcome(self._network, check, fault, now_s - self._began_s))
        self._began_s = now_s


def _fault_of(rank: int, line: Mapping[str, Any], case: str) -> str:
    if line.get("case") != case:
        return f"rank {rank} did {line.get('case')!r} in its place"
    return f"rank {rank}: {line['fault']}" if line.get("fault") else ""


def _ended_badly(exits: Sequence[RankExit]) -> str:
    return "; ".join(_words(end) for end in exits if end.returncode != 0)


def _words(end: RankExit) -> str:
    return f"rank {end.rank} ended with {end.how}: {_last(end.stderr) or '(it said nothing)'}"


def _last(text: str) -> str:
    """The last line: of a traceback, the error."""
    return text.strip().rpartition("\n")[2]


def _where(text: str) -> str:
    """Where the first late rank was, from the launcher's message."""
    place = next((line.strip() for line in text.splitlines() if line.lstrip().startswith("File ")), "")
    return f"; a rank was here: {place}" if place else ""


def _told(failure: Mapping[str, Any]) -> str:
    if not failure:
        return "no error"
    return f"{failure.get('error')} (peer {failure.get('peer')}): {failure.get('text', '')}"
