"""The GPU's selections against the same oracle, bit for bit; where there is no GPU, in Triton's interpreter.

The interpreter is slow and runs one block after the other: so tensors are short here, blocks shorter still, and their
order is turned round.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import selection_checks as checks
from hypothesis import HealthCheck, Phase, example, given, settings
from triton_arrays import DEVICE, OnArrays, tensor_of, torch, turn_blocks_round

from telegrad.kernels.select import Chosen, Sign, cpu, kernels_of, triton
from telegrad.kernels.select import triton as kernels
from telegrad.kernels.select.triton import launches
from telegrad.kernels.triton import numbers_on

GPU = OnArrays(kernels)
BLOCK = launches.BLOCK

examined = settings(  # a smaller failing example would take the interpreter minutes to find
    max_examples=8,
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
    suppress_health_check=list(HealthCheck),
    deadline=None,
)


@pytest.fixture(params=["one block", "blocks", "blocks and a sample"])
def in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a short tensor goes, and, at a smaller scale, as a long one does."""
    if request.param == "one block":
        return
    monkeypatch.setattr(launches, "BLOCK", 32)
    monkeypatch.setattr(launches, "PASS_BLOCK", 32)
    monkeypatch.setattr(launches, "GROUP", 4)
    turn_blocks_round(monkeypatch)
    if request.param == "blocks and a sample":
        monkeypatch.setattr(launches, "SMALL", 16)
        monkeypatch.setattr(launches, "MOST_ADDED", 2)


in_all_ways = pytest.mark.usefixtures("in_blocks")


@in_all_ways
@examined
@given(*checks.SELECT)
@example(np.ones(200, np.float32), 1, 70, 0.25, 0)  # more than there is room for
def test_accumulate_select(x: np.ndarray, seed: int, capacity: int, threshold: float, sign: Sign) -> None:
    checks.check_select(GPU, x, seed, capacity, threshold, sign)


@in_all_ways
@examined
@given(*checks.TOPK)
@example(np.array([5, 0, 0], np.float32), 0.67, 0, 0)
@example(np.array([1e-40, 2e-40, 1, 0], np.float32), 0.75, 0, 0)
@example(np.array([-1, -1, -1], np.float32), 0.6, 0, 1)
@example(np.tile(np.array([1, -1, 0, 2, -3], np.float32), 40), 0.1, 1, 0)
@example(np.tile(np.array([1, -1, 0, 0, -3], np.float32), 40), 0.1, 1, -1)
def test_accumulate_topk(x: np.ndarray, share: float, seed: int, sign: Sign) -> None:
    checks.check_topk(GPU, x, share, seed, sign)


@examined
@given(*checks.TRIMMED)
def test_accumulate_trimmed(x: np.ndarray, share: float, seed: int, sign: Sign, step: float) -> None:
    checks.check_trimmed(GPU, x, share, seed, sign, step)


@in_all_ways
@examined
@given(*checks.SEARCH)
def test_accumulate_search(x: np.ndarray, share: float, seed: int, sign: Sign, tolerance: float) -> None:
    # Of these the sums are exact in any order: then the mean has the oracle's bits.
    x = np.where(np.isfinite(x), np.rint(np.clip(x, -1e6, 1e6) * 4) / 4, x)
    checks.check_search(GPU, x, share, seed, sign, tolerance)


@in_all_ways
@examined
@given(*checks.BUCKETS)
def test_accumulate_buckets(x: np.ndarray, bucket: int, share: int, seed: int) -> None:
    checks.check_buckets(GPU, x, bucket, share, seed)


@examined
@given(*checks.RANDOM)
def test_accumulate_random(x: np.ndarray, share: float, draw: tuple[int, int, int, int]) -> None:
    checks.check_random(GPU, x, share, draw)


@examined
@given(*checks.NORMAL)
def test_accumulate_normal(x: np.ndarray, seed: int) -> None:
    checks.check_normal(GPU, x, seed, rel=1e-6)


