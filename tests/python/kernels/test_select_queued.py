"""Selections that nobody waits for, against the oracle of the others; without a GPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import selection_checks as checks
import selection_reference
from hypothesis import HealthCheck, Phase, example, given, settings
from triton_arrays import DEVICE, OnArrays, array_of, tensor_of, torch, turn_blocks_round

from telegrad.compress import GaussianThreshold, Residual, ReusedThreshold, SampledThreshold
from telegrad.compress.baselines import LOWERED_BY, LOWERED_MOST
from telegrad.kernels.select import Sign
from telegrad.kernels.select import triton as kernels
from telegrad.kernels.select.triton import launches
from telegrad.kernels.select.triton.launches import Reusing, reuse_table
from telegrad.kernels.triton import numbers_on

GPU = OnArrays(kernels)
examined = settings(
    max_examples=8,
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
    suppress_health_check=list(HealthCheck),
    deadline=None,
)


@pytest.fixture(params=["one block", "blocks", "blocks and a sample"])
def in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one block":
        return
    monkeypatch.setattr(launches, "BLOCK", 32)
    monkeypatch.setattr(launches, "PASS_BLOCK", 32)
    monkeypatch.setattr(launches, "PROGRAMS", 3)
    monkeypatch.setattr(launches, "GROUP", 2)
    turn_blocks_round(monkeypatch)
    if request.param == "blocks and a sample":
        monkeypatch.setattr(launches, "SMALL", 16)
        monkeypatch.setattr(launches, "ALONE", 16)


in_all_ways = pytest.mark.usefixtures("in_blocks")


@in_all_ways
@examined
@given(*checks.TOPK)
@example(np.array([5, 0, 0], np.float32), 0.67, 0, 0)
@example(np.array([-1, -1, -1], np.float32), 0.6, 0, 1)
@example(np.tile(np.array([1, -1, 0, 2, -3], np.float32), 40), 0.1, 1, 0)
@example(np.tile(np.array([1, -1, 0, 0, -3], np.float32), 40), 0.1, 1, -1)
def test_queue_topk(x: np.ndarray, share: float, seed: int, sign: Sign) -> None:
    k = max(1, round(share * x.size))
    checks.check_queued(GPU, "topk", x, seed, k, k, sign)


@in_all_ways
@examined
@given(*checks.SEARCH)
@example(np.ones(70, np.float32), 0.3, 1, 0, 1e-3)
@example(np.tile(np.array([1, -1, 0, 2, -3], np.float32), 40), 0.1, 1, -1, 0.1)
def test_queue_search(x: np.ndarray, share: float, seed: int, sign: Sign, tolerance: float) -> None:
    k = max(1, round(share * x.size))
    checks.check_queued(GPU, "search", x, seed, min(2 * k, x.size), (k, tolerance), sign)


@pytest.mark.parametrize("most", [8192, 4], ids=["in registers", "ranked one by one"])
@examined
@given(*checks.BUCKETS)
@example(np.ones(70, np.float32), 8, 3, 1)
def test_queue_buckets(most: int, x: np.ndarray, bucket: int, share: int, seed: int) -> None:
    per_bucket, rest = min(share, bucket), x.size % bucket
    of_last = 1 + seed % min(share, rest) if rest else 0
    room = x.size // bucket * per_bucket + of_last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_MOST_OF_A_BUCKET", most)
        checks.check_queued(GPU, "buckets", x, seed, room, (bucket, per_bucket, of_last), None)


@in_all_ways
@pytest.mark.parametrize(
    ("in_blocks", "k"),
    [
        *(("one block", 1), ("one block", 149), ("blocks", 1), ("blocks", 60)),
        *(("blocks and a sample", 7), ("blocks and a sample", 149)),
    ],
    indirect=["in_blocks"],
)
def test_queue_normal_is_the_policy_on_a_cpu(k: int) -> None:
    """With tails long and short, ties, none that is finite, and nothing at all."""
    rng, policy = np.random.default_rng(k), GaussianThreshold()
    drawn = rng.standard_normal((3, 150)).astype(np.float32)
    drawn[1] **= 5
    drawn[2] = rng.uniform(1, 1.1, 150)
    others = (np.ones(150), np.zeros(150), np.full(150, 3e38), np.r_[np.zeros(140), np.arange(10)])
    for x in (*drawn, *(one.astype(np.float32) for one in others)):
        entry = Residual("x", np.zeros(150, np.float32), k=k)
        wanted, found = checks.outputs(policy.capacity(entry)), tensor_of(np.full(1, -5))
        residual, indices, values = map(tensor_of, (np.zeros(150, np.float32), *checks.outputs(policy.capacity(entry))))
        count = policy.select(entry, x.copy(), *wanted, 7)
        how = (policy.deviations(entry), LOWERED_BY, LOWERED_MOST)
        kernels.queue_normal(residual, tensor_of(x), k, how, indices, values, found, 7)
        assert int(found) == count
        assert checks.bits(array_of(indices)[:count]) == checks.bits(wanted[0][:count])
        assert checks.bits(array_of(values)[:count]) == checks.bits(wanted[1][:count])
        assert checks.bits(array_of(residual)) == checks.bits(entry.values)


@in_all_ways
@pytest.mark.parametrize("k", [1, 20, 75, 76, 149, 150])
def test_queue_random(k: int) -> None:
    x = np.random.default_rng(k).standard_normal(150).astype(np.float32)
    for call in (0, 1, 2**32 - 1):
        wanted, expected = checks.outputs(k), x.copy()
        selection_reference.accumulate_random(expected, x, k, (5, call, 3, 9), *wanted, 7)
        residual, indices, values = map(tensor_of, (x, *checks.outputs(k)))
        count, drawn = tensor_of(np.full(1, -5)), tensor_of(np.array([call]))
        kernels.queue_random(residual, tensor_of(x), k, (5, drawn, 3, 9), indices, values, count, 7)
        assert int(count) == k
        assert checks.bits(array_of(indices)) == checks.bits(wanted[0])
        assert checks.bits(array_of(values)) == checks.bits(wanted[1])
        assert checks.bits(array_of(residual)) == checks.bits(expected)


@pytest.mark.parametrize("size", [launches.BLOCK - 1, launches.BLOCK, 2 * launches.BLOCK + 1, 40_000])
def test_long_vectors(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    for sign in (0, -1):
        checks.check_queued(GPU, "topk", x, size, size // 50, size // 50, sign)
    checks.check_queued(GPU, "search", x, size, size // 25, (size // 50, 1e-3), 0)


@pytest.mark.parametrize("bound", [1, 0x7F000000], ids=["too low", "too high"])
@pytest.mark.parametrize("sign", [0, 1, -1])
def test_a_sample_that_misleads_changes_nothing(bound: int, sign: Sign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "BLOCK", 256)
    monkeypatch.setattr(launches, "PASS_BLOCK", 256)
    monkeypatch.setattr(launches, "SMALL", 1000)
    said: list[bool] = []

    def misled(residual: torch.Tensor, *_: object) -> torch.Tensor:
        said.append(True)
        return numbers_on(residual, bound)

    monkeypatch.setattr(launches, "sampled_bound", misled)
    x = np.random.default_rng(0).integers(-60, 61, 3000).astype(np.float32)
    checks.check_queued(GPU, "topk", x, 1, 30, 30, sign)
    assert len(said) == 1


@pytest.mark.parametrize("size", [3000, 40_000])
def test_the_host_asks_for_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor_of(np.random.default_rng(0).standard_normal(size).astype(np.float32))
    gradient = x.flip(0)
    indices, values = map(tensor_of, checks.outputs(50))
    count = tensor_of(np.zeros(1, np.int32))
    parts, counts, active = [_reusing(x, 25, threshold=0.0)], numbers_on(x, 0), numbers_on(x, 1)
    table, own = reuse_table(parts).to(DEVICE), numbers_on(x, 0)
    kernels.queue_topk(x, gradient, 50, indices, values, count, 0)  # a device's first waits for the sample's numbers
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    else:

        def asks(*_: Any, **__: Any) -> Any:
            raise AssertionError("the host reads what the device has made")

        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, asks)
    try:
        kernels.queue_topk(x, gradient, 50, indices, values, count, 0)
        kernels.queue_reused(parts, table, gradient, indices, values, counts, active=active, interval=8, gain=0.1)
        kept = {"interval": 8, "gain": 0.0, "tolerance": 0.1}
        kernels.queue_reused(parts, table, gradient, indices, values, own, active=active, **kept)
        kernels.queue_search(x, gradient, 25, 1e-3, indices, values, count, 0, active=active)
        kernels.queue_normal(x, gradient, 25, (2.0, 0.9, 20), indices, values, count, 0, active=active)
        kernels.queue_buckets(x, gradient, x.numel() // 10, 5, 0, indices, values, count, 0, active=active)
        kernels.queue_random(x, gradient, 50, (1, own, 0, 0), indices, values, count, 0, active=active)
    finally:  # else the tests behind this one would fail, too
        monkeypatch.undo()
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert counts.tolist() == [25]


def test_outputs_that_are_too_short() -> None:
    x, count = tensor_of(np.ones(105, np.float32)), tensor_of(np.zeros(1, np.int64))
    indices, values = map(tensor_of, checks.outputs(10))
    with pytest.raises(ValueError, match="hold 10 entries, but up to 11 are to be moved: make them longer"):
        kernels.queue_topk(x, None, 11, indices, values, count, 0)
    with pytest.raises(ValueError, match="hold 9 entries, but up to 10 are to be moved: make them longer"):
        kernels.queue_search(x, None, 5, 0.1, indices, values[:9], count, 0)


@in_all_ways
@pytest.mark.parametrize("active", [0, 1])
@pytest.mark.parametrize("name", ["topk", "all", "reused", "sampled", "search", "normal", "buckets", "random"])
def test_a_gradient_that_takes_no_part_changes_nothing(name: str, active: int) -> None:
    x = np.random.default_rng(3).standard_normal(150).astype(np.float32)
    gradient = x[::-1].copy() if active else np.full(150, np.nan, np.float32)
    residual, indices, values = map(tensor_of, (x, *checks.outputs(150)))
    count, takes_part = tensor_of(np.full(1, -5)), tensor_of(np.array([active]))
    part, given = _reusing(residual, 60, 0.5, 1, offset=7), tensor_of(gradient)
    if name in ("reused", "sampled"):
        kept = {"interval": 4, "gain": 0.1, "tolerance": 0.1 if name == "sampled" else None}
        _queue([part], torch.cat([given[:7], given]), indices, values, count, active=takes_part, **kept)
    else:
        whats = {"topk": (20,), "search": (20, 0.1), "normal": (20, (1.5, 0.9, 20)), "buckets": (40, 3, 2)}
        what: Any = (20, (5, tensor_of(np.zeros(1, np.int64)), 0, 0)) if name == "random" else whats.get(name, ())
        getattr(kernels, f"queue_{name}")(residual, given, *what, indices, values, count, 7, active=takes_part)
    moved = int(count)
    assert (moved > 0) == bool(active)
    assert (array_of(residual).tobytes() == x.tobytes()) == (not active)
    assert (part.threshold.tolist() == [0.5]) == (name not in ("reused", "sampled") or not active)
    if active:
        sums = x + gradient
        chosen = array_of(indices)[:moved].astype(int) - 7
        assert checks.bits(array_of(values)[:moved]) == checks.bits(sums[chosen])
        sums[chosen] = 0
        assert checks.bits(array_of(residual)) == checks.bits(sums)


@in_all_ways
@pytest.mark.parametrize(
    ("in_blocks", "policy"),
    [
        *(("one block", ReusedThreshold(interval=4)), ("blocks", SampledThreshold(interval=4))),
        *(("blocks and a sample", kind(interval=4)) for kind in (ReusedThreshold, SampledThreshold)),
    ],
    indirect=["in_blocks"],
    ids=str,
)
def test_queue_reused_is_the_policy_on_a_cpu(policy: ReusedThreshold | SampledThreshold) -> None:
    """Thresholds that fit, that let too many or too few pass, and ties at 0; of several residuals, some of which are
    left out now and then."""
    rng = np.random.default_rng(5)
    ks, sizes = [1, 9, 60, 130], [150, 30, 300, 150]
    entries = [Residual(str(k), np.zeros(size, np.float32), k=k) for k, size in zip(ks, sizes, strict=True)]
    rooms = [policy.capacity(entry) for entry in entries]
    starts, offsets, places = [0, *np.cumsum(rooms)], [3, *(4 + np.cumsum(sizes))], [2, 0, 1, 3]
    parts = [
        _reusing(tensor_of(entry.values), entry.k, 0.0, start=int(start), offset=int(offset), place=place)
        for entry, start, offset, place in zip(entries, starts, offsets, places, strict=False)
    ]
    held = [0, 0]
    for step, scale in enumerate([1, 1, 1, 1, 1, 1, 100, 100, 1e-6, 1, 0, 1, 1]):
        gradient = (scale * rng.standard_normal(offsets[-1])).astype(np.float32)
        if step == 3:
            gradient[:] = 2.0
        active = np.ones(4, np.int64)
        active[places[step % 5 :]] = step != 5  # of a gradient that has never been left out, and of others
        indices, values, counts = *map(tensor_of, checks.outputs(starts[-1])), tensor_of(np.full(4, -5))
        kept: dict[str, Any] = {"interval": policy.interval, "gain": getattr(policy, "gain", 0.0)}
        kept["tolerance"] = getattr(policy, "tolerance", None)
        _queue(parts, tensor_of(gradient), indices, values, counts, active=tensor_of(active), **kept)
        for number, (entry, part) in enumerate(zip(entries, parts, strict=True)):
            found, own = 0, checks.outputs(part.room)
            if active[part.place]:
                given = gradient[part.offset : part.offset + entry.size].copy()
                found = policy.select(entry, given, *own, part.offset)
            assert int(counts[number]) == found
            room = slice(part.start, part.start + found)
            assert checks.bits(array_of(indices)[room]) == checks.bits(own[0][:found])
            assert checks.bits(array_of(values)[room]) == checks.bits(own[1][:found])
            assert checks.bits(array_of(part.residual)) == checks.bits(entry.values)
            assert int(part.calls) == entry.calls
            assert float(part.threshold) == pytest.approx(entry.threshold or 0.0, rel=1e-14)
            held[entry.calls > 1] += 1
    assert min(held) > (10 if isinstance(policy, ReusedThreshold) else 5)


@in_all_ways
@examined
@given(*checks.TOPK[:3])
@example(np.zeros(40, np.float32), 0.5, 0)
def test_queue_reused_finds_the_largest(x: np.ndarray, share: float, seed: int) -> None:
    """Of arrays of all kinds, between others."""
    k = max(1, round(share * x.size))
    room = min(2 * k, x.size)
    around = np.random.default_rng(seed).standard_normal(70).astype(np.float32)
    first, own, last = (tensor_of(one) for one in (around, x, around))
    parts = [
        _reusing(first, 3, 0.0),
        _reusing(own, k, 0.0, start=6, place=1),
        _reusing(last, 5, 0.5, 1, start=6 + room, place=2),
    ]
    indices, values, counts = *map(tensor_of, checks.outputs(16 + room)), tensor_of(np.zeros(3, np.int64))
    _queue(parts, None, indices, values, counts, interval=8, gain=0.1)
    wanted, residual = checks.outputs(k), x.copy()
    selection_reference.accumulate_topk(residual, None, k, *wanted, 0)
    assert int(counts[1]) == k
    assert checks.bits(array_of(indices)[6 : 6 + k]) == checks.bits(wanted[0])
    assert checks.bits(array_of(values)[6 : 6 + k]) == checks.bits(wanted[1])
    assert checks.bits(array_of(own)) == checks.bits(residual)


def test_what_queue_reused_cannot_do() -> None:
    x = tensor_of(np.ones(40, np.float32))
    indices, values, counts = *map(tensor_of, checks.outputs(12)), tensor_of(np.zeros(1, np.int64))
    how: dict[str, Any] = {"interval": 8, "gain": 0.1}
    with pytest.raises(ValueError, match="hold 12 entries, but up to 13 are to be moved: make them longer"):
        _queue([_reusing(x, 6, 0.0, start=1)], None, indices, values, counts, **how)
    with pytest.raises(ValueError, match="k=41 must be 1 to 40, the entries of the residual"):
        _queue([_reusing(x, 41, 0.0)], None, *map(tensor_of, checks.outputs(80)), counts, **how)
    with pytest.raises(ValueError, match="gradient has 39 entries, residual 40: give one for each"):
        _queue([_reusing(x, 6, 0.0, offset=1)], x, indices, values, counts, **how)
    with pytest.raises(TypeError, match="residual is torch.float64: it must be torch.float32"):
        _queue([_reusing(x.double(), 6, 0.0)], x, indices, values, counts, **how)
    kernels.queue_reused([], x, x, indices, values, counts, **how)


@pytest.mark.parametrize("misled", [None, 1, 0x7F000000], ids=["as it is", "too low", "too high"])
def test_a_threshold_of_a_long_residual_is_found_anew_among_few(
    misled: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And among all of it where the sample misled; in between nothing is ranked."""
    size, k = 40_000, 400
    monkeypatch.setattr(launches, "ALONE", size)
    ranked_among: list[int] = []
    rank_listed, sampled_bound = launches._Alone._rank_listed, launches.sampled_bound

    def listing(own: Any, listed: torch.Tensor) -> Any:
        ranked_among.append(int(listed))
        return rank_listed(own, listed)

    def misleading(*given: Any) -> None:
        sampled_bound(*given)
        if misled is not None and not ranked_among:
            given[-1].fill_(misled)

    monkeypatch.setattr(launches._Alone, "_rank_listed", listing)
    monkeypatch.setattr(launches, "sampled_bound", misleading)
    rng, policy = np.random.default_rng(2), ReusedThreshold(interval=3)
    entry = Residual("x", np.zeros(size, np.float32), k=k)
    x = tensor_of(entry.values)
    part = _reusing(x, k, 0.0)
    for _ in range(4):
        gradient = rng.standard_normal(size).astype(np.float32)
        x.zero_()  # so that about as many reach the threshold each time
        entry.values[:] = 0
        indices, values, count = *map(tensor_of, checks.outputs(2 * k)), tensor_of(np.zeros(1, np.int64))
        kept = {"interval": policy.interval, "gain": policy.gain}
        _queue([part], tensor_of(gradient), indices, values, count, **kept)
        wanted = checks.outputs(2 * k)
        found = policy.select(entry, gradient, *wanted, 0)
        assert int(count) == found
        assert checks.bits(array_of(indices)[:found]) == checks.bits(wanted[0][:found])
        assert checks.bits(array_of(x)) == checks.bits(entry.values)
    first, *between, anew = ranked_among
    assert between == [0, 0]
    assert k <= anew <= 2 * k
    assert first == 0 if misled is not None else k <= first <= 2 * k


def _reusing(
    residual: torch.Tensor, k: int, threshold: float, calls: int = 0, start: int = 0, offset: int = 0, place: int = 0
) -> Reusing:
    kept = tensor_of(np.array([threshold])), tensor_of(np.array([calls]))
    return Reusing(residual, k, *kept, start, offset, place)


def _queue(parts: list[Reusing], *tensors: Any, **options: Any) -> None:
    kernels.queue_reused(parts, reuse_table(parts).to(DEVICE), *tensors, **options)
