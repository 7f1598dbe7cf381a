"""MeasuredTimeline: what is made of moments that a clock in hand gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hand_clock import HandClock
from synchronised_net import OnRanks, data, loss_of, model_of

from telegrad import Communicator, Synchronizer
from telegrad.synchronizer.measured_timeline import WINDOW, MeasuredTimeline


def one_pass(timeline: MeasuredTimeline, hand: HandClock, ready: Sequence[float], ended: Sequence[float]) -> None:
    """Groups become ready at these seconds after the first gradient, in order, and leave at once."""
    first = hand.now
    timeline.begin()
    for group, at in enumerate(ready):
        hand.now = first + at
        timeline.ready(group)
        timeline.launched(group)
    timeline.backward_over()
    hand.now = max(hand.now, *(first + at for at in ended))
    timeline.close([first + at for at in ended])


def warmed_up(sizes: Sequence[int], before_first_s: float = 0.0) -> tuple[MeasuredTimeline, HandClock]:
    hand = HandClock(100.0)
    timeline = MeasuredTimeline(sizes, hand)
    timeline.before_first_s = before_first_s
    for _ in range(2):
        one_pass(timeline, hand, [50.0] * len(sizes), [90.0] * len(sizes))
    assert timeline.medians() is None
    return timeline, hand


def test_medians_of_passes_from_the_start_of_the_backward_pass() -> None:
    timeline, hand = warmed_up([10, 30], before_first_s=0.5)
    for late in (0.0, 1.0, 9.0):
        one_pass(timeline, hand, [1.0, 4.0], [2.0 + late / 10, 6.0 + late])
        hand.now += 1.0
    found = timeline.medians()
    assert found is not None
    assert found.passes == 3
    assert [(one.size, one.ready_s, one.launched_s) for one in found.groups] == [(10, 1.5, 1.5), (30, 4.5, 4.5)]
    assert [one.finish_s for one in found.groups] == pytest.approx([2.6, 7.5])
    assert (found.backward_s, found.exposed_s) == (4.5, 3.0)
    assert found.finish_s == 7.5
    assert found.network_s == pytest.approx(1.1 + 3.0)
    assert found.step_s == pytest.approx(8.0)  # of 6 (no break before it), 8 and 16 seconds


def test_sums_that_overlap_count_once() -> None:
    timeline, hand = warmed_up([1, 1, 1])
    one_pass(timeline, hand, [1.0, 2.0, 9.0], [5.0, 4.0, 10.0])
    found = timeline.medians()
    assert found is not None
    assert found.network_s == 5.0


def test_a_group_without_all_gradients_is_ready_when_it_leaves() -> None:
    timeline, hand = warmed_up([1, 1])
    timeline.begin()
    first, hand.now = hand.now, hand.now + 3
    timeline.launched(0)
    timeline.ready(1)
    timeline.launched(1)
    timeline.backward_over()
    timeline.close([first + 4, first + 4])
    found = timeline.medians()
    assert found is not None
    assert [one.ready_s for one in found.groups] == [3.0, 3.0]


def test_a_sum_does_not_end_before_it_leaves() -> None:
    """The engine looks at the clock once in a turn."""
    timeline, hand = warmed_up([1])
    one_pass(timeline, hand, [1.0], [0.5])
    found = timeline.medians()
    assert found is not None
    assert found.groups[0].finish_s == 1.0
    assert found.network_s == 0.0


def test_a_pass_that_was_broken_off_counts_nowhere() -> None:
    timeline, hand = warmed_up([1])
    timeline.begin()
    hand.now += 1000
    one_pass(timeline, hand, [1.0], [2.0])
    found = timeline.medians()
    assert found is not None
    assert (found.passes, found.finish_s, found.step_s) == (1, 2.0, 0.0)
    timeline.close([3.0])  # nothing is open
    timeline.ready(0)
    timeline.launched(0)
    timeline.backward_over()
    assert timeline.passes == 1


def test_the_window_moves_on() -> None:
    timeline, hand = warmed_up([1])
    for number in range(WINDOW + 10):
        one_pass(timeline, hand, [1.0], [2.0 if number < 10 else 3.0])
    found = timeline.medians()
    assert found is not None
    assert (found.passes, found.finish_s) == (WINDOW, 3.0)
    for _ in range(3):
        one_pass(timeline, hand, [2.0], [6.0])
    assert timeline.totals(5) == (2.0, 4.0)
    assert timeline.totals(WINDOW) == (1.0, 2.0)
    assert warmed_up([1])[0].totals(5) is None


def test_a_synchronizer_measures_every_pass(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="wfbp")
        for step in range(5):
            model.zero_grad()
            with sync.no_sync():
                loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            loss_of(model, step, comm.rank, scaled=step % 2 == 0).backward()  # type: ignore[no-untyped-call]
        found = sync._timeline.medians()
        assert found is not None
        assert found.passes == 3
        assert [one.size for one in found.groups] == [
            sum(4 * model.get_parameter(name).numel() for name in names) for names in sync.groups
        ]
        assert all(0 <= one.ready_s <= one.launched_s <= one.finish_s for one in found.groups)
        assert found.network_s > 0
        assert found.backward_s > 0
        assert found.exposed_s > 0
        assert found.step_s > 0
        with torch.no_grad():
            model(data(0, 0))
        assert sync._timeline.passes == 3

    on_ranks(2, run)


def test_the_mean_step_is_of_passes_since_the_restart() -> None:
    timeline, hand = warmed_up([1])
    assert timeline.mean_step_s() is None
    for pause in (1.0, 2.0, 6.0):
        hand.now += pause
        one_pass(timeline, hand, [1.0], [3.0])
    assert timeline.mean_step_s() == pytest.approx(6.0)
    timeline.restart()
    for pause in (100.0, 200.0):
        hand.now += pause
        one_pass(timeline, hand, [1.0], [3.0])
        assert timeline.mean_step_s() is None
    hand.now += 4.0
    one_pass(timeline, hand, [1.0], [3.0])
    assert timeline.mean_step_s() == pytest.approx(7.0)
    assert timeline.passes == 1


def test_passes_count_once_their_moments_are_known() -> None:
    timeline, hand = warmed_up([1])
    hand.known_s = hand.now
    for length in (2.0, 4.0, 6.0):
        one_pass(timeline, hand, [1.0], [length])
    found = []
    for known_s in (100.0 + 180.0, 100.0 + 182.0, 100.0 + 185.9, 100.0 + 186.0, 100.0 + 192.0):
        hand.known_s = known_s
        medians = timeline.medians()
        found.append((timeline.passes, medians and medians.finish_s))
    assert found == [(0, None), (1, 2.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    assert timeline.mean_step_s() == pytest.approx((2.0 + 4.0 + 6.0) / 3)
    assert timeline.totals(1) == (1.0, 5.0)


def test_what_becomes_known_after_a_restart_counts_nowhere() -> None:
    timeline, hand = warmed_up([1])
    hand.known_s = hand.now
    one_pass(timeline, hand, [1.0], [50.0])
    timeline.restart()
    for _ in range(2):
        one_pass(timeline, hand, [1.0], [70.0])
    one_pass(timeline, hand, [1.0], [2.0])
    hand.known_s = hand.now
    found = timeline.medians()
    assert found is not None
    assert (found.passes, found.finish_s, found.step_s) == (1, 2.0, 2.0)
