"""Which trials are drawn, and who is to be blamed in them."""

from __future__ import annotations

import numpy as np
import pytest

from lab.faults.trials import DECK_SIZE, KINDS, MISMATCHES, Call, Options, Trial, draw

_DRAWN = [draw(seed, Options()) for seed in range(8 * DECK_SIZE)]
_BYTES = {"f32": 4, "i32": 4, "bf16": 2}


def _mismatch(
    kind: str, size: int, odd: tuple[int, ...], calls: tuple[Call, ...], odd_calls: tuple[Call, ...]
) -> Trial:
    return Trial(
        *(0, kind, size, "shm", tuple((call,) for call in calls), 1, odd[0], 0.0, 8.0), odd=odd, odd_calls=odd_calls
    )


def test_a_seed_gives_the_same_trial_on_every_rank() -> None:
    options = Options((3, 5), ("tcp",), ("kill", "count"), 1.5)
    again = Options.from_json(options.to_json())
    assert again == options
    assert [draw(seed, again) for seed in range(20)] == [draw(seed, options) for seed in range(20)]
    drawn = [draw(seed, options) for seed in range(20)]
    assert {trial.kind for trial in drawn} == {"kill", "count"}
    assert {trial.size for trial in drawn} == {3, 4, 5}
    assert len(set(map(str, drawn))) == 20


def test_any_deck_of_seeds_holds_every_kind_and_all_draws_hold_every_size_and_network() -> None:
    for start in range(0, len(_DRAWN), DECK_SIZE):
        assert {trial.kind for trial in _DRAWN[start : start + DECK_SIZE]} == set(KINDS)
    assert {trial.size for trial in _DRAWN} == set(range(2, 9))
    assert {trial.network for trial in _DRAWN} == {"shm", "tcp"}
    calls = [call for trial in _DRAWN for call in trial.calls]
    operations = {"all_reduce", "sparse", "sparse_into", "all_gather", "broadcast", "barrier"}
    assert {call.operation for call in calls} == operations
    assert {call.algorithm for call in calls} == {"auto", "ring", "recursive_doubling"}
    assert min(call.count for call in calls) == 0
    assert 1 << 19 < max(call.count for call in calls) <= 1 << 20
    assert {len(batch) for trial in _DRAWN for batch in trial.batches} >= {1, 2, 6}


@pytest.mark.parametrize("trial", [trial for trial in _DRAWN if trial.is_mismatch][:120], ids=lambda trial: trial.seed)
def test_odd_ranks_call_alike_until_the_mismatch_and_differently_then(trial: Trial) -> None:
    sound = next(rank for rank in range(trial.size) if rank not in trial.odd)
    assert trial.calls_of(sound) == trial.calls
    for rank in trial.odd:
        mine = trial.calls_of(rank)
        assert mine[: trial.at] == trial.calls[: trial.at]
        assert mine[trial.at].agreed() != trial.calls[trial.at].agreed()
        assert len(mine) - len(trial.calls) == {"more": 1, "fewer": -1}.get(trial.kind, 0)
        assert all(trial.batches_of(rank))
    assert mine[-1].operation == trial.calls[-1].operation == "barrier"  # which nobody finishes alone


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_of_its_kind(kind: str) -> None:
    of_kind = [trial for trial in _DRAWN if trial.kind == kind]
    assert len(of_kind) >= 16
    assert any(len(trial.odd) > 1 for trial in of_kind)
    for trial in of_kind:
        right, odd = trial.calls[trial.at], trial.calls_of(trial.odd[0])[trial.at]
        if kind in ("count", "dtype", "reduction", "root", "algorithm", "switch_factor"):
            apart = {
                name
                for name in ("count", "dtype", "reduction", "root", "algorithm", "switch_factor")
                if getattr(right, name) != getattr(odd, name)
            }
            assert apart == {kind}
            assert right.family == odd.family
        if kind == "dtype" and right.family != "sparse":
            assert right.count * _BYTES[right.dtype] == odd.count * _BYTES[odd.dtype]
        if kind == "operation":
            assert right.family != odd.family


@pytest.mark.parametrize(
    ("size", "odd", "counts", "blamed"),
    [
        (2, (0,), (11,), 1),  # one against one: who has the lowest rank is right
        (2, (1,), (11,), 1),
        (4, (2,), (11,), 2),
        (4, (0,), (11,), 0),
        (4, (0, 3), (11, 11), 1),  # two against two
        (5, (0, 1, 3), (11, 11, 11), 2),  # the many are right
        (5, (1, 2, 4), (11, 12, 13), 1),  # each of them calls something else
    ],
)
def test_the_lowest_rank_outside_the_largest_group_is_blamed(
    size: int, odd: tuple[int, ...], counts: tuple[int, ...], blamed: int
) -> None:
    calls = (Call("barrier"), Call("all_reduce", 10), Call("barrier"))
    trial = _mismatch("count", size, odd, calls, tuple(Call("all_reduce", count) for count in counts))
    assert trial.blamed() == blamed


def test_a_call_left_out_meets_the_next_one() -> None:
    calls = (Call("barrier"), Call("all_reduce", 10), Call("broadcast", 5, root=1), Call("barrier"))
    trial = _mismatch("fewer", 3, (2,), calls, ())
    assert trial.calls_of(2) == (calls[0], calls[2], calls[3])
    assert trial.blamed() == 2
    swapped = _mismatch("order", 3, (0,), calls, ())
    assert swapped.calls_of(0) == (calls[0], calls[2], calls[1], calls[3])


def test_a_trial_without_fault_blames_nobody() -> None:
    trial = draw(0, Options(kinds=("none",)))
    assert trial.blamed() is None
    assert "no fault" in str(trial)


def test_sparse_sums_into_a_tensor_and_into_a_stream_are_the_same_to_the_peers() -> None:
    into, stream = Call("sparse_into", 7, density=0.5), Call("sparse", 7, density=0.1)
    assert into.agreed() == stream.agreed()
    assert not np.any([into.rooted, stream.rooted])
