"""Which sizes and algorithms the sweep looks at: decisions from times alone, without a network."""

from __future__ import annotations

from telegrad.cost import ALLREDUCE_ALGORITHMS
from telegrad.tuning.sweep import close_calls, contenders, grid

_FIRST, _SECOND = ALLREDUCE_ALGORITHMS[:2]
_OTHERS = list(ALLREDUCE_ALGORITHMS[2:])


def test_the_grid_goes_from_4_bytes_to_64_mib_and_looks_beside_crossings() -> None:
    plain = grid([])
    assert plain == sorted(plain)
    assert (plain[0], plain[-1]) == (4, 64 << 20)
    assert {1 << power for power in range(10, 27)} <= set(plain)
    with_crossings = grid([92_000, 1 << 40])
    assert set(with_crossings) - set(plain) == {78_200, 110_400}
    assert set(grid([1 << 20, 1 << 19])) - set(plain) == {891_288, 1_258_292, 445_644, 629_144}
    assert grid([(1 << 20) * 8 // 10]) == sorted({*plain, 713_032})  # the other is next to 1 MiB
    assert all(size % 4 == 0 for size in with_crossings)


def test_everybody_may_be_good_before_anything_is_known() -> None:
    assert contenders(4, {}) == list(ALLREDUCE_ALGORITHMS)


def test_who_is_far_behind_is_left_out_until_it_could_have_caught_up() -> None:
    times_s = {1024: {_FIRST: 1e-5, _SECOND: 1e-4}}
    for size, left_out in ((1024, True), (2048, True), (4096, True), (8192, False), (1 << 20, False)):
        assert (_SECOND not in contenders(size, times_s)) is left_out, size
        assert _FIRST in contenders(size, times_s)


def test_the_last_known_time_counts_where_an_algorithm_was_left_out() -> None:
    times_s = {1024: {_FIRST: 1e-5, _SECOND: 1e-4}, 2048: {_FIRST: 1e-9}}
    assert _SECOND not in contenders(4096, times_s)
    assert _SECOND in contenders(16384, times_s)


def test_close_sizes_and_the_middle_between_different_bests_are_looked_at_again() -> None:
    samples = {
        1024: {_FIRST: [1e-4], _SECOND: [1.2e-4]},  # close
        4096: {_FIRST: [1e-3], _SECOND: [2e-3]},  # clear
        16384: {_FIRST: [4e-3], _SECOND: [2e-3]},  # clear, and the other way round
    }
    assert close_calls(samples) == [(1024, [_FIRST, _SECOND]), (8192, [_FIRST, _SECOND])]


def test_microseconds_are_close_whatever_their_ratio() -> None:
    assert close_calls({4: {_FIRST: [2e-6], _SECOND: [5e-6]}}) == [(4, [_FIRST, _SECOND])]
    assert close_calls({4: {_FIRST: [2e-6], _SECOND: [7e-6]}}) == []


def test_who_was_as_fast_as_the_best_only_once_is_looked_at_again() -> None:
    disturbed = [9e-5, 4e-5, 2.5e-4, 2e-4]
    assert close_calls({4096: {_FIRST: disturbed, _SECOND: [5e-5] * 4}}) == [(4096, [_FIRST, _SECOND])]
    assert close_calls({4096: {_FIRST: [1e-4, *disturbed[2:]], _SECOND: [5e-5] * 4}}) == []
