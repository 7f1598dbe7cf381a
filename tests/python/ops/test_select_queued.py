"""Selections that nobody waits for, against the oracle of the others; without a GPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import selection_checks as checks
from hypothesis import HealthCheck, Phase, example, given, settings
from triton_arrays import DEVICE, OnArrays, array_of, tensor_of, torch, turn_blocks_round

from telegrad.compress import Residual, ReusedThreshold
from telegrad.ops.select import Sign
from telegrad.ops.select import triton as kernels
from telegrad.ops.select.triton import Kept, queued, ranked, sources
from telegrad.ops.select.triton.many import is_long, rank_table
from telegrad.ops.triton import numbers_on

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
    monkeypatch.setattr(sources, "BLOCK", 32)
    monkeypatch.setattr(sources, "PASS_BLOCK", 32)
    monkeypatch.setattr(sources, "PROGRAMS", 3)
    turn_blocks_round(monkeypatch)
    if request.param == "blocks and a sample":
        monkeypatch.setattr(ranked, "SMALL", 16)
        monkeypatch.setattr(queued, "SAMPLED", 16)


in_all_ways = pytest.mark.usefixtures("in_blocks")


@in_all_ways
@examined
@given(*checks.SELECT)
@example(np.ones(200, np.float32), 1, 70, 0.25, 0)  # more than there is room for
@example(np.tile(np.array([1, -1], np.float32), 100), 2, 64, 0.25, -1)
@example(np.ones(200, np.float32), 1, 0, 0.25, 0)
@example(np.ones(70, np.float32), 1, 70, 0.25, 0)
def test_queue_select(x: np.ndarray, seed: int, capacity: int, threshold: float, sign: Sign) -> None:
    checks.check_queued(GPU, "select", x, seed, capacity, threshold, sign)


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


@pytest.mark.parametrize("size", [sources.BLOCK - 1, sources.BLOCK, 2 * sources.BLOCK + 1, 40_000])
def test_long_vectors(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    for sign in (0, -1):
        checks.check_queued(GPU, "topk", x, size, size // 50, size // 50, sign)
    checks.check_queued(GPU, "select", x, size, size // 50, 2.0, 0)  # 4.6 % reach it, and 2 % have room


@pytest.mark.parametrize("bound", [1, 0x7F000000], ids=["too low", "too high"])
@pytest.mark.parametrize("sign", [0, 1, -1])
def test_a_sample_that_misleads_changes_nothing(bound: int, sign: Sign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 256)
    monkeypatch.setattr(sources, "PASS_BLOCK", 256)
    monkeypatch.setattr(ranked, "SMALL", 1000)
    said: list[bool] = []

    def misled(residual: torch.Tensor, *_: object) -> torch.Tensor:
        said.append(True)
        return numbers_on(residual, bound)

    monkeypatch.setattr(ranked, "sampled_bound", misled)
    x = np.random.default_rng(0).integers(-60, 61, 3000).astype(np.float32)
    checks.check_queued(GPU, "topk", x, 1, 30, 30, sign)
    assert len(said) == 1


@pytest.mark.parametrize("size", [3000, 40_000])
def test_the_host_asks_for_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor_of(np.random.default_rng(0).standard_normal(size).astype(np.float32))
    gradient = x.flip(0)
    indices, values = map(tensor_of, checks.outputs(50))
    count = tensor_of(np.zeros(1, np.int32))
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
        kernels.queue_select(x, None, 0.5, indices, values, count, 0)
        limits = numbers_on(x, 25, 50, size).view(1, 3)
        kept = Kept(numbers_on(x, 0).to(torch.float64), numbers_on(x, 0), limits, 8, 0.1)
        kernels.queue_reused([x], [gradient], [25], kept, [indices], [values], [count], [0], [numbers_on(x, 1)])
    finally:  # else the tests behind this one would fail, too
        monkeypatch.undo()
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert count.tolist() == [25]


def test_outputs_that_are_too_short() -> None:
    x, count = tensor_of(np.ones(105, np.float32)), tensor_of(np.zeros(1, np.int64))
    indices, values = map(tensor_of, checks.outputs(10))
    with pytest.raises(ValueError, match="hold 10 entries, but up to 11 are to be moved: make them longer"):
        kernels.queue_topk(x, None, 11, indices, values, count, 0)
    with pytest.raises(ValueError, match="hold 9 entries, but up to 10 are to be moved: make them longer"):
        kernels.queue_select(x, None, 0.5, indices, values[:9], count, 0)


@in_all_ways
@pytest.mark.parametrize("active", [0, 1])
@pytest.mark.parametrize("name", ["topk", "all", "reused"])
def test_a_gradient_that_takes_no_part_changes_nothing(name: str, active: int) -> None:
    x = np.random.default_rng(3).standard_normal(150).astype(np.float32)
    gradient = x[::-1].copy() if active else np.full(150, np.nan, np.float32)
    residual, indices, values = map(tensor_of, (x, *checks.outputs(150)))
    count, takes_part = tensor_of(np.full(1, -5)), tensor_of(np.array([active]))
    kept = Kept(tensor_of(np.array([0.5])), tensor_of(np.array([1])), tensor_of(np.array([[60, 120, 150]])), 4, 0.1)
    given = tensor_of(gradient)
    if name == "reused":
        kernels.queue_reused([residual], [given], [60], kept, [indices], [values], [count], [7], [takes_part])
    else:
        what = [20] if name == "topk" else []
        getattr(kernels, f"queue_{name}")(residual, given, *what, indices, values, count, 7, active=takes_part)
    moved = int(count)
    assert (moved > 0) == bool(active)
    assert (array_of(residual).tobytes() == x.tobytes()) == (not active)
    assert (kept.threshold.tolist() == [0.5]) == (name != "reused" or not active)
    if active:
        sums = x + gradient
        chosen = array_of(indices)[:moved].astype(int) - 7
        assert checks.bits(array_of(values)[:moved]) == checks.bits(sums[chosen])
        sums[chosen] = 0
        assert checks.bits(array_of(residual)) == checks.bits(sums)


@pytest.mark.parametrize("together", [False, True])
@in_all_ways
def test_queue_reused_is_the_policy_on_a_cpu(together: bool) -> None:
    """Thresholds that fit, that let too many or too few pass, and ties at 0; of several residuals together, which are
    ranked alone or in one launch."""
    rng = np.random.default_rng(5)
    ks, sizes, numbers = [1, 9, 60, 130], [150, 30, 300, 150], range(4)
    policy = ReusedThreshold(interval=4)
    entries = [Residual(str(k), np.zeros(size, np.float32), k=k) for k, size in zip(ks, sizes, strict=True)]
    residuals = [tensor_of(entry.values) for entry in entries]
    limits = tensor_of(np.array([[k, min(2 * k, size), size] for k, size in zip(ks, sizes, strict=True)]))
    table = rank_table(residuals, ks).to(DEVICE) if together and any(map(is_long, residuals)) else None
    kept = Kept(tensor_of(np.zeros(4)), tensor_of(np.zeros(4, np.int64)), limits, policy.interval, policy.gain)
    reused = 0
    for step, scale in enumerate([1, 1, 1, 1, 1, 1, 100, 100, 1e-6, 1, 0, 1, 1]):
        gradients = [(scale * rng.standard_normal(size)).astype(np.float32) for size in sizes]
        if step == 3:
            for one in gradients:
                one[:] = 2.0
        tensors = [[*map(tensor_of, checks.outputs(policy.capacity(entry)))] for entry in entries]
        counts = [tensor_of(np.zeros(1, np.int64)) for _ in ks]
        given = [tensor_of(one) for one in gradients]
        indices, values = ([pair[kind] for pair in tensors] for kind in (0, 1))
        kernels.queue_reused(residuals, given, ks, kept, indices, values, counts, [7, 8, 9, 10], None, table)
        for number, entry in zip(numbers, entries, strict=True):
            indices_, values_ = checks.outputs(policy.capacity(entry))
            found = policy.select(entry, gradients[number].copy(), indices_, values_, 7 + number)
            assert int(counts[number]) == found
            assert checks.bits(array_of(indices[number])[:found]) == checks.bits(indices_[:found])
            assert checks.bits(array_of(values[number])[:found]) == checks.bits(values_[:found])
            assert checks.bits(array_of(residuals[number])) == checks.bits(entry.values)
            assert int(kept.calls[number]) == entry.calls
            assert float(kept.threshold[number]) == pytest.approx(entry.threshold, rel=1e-14)
            reused += entry.calls > 1
    assert reused > 10


@pytest.mark.parametrize("misled", [None, 1, 0x7F000000], ids=["as it is", "too low", "too high"])
def test_a_threshold_of_a_long_residual_is_found_anew_among_few(
    misled: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And among all of it where the sample misled; in between nothing is ranked."""
    size, k = 40_000, 400
    monkeypatch.setattr(queued, "SAMPLED", size)
    ranked_among: list[int] = []
    rank_listed, sampled_bound = queued._rank_listed, queued.sampled_bound

    def listing(made: Any, residual: torch.Tensor, k: int, listed: torch.Tensor, out: Any) -> Any:
        ranked_among.append(int(listed))
        return rank_listed(made, residual, k, listed, out)

    def misleading(*given: Any) -> None:
        sampled_bound(*given)
        if misled is not None and not ranked_among:
            given[-1].fill_(misled)

    monkeypatch.setattr(queued, "_rank_listed", listing)
    monkeypatch.setattr(queued, "sampled_bound", misleading)
    rng, policy = np.random.default_rng(2), ReusedThreshold(interval=3)
    entry = Residual("x", np.zeros(size, np.float32), k=k)
    x = tensor_of(entry.values)
    limits = tensor_of(np.array([[k, 2 * k, size]]))
    kept = Kept(tensor_of(np.zeros(1)), tensor_of(np.zeros(1, np.int64)), limits, policy.interval, policy.gain)
    table = rank_table([x], [k]).to(DEVICE)
    for _ in range(4):
        gradient = rng.standard_normal(size).astype(np.float32)
        x.zero_()  # so that about as many reach the threshold each time
        entry.values[:] = 0
        indices, values, count = *map(tensor_of, checks.outputs(2 * k)), tensor_of(np.zeros(1, np.int64))
        kernels.queue_reused([x], [tensor_of(gradient)], [k], kept, [indices], [values], [count], [0], None, table)
        wanted = checks.outputs(2 * k)
        found = policy.select(entry, gradient, *wanted, 0)
        assert int(count) == found
        assert checks.bits(array_of(indices)[:found]) == checks.bits(wanted[0][:found])
        assert checks.bits(array_of(x)) == checks.bits(entry.values)
    first, *reused, anew = ranked_among
    assert reused == [0, 0]
    assert k <= anew <= 2 * k
    assert first == 0 if misled is not None else k <= first <= 2 * k
