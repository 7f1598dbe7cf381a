"""``python -m lab simulated-membership``: what it plays, prints and finds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lab.simulated_membership import command, replicas, virtual
from lab.simulated_membership.virtual import Clock, Process, VirtualPrefixStore, VirtualStore
from lab.simulated_membership.world import drawn, play, worst_of
from telegrad.communicator import membership

_app = typer.Typer()
_app.command()(command.command)


def _hands() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if isinstance(one, virtual._Hand)}


@pytest.fixture(autouse=True)
def not_too_long() -> Iterator[None]:
    """A program that hangs in real time would hang the tests."""
    before = _hands() if not virtual._idle else set()  # a test of another file may have left them in a program's midst
    yield
    assert virtual._idle or _hands() <= before  # threads are back


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_all_agree_and_compute_again(first: int) -> None:
    found = command.explored(first, 20)
    assert found["failures"] == []
    counts = found["counts"]
    assert min(counts[name] for name in ("sums", "groups", "shrunk", "grown", "joined", "killed", "frozen")) > 0


@pytest.mark.parametrize(
    "seed",
    [
        1259,  # a rank is lost just as the others decide: they waited for its silence twice
        1379,
        40045,  # a rank read what another one had just removed, for which torch's store waits
        5020,  # a rank freezes in grow(): another one that still waited for it was left out
        63,  # a rank is frozen for longer than an answer of the store may take, which it took for the store's end
        111,  # a rank that was left out after two attempts was told the number of a group that it never had
        201092,  # a rank that gave up before it connected was not heard of: the simulated network kept it
        201972,
        507000,  # two ranks 0 were lost before they cleared the store, and a part of it stayed
        517559,  # a slow store told of a group whose members were gone, and had taken others in before
        73,  # not an error: a process that was refused, and taken in after it had ended, counted as running
        419472,  # a rank that had been frozen since an earlier group hid that the next ones had given another one up
    ],
)
def test_what_once_went_wrong(seed: int) -> None:
    assert play(seed).findings == []


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_replicas_come_and_go(first: int) -> None:
    """And all that are left go on with the same bits."""
    found = command.explored(first, 20, replicas.play)
    assert found["failures"] == []
    counts = found["counts"]
    assert min(counts[name] for name in ("rounds", "groups", "joined", "failed", "killed", "frozen")) > 0


@pytest.mark.parametrize(
    "seed",
    [
        112,  # a rank failed while another one of its replica waited for it
        257,  # what a frozen rank's peer had said was removed, and each waited for the other's word
        261,  # a newcomer waited for a rank that had ended
        409,  # a newcomer waited for a rank that was killed before its first sign of life
        593,
    ],
)
def test_what_once_went_wrong_with_replicas(seed: int) -> None:
    assert replicas.play(seed).findings == []


@pytest.mark.parametrize("playing", [play, replicas.play])
def test_a_seed_gives_the_same_history_again(playing: Callable[[int], Any]) -> None:
    first, second = playing(7), playing(7)
    assert first.trace == second.trace
    assert len(first.trace) > 5
    assert (first.now_s, first.counts) == (second.now_s, second.counts)


def test_the_modules_are_as_before_afterwards() -> None:
    before = {name: getattr(membership, name) for name in ("time", "threading", "queue", "Future", "state_here")}
    play(1)
    assert {name: getattr(membership, name) for name in before} == before


def test_programs_differ() -> None:
    assert len({str(drawn(seed)) for seed in range(20)}) == 20
    assert {drawn(seed).size for seed in range(50)} == {1, 2, 3, 4, 5}


def test_a_broken_agreement_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership._Watch, "is_gone", lambda *_: True)
    assert any(worst_of(play(seed)) is not None for seed in range(20))


def test_replicas_are_replayed() -> None:
    done = CliRunner().invoke(_app, ["--replicas", "--replay", "3"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "processes a replica" in done.output
    assert "0 findings" in done.output


def test_a_seed_is_replayed() -> None:
    done = CliRunner().invoke(_app, ["--replay", "3"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "decides on group 0" in done.output
    assert "0 findings" in done.output


def test_processes_play_seeds(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--seeds", "30", "--jobs", "1", "--json", str(file)]
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "30 seeds from 0, 0 failures" in done.output
    found = json.loads(file.read_text())
    assert found["seeds"] == 30
    assert found["failures"] == []
    assert found["counts"]["groups"] > 30


def test_a_failing_seed_is_told_with_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"counts": {}, "failures": [{"seed": 7, "what": "hang", "detail": "rank 1\nsomewhere"}]})
    monkeypatch.setattr("lab.simulated_membership.command.play_chunks", lambda *_: [command.Played(1, [text])])
    done = CliRunner().invoke(_app, ["--seeds", "1"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "hang: rank 1\n" in done.output
    assert "python -m lab simulated-membership --replay 7" in done.output


def _on_stores(call: Any, *stores: Any) -> list[Any]:
    found = []
    for store in stores:
        value = call(store)
        found.append(bytes(value) if isinstance(value, bytes | bytearray) else value)
    return found


def test_the_virtual_store_answers_as_torch_does() -> None:
    distributed = pytest.importorskip("torch.distributed")
    draw = random.Random(1)
    real, process = distributed.HashStore(), _process()
    clock = Clock([process], 1)
    pretended = VirtualPrefixStore("here", VirtualStore(clock))
    prefixed = distributed.PrefixStore("here", real)
    differing = []

    def compare(_: Process) -> None:
        for _ in range(500):
            key = draw.choice("abcd")
            word = draw.choice(["", "x", "y"])
            call = draw.choice(
                [
                    lambda store, key=key, word=word: store.set(key, word or "z"),
                    lambda store, key=key: store.get(key) if store.check([key]) else None,
                    lambda store, key=key: store.check([key, "a"]),
                    lambda store, key=key: store.add(f"count {key}", 2),
                    lambda store, key=key, word=word: store.compare_set(key, word, "y"),
                    lambda store, key=key: store.delete_key(key),
                ]
            )
            one, other = _on_stores(call, prefixed, pretended)
            if one != other:
                differing.append((one, other))

    clock.run(compare)
    assert differing == []
    assert clock.findings == []
    assert clock.now_s > 0.0


def test_threads_that_wait_for_nothing_are_found() -> None:
    clock = Clock([_process()], 1)
    clock.run(lambda _: clock.wait(float("inf")))
    assert worst_of(clock) == ("hang", clock.findings[0][1])  # type: ignore[arg-type]
    assert "nothing is left to happen, and threads wait" in clock.findings[0][1]


def test_an_error_of_a_process_is_found() -> None:
    clock = Clock([_process()], 1)
    clock.run(lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
    ((what, detail),) = clock.findings
    assert what == "crash"
    assert "ZeroDivisionError" in detail


def _process() -> Process:
    return Process(0, 0, 0.0, False, False, True, -1, [], (0.0, 0.0, 0.0), ("", 0.0), random.Random(1))


def test_planted_sources_are_imported_instead(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    source = tmp_path / "membership.py"
    text = (root / "src/telegrad/communicator/membership.py").read_text()
    source.write_text(text.replace("here + coming, tickets)", "coming + here, tickets)"))
    planted = f"telegrad.communicator.membership={source}"
    command = [sys.executable, str(root / "tests/mutants/explore_membership.py"), "--plant", planted, "--seeds", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    (failure,) = json.loads(done.stdout)["failures"]
    assert failure["what"] == "wrong group"