@pytest.mark.parametrize("size", [1, 17, 1000])
def test_accumulate_all(size: int) -> None:
    checks.check_all(GPU, size)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_lengths_around_a_block(size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.integers(-8, 9, size).astype(np.float32)  # many of each
    gradient = rng.integers(-8, 9, size).astype(np.float32)
    k = size // 50
    assert checks.expect_the_same(GPU, "accumulate_topk", x, k, gradient, k, sign=0).count == k
    checks.expect_the_same(GPU, "accumulate_search", x, 2 * k, gradient, k, 1e-3, sign=0)
    checks.check_select(GPU, x, size, k, 6.0, 0)
    assert checks.expect_the_same(GPU, "accumulate_random", x, k, gradient, k, (1, 2, 3, 4)).count == k


@pytest.mark.parametrize("seed", range(2))
def test_long_vectors_which_are_sampled(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(40_000) ** (1, 9)[seed]).astype(np.float32)
    gradient = rng.standard_normal(x.size).astype(np.float32)
    sign: Sign
    for sign in (0, 1, -1):
        assert checks.expect_the_same(GPU, "accumulate_topk", x, 400, gradient, 400, sign=sign).count == 400
    # The mean's last bits are its own, so the bound may be: k to 2k entries reach it, whichever it is.
    residual = x + gradient
    indices, values = checks.outputs(800)
    chosen = GPU.accumulate_search(residual, None, 400, 1e-3, indices, values, 0)
    moved = np.flatnonzero(np.abs(x + gradient) >= np.float32(chosen.threshold))
    assert 400 <= chosen.count == moved.size <= 800
    np.testing.assert_array_equal(indices[: moved.size], moved)
    np.testing.assert_array_equal(values[: moved.size], (x + gradient)[moved])


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
    gradient = np.random.default_rng(1).integers(-60, 61, 3000).astype(np.float32)
    checks.expect_the_same(GPU, "accumulate_topk", x, 30, gradient, 30, sign=sign)
    checks.expect_the_same(GPU, "accumulate_search", x, 60, gradient, 30, 1e-3, sign=sign)
    assert len(said) == 2


def test_of_one_sign_all_there_are_though_the_sample_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches.Candidates, "rank_all", None)  # it is enough that the pass took out these two
    x = -np.ones(launches.BLOCK * 8, np.float32)
    x[[5, 20_000]] = 1, 2
    assert checks.expect_the_same(GPU, "accumulate_topk", x, 100, None, 100, sign=1).count == 2


def test_positions_up_to_the_last_index() -> None:
    x = np.arange(1, 101, dtype=np.float32)
    offset = 2**32 - 100
    expected = [2**32 - 2, 2**32 - 1]
    sums = [
        lambda *out: GPU.accumulate_select(x.copy(), None, 99.0, *out, offset),
        lambda *out: GPU.accumulate_topk(x.copy(), None, 2, *out, offset).count,
        lambda *out: GPU.accumulate_buckets(x.copy(), None, 100, 2, 0, *out, offset).count,
    ]
    for call in sums:
        indices, values = checks.outputs(2)
        assert call(indices, values) == 2
        assert indices.tolist() == expected
        assert values.tolist() == [99, 100]
        residual = x.copy()
        residual[-2:] = 0
        GPU.put_back(residual, indices, values, offset)
        np.testing.assert_array_equal(residual, x)


@pytest.mark.parametrize("size", [60, 64, 66])
def test_buckets_that_no_program_holds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_OF_A_BUCKET", 15)
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    x[3] = np.nan
    checks.check_buckets(GPU, x, 16, 3, 1)


def test_draws_that_do_not_suffice_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_draws", lambda size, wanted: 1)
    checks.check_random(GPU, np.ones(100, np.float32), 0.4, (3, 1, 2, 3))


def test_the_same_bits_in_every_run() -> None:
    x = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    gradient = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)

    def run() -> list[object]:
        residual, (indices, values) = x.copy(), checks.outputs(300)
        said = GPU.accumulate_search(residual, gradient, 150, 1e-3, indices, values, 0)
        count = said.count
        return [said, residual.tobytes(), indices[:count].tobytes(), values[:count].tobytes()]

    assert run() == run()


