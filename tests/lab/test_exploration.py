"""The explorer from Python: seeds in parallel are the same as in sequence, and a seed replays exactly."""

from __future__ import annotations

import json

import pytest

from lab.simulated_faults import LAST_SEED, Died, Exploration, Failure, explore, replay, troubles
from telegrad import _core


def test_two_thousand_seeds_are_clean() -> None:
    found = explore(0, 2000)
    assert found.failures == []
    assert (found.seeds, found.hangs, found.wrong) == (2000, 0, 0)
    assert found.errors_named > 500
    assert found.results > 25_000
    assert 2 <= found.ranks_most <= 33
    assert sum(found.troubles.values()) == 2000


def test_processes_share_the_work_without_changing_what_is_found() -> None:
    counts: list[int] = []
    together = explore(7, 600, ranks=(2, 9), jobs=2, on_progress=lambda count, _: counts.append(count))
    assert sorted(counts) == [100, 250, 250]
    assert together.to_dict() == explore(7, 600, ranks=(2, 9), jobs=1).to_dict()


def test_only_one_trouble() -> None:
    found = explore(0, 500, only="kill", jobs=1)
    assert +found.troubles == {"kill": found.seeds}
    assert 0 < found.seeds < 500


def test_every_trouble_is_found_and_can_be_asked_for() -> None:
    names = troubles()
    assert {"none", "kill", "freeze", "scrambled_head", "abort"} <= set(names)
    # In this process: a start for each one would take most of the time.
    seeds = {name: Exploration.from_json(_core.explore(0, 500, 2, 3, name)).seeds for name in names}
    assert all(seeds.values()), seeds
    assert sum(seeds.values()) == 500


def test_the_last_seed_can_be_played() -> None:
    assert explore(LAST_SEED - 1, 2, ranks=(2, 3), jobs=1).seeds == 2
    assert replay(LAST_SEED, ranks=(2, 3)).program.startswith(f"seed {LAST_SEED}: ")


def test_a_seed_replays_exactly() -> None:
    once, again = replay(11), replay(11)
    assert once == again
    assert once.program.startswith("seed 11: ")
    assert once.trace.count("\n") == once.events
    assert replay(12).trace_hash != once.trace_hash
    assert replay(11, ranks=(20, 20)).program.startswith("seed 11: 20 ranks")


def test_what_is_found_adds_up_in_the_order_of_seeds() -> None:
    a = Exploration(seeds=2, hangs=1, ranks_most=5, failures=[Failure(9, "hang", "x")])
    a.troubles["kill"] = 1
    b = Exploration(seeds=3, wrong=1, ranks_most=4, failures=[Failure(4, "wrong result", "y")])
    b.troubles["kill"] = 2
    a.add(b)
    told = json.loads(json.dumps(a.to_dict()))
    assert (told["seeds"], told["hangs"], told["wrong"], told["ranks_most"]) == (5, 1, 1, 5)
    assert told["troubles"] == {"kill": 3}
    assert [one["seed"] for one in told["failures"]] == [4, 9]


def test_failures_are_read_from_the_core() -> None:
    told = json.loads(_core.explore(0, 1, 2, 3))
    told["failures"] = [{"seed": 0, "what": "hang", "detail": "rank 1 never ends"}]
    assert Exploration.from_json(json.dumps(told)).failures == [Failure(0, "hang", "rank 1 never ends")]


def test_a_crash_and_an_endless_seed_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = [Died(9, "endless", "time was used up"), Died(3, "crash", "the process ended by signal SIGABRT")]
    monkeypatch.setattr("lab.simulated_faults.play_chunks", lambda *_: iter(deaths))
    found = explore(0, 10)
    assert (found.seeds, found.hangs, found.crashes) == (2, 1, 1)
    assert [(one.seed, one.what) for one in found.failures] == [(3, "crash"), (9, "endless")]
    assert found.to_dict()["crashes"] == 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        explore(-1, 5)
    with pytest.raises(ValueError, match="must not be negative"):
        explore(0, -5)
    with pytest.raises(ValueError, match="jobs=0 must be at least 1"):
        explore(0, 5, jobs=0)
    with pytest.raises(ValueError, match="are no range"):
        explore(0, 5, ranks=(1, 4))
    with pytest.raises(ValueError, match="no trouble that the explorer knows: use none, .*, kill, .*, abort"):
        explore(0, 5, only="sunshine")
    with pytest.raises(ValueError, match=f"2 seeds from {LAST_SEED} go beyond {LAST_SEED}, the last: begin earlier"):
        explore(LAST_SEED, 2)
    with pytest.raises(ValueError, match=f"is beyond {LAST_SEED}, the last"):
        replay(LAST_SEED + 1)
    with pytest.raises(ValueError, match="must not be negative"):
        replay(-1)
    with pytest.raises(ValueError, match="are no range"):
        replay(1, ranks=(5, 4))