@pytest.mark.skipif(DEVICE != "cpu", reason="of a GPU, which adds as it does")
def test_the_nan_that_a_gpu_makes_is_the_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    add, made = builder.binary_op, []

    def add_as_a_gpu(left: Any, right: Any, operation: Any) -> Any:
        found = add(left, right, operation)
        if operation is np.add and found.data.dtype == np.float32:
            is_nan = np.isnan(found.data)
            made.append(is_nan.any())
            found.data[is_nan] = np.uint32(0x7FFFFFFF).view(np.float32)
        return found

    monkeypatch.setattr(builder, "binary_op", add_as_a_gpu)
    x = np.array([1, 2, np.nan, 3], np.float32)
    checks.check_topk(GPU, x, 0.5, 1, 0)
    checks.check_select(GPU, x, 1, 4, 0.5, 0)
    checks.check_queued(GPU, "topk", x, 1, 2, 2, 0)
    checks.check_buckets(GPU, x, 4, 2, 1)
    assert sum(made) == 4


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter counts them")
def test_blocks_that_have_nothing_to_do_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued for a sample that misled, where it did not."""
    from triton.runtime.interpreter import interpreter_builder as builder

    size, room = 80 * BLOCK, 40
    residual = tensor_of(np.random.default_rng(0).permutation(size).astype(np.float32))
    out = launches.Output(torch.zeros(room, dtype=torch.uint32), torch.zeros(room), 0)
    bound = numbers_on(residual, launches.key_of(size - 30.0, launches.side_of(0)))
    made = launches.FusedPass(residual, None, launches.side_of(0), bound=bound)
    lanes: list[int] = []
    for name in ("create_masked_load", "create_masked_store"):
        call = getattr(builder, name)
        monkeypatch.setattr(
            builder, name, lambda at, *rest, call=call: [lanes.append(at.data.size), call(at, *rest)][1]
        )
    usable = numbers_on(residual, 1)
    made.take(out, usable)
    rest = launches.Source.whole_unless(usable, residual, launches.side_of(0))
    moved = rest.move(rest.kth(20, cuts_all=True), out)
    assert (int(made.reached), int(moved)) == (30, 0)
    assert sorted(out.values[:30].tolist()) == list(range(size - 30, size))
    assert sum(lanes) < size / 2


def test_entries_before_a_block_are_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row of its own: of several torch sums up each with one block of threads."""
    shapes: list[int] = []
    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: [shapes.append(x.dim()), cumsum(x, dim)][1])
    monkeypatch.setattr(launches, "BLOCK", 32)
    monkeypatch.setattr(launches, "MOST_ADDED", 2)
    x = np.random.default_rng(0).integers(-9, 10, 200).astype(np.float32)
    checks.check_topk(GPU, x, 0.3, 1, 0)
    assert shapes == [1]


def test_of_nothing_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are the kernels' to write, of which an empty tensor has none."""
    empty = torch.empty

    def dirty(*size: int, **options: object) -> torch.Tensor:
        return empty(*size, **options).fill_(77)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", dirty)
    x, values = (tensor_of(np.zeros(0, np.float32)) for _ in range(2))
    indices = tensor_of(np.zeros(0, np.uint32))
    assert kernels.accumulate_select(x, None, 0.5, indices, values, 0) == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_distribution(value: float) -> None:
    x = np.ones(40, np.float32)
    x[33] = value
    assert not math.isfinite(GPU.accumulate_normal(x, None)[1])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, *out: kernels.accumulate_topk(x, None, 11, *out, 0),
        lambda x, *out: kernels.accumulate_trimmed(x, None, 11, 0.2, *out, 0),
        lambda x, *out: kernels.accumulate_search(x, None, 6, 1e-3, *out, 0),
        lambda x, *out: kernels.accumulate_buckets(x, None, 10, 1, 1, *out, 0),
        lambda x, *out: kernels.accumulate_random(x, None, 11, (0, 0, 0, 0), *out, 0),
    ],
    ids=["topk", "trimmed", "search", "buckets", "random"],
)
def test_outputs_that_are_too_short(call: Callable[..., Chosen]) -> None:
    with pytest.raises(ValueError, match=r"hold 10 entries, but up to 1[12] are to be moved: make them longer"):
        call(tensor_of(np.ones(105, np.float32)), *map(tensor_of, checks.outputs(10)))


def test_where_an_array_lies_says_what_works_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros(3, np.float32)
    assert kernels_of(array) is cpu
    assert kernels_of(tensor_of(array)) is kernels
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ValueError, match=r"residual is a torch tensor on the CPU: give .* residual.numpy\(\), or run"):
        kernels_of(torch.zeros(3))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match=r"residual is a tensor on cpu, .* pip install telegrad\[gpu\]"):
        kernels_of(torch.zeros(3))


@pytest.mark.xdist_group("gpu_memory")
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU with 40 GiB")
def test_positions_beyond_31_bits() -> None:
    size, k = 2**31 + 4097, 5
    residual = torch.zeros(size, device=DEVICE)
    where = torch.tensor([7, 2**31 - 1, 2**31, 2**31 + 5, size - 1], device=DEVICE)
    residual[where] = torch.tensor([1.0, -2, 3, -4, 5], device=DEVICE)
    for call in (
        lambda *out: kernels.accumulate_topk(residual, None, k, *out, 0).count,
        lambda *out: kernels.accumulate_select(residual, None, 0.5, *out, 0),
    ):
        indices = torch.zeros(k, dtype=torch.uint32, device=DEVICE)
        values = torch.zeros(k, device=DEVICE)
        assert call(indices, values) == k
        assert indices.tolist() == where.tolist()
        assert not bool(residual.any())
        kernels.put_back(residual, indices, values, 0)
    expected = np.array([1.0, -2, 3, -4, 5], np.float32)
    np.testing.assert_array_equal(residual[where].cpu().numpy(), expected)
