"""Arrays that selections do not take: kernels get addresses, and would read whatever lies there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton_arrays import DEVICE, tensor_of, torch

from telegrad.compress import BucketTopK, ExactTopK, RandomK, Residual, SampledThreshold, ThresholdSearch
from telegrad.kernels.select import cpu
from telegrad.kernels.select import triton as gpu

SIZE = 100
Call = Callable[..., Any]


def _count() -> Any:
    return tensor_of(np.zeros(1, np.int64))


_ON_HOST: dict[str, Call] = {
    "all": lambda x, g, i, v: cpu.accumulate_all(x, g, i, v, 0),
    "select": lambda x, g, i, v: cpu.accumulate_select(x, g, 0.5, i, v, 0),
    "topk": lambda x, g, i, v: cpu.accumulate_topk(x, g, 3, i, v, 0),
    "reused": lambda x, g, i, v: cpu.accumulate_reused(x, g, 3, 0.5, i, v, 0),
    "trimmed": lambda x, g, i, v: cpu.accumulate_trimmed(x, g, 3, 0.2, i, v, 0),
    "search": lambda x, g, i, v: cpu.accumulate_search(x, g, 3, 1e-3, i, v, 0),
    "buckets": lambda x, g, i, v: cpu.accumulate_buckets(x, g, 10, 1, 0, i, v, 0),
    "random": lambda x, g, i, v: cpu.accumulate_random(x, g, 3, (0, 0, 0, 0), i, v, 0),
}
_ON_DEVICE: dict[str, Call] = {
    "all": lambda x, g, i, v: gpu.accumulate_all(x, g, i, v, 0),
    "select": lambda x, g, i, v: gpu.accumulate_select(x, g, 0.5, i, v, 0),
    "topk": lambda x, g, i, v: gpu.accumulate_topk(x, g, 3, i, v, 0),
    "search": lambda x, g, i, v: gpu.accumulate_search(x, g, 3, 1e-3, i, v, 0),
    "buckets": lambda x, g, i, v: gpu.accumulate_buckets(x, g, 10, 1, 0, i, v, 0),
    "random": lambda x, g, i, v: gpu.accumulate_random(x, g, 3, (0, 0, 0, 0), i, v, 0),
    "queue_all": lambda x, g, i, v: gpu.queue_all(x, g, i, v, _count(), 0),
    "queue_search": lambda x, g, i, v: gpu.queue_search(x, g, 3, 1e-3, i, v, _count(), 0),
    "queue_normal": lambda x, g, i, v: gpu.queue_normal(x, g, 3, (2.0, 0.9, 20), i, v, _count(), 0),
    "queue_buckets": lambda x, g, i, v: gpu.queue_buckets(x, g, 10, 1, 0, i, v, _count(), 0),
    "queue_random": lambda x, g, i, v: gpu.queue_random(x, g, 3, (0, _count(), 0, 0), i, v, _count(), 0),
    "queue_topk": lambda x, g, i, v: gpu.queue_topk(x, g, 3, i, v, _count(), 0),
}
on_host = pytest.mark.parametrize("call", _ON_HOST.values(), ids=_ON_HOST)
on_device = pytest.mark.parametrize("call", _ON_DEVICE.values(), ids=_ON_DEVICE)


def _arrays() -> list[Any]:
    ones = np.ones(SIZE, np.float32)
    return [ones, ones.copy(), np.zeros(2 * SIZE, np.uint32), np.zeros(2 * SIZE, np.float32)]


_NAMES = ("residual", "gradient", "indices", "values")


@on_host
@pytest.mark.parametrize("place", range(4), ids=_NAMES)
def test_arrays_of_the_host(call: Call, place: int) -> None:
    name = _NAMES[place]
    arrays = _arrays()

    def refused(error: type[Exception], match: str, wrong: Any) -> None:
        given = [*arrays[:place], wrong, *arrays[place + 1 :]]
        with pytest.raises(error, match=match):
            call(*given)
        for array in arrays[:2]:
            np.testing.assert_array_equal(array, 1.0)

    strided = np.ones(4 * SIZE, arrays[place].dtype)[::2][: arrays[place].size]
    refused(ValueError, rf"{name} is not contiguous .* give np.ascontiguousarray\({name}\)", strided)
    refused(TypeError, f"{name} is int64: it must be ", arrays[place].astype(np.int64))
    if name != "gradient":
        locked = arrays[place].copy()
        locked.flags.writeable = False
        refused(ValueError, f"{name} is read-only", locked)
    else:
        refused(ValueError, "gradient has 50 entries, residual 100", arrays[1][:50].copy())
        refused(TypeError, "gradient is a list, and residual a numpy array", [1.0] * SIZE)


@pytest.mark.parametrize("name", ["before", "velocity.values", "velocity.before"])
def test_what_else_is_as_long_as_the_residual(name: str) -> None:
    residual, gradient, indices, values = _arrays()

    def refused(error: type[Exception], match: str, wrong: Any) -> None:
        arrays = {one: np.ones(SIZE, np.float32) for one in ("before", "velocity.values", "velocity.before")}
        before, *velocity = (arrays | {name: wrong}).values()
        step = cpu.VelocityStep(*velocity, 0.9, False, False)
        with pytest.raises(error, match=match):
            cpu.accumulate_reused(residual, gradient, 2, 0.5, indices, values, 0, before=before, velocity=step)
        np.testing.assert_array_equal(residual, 1.0)

    refused(ValueError, f"{name} has 50 entries, residual 100: give one for each", np.ones(50, np.float32))
    refused(TypeError, f"{name} is float64", np.ones(SIZE))


@on_device
@pytest.mark.parametrize("place", range(4), ids=_NAMES)
def test_tensors(call: Call, place: int) -> None:
    name = _NAMES[place]
    arrays = [tensor_of(array) for array in _arrays()]

    def refused(error: type[Exception], match: str, wrong: Any) -> None:
        given = [*arrays[:place], wrong, *arrays[place + 1 :]]
        with pytest.raises(error, match=match):
            call(*given)
        for tensor in arrays[:2]:
            assert (tensor == 1.0).all()

    strided = torch.ones(4 * SIZE, dtype=torch.float32, device=DEVICE).to(arrays[place].dtype)[::2]
    refused(ValueError, rf"{name} is not contiguous .* give {name}.contiguous\(\)", strided[: arrays[place].numel()])
    refused(TypeError, f"{name} is torch.int64: it must be ", arrays[place].to(torch.int64))
    if name != "residual":
        refused(ValueError, f"{name} is a numpy array, and residual on {DEVICE}", np.zeros(2 * SIZE, np.float32))
    if name == "gradient":
        refused(ValueError, "gradient has 50 entries, residual 100", arrays[1][:50].clone())


@pytest.mark.parametrize("of", [np.asarray, tensor_of], ids=["host", "device"])
def test_what_is_only_added(of: Call) -> None:
    kernels: Any = cpu if of is np.asarray else gpu
    residual, gradient = map(of, _arrays()[:2])
    with pytest.raises(ValueError, match="gradient has 50 entries, residual 100"):
        kernels.accumulate_normal(residual, gradient[:50])
    with pytest.raises(TypeError, match="residual is .*float64: it must be .*float32"):
        kernels.accumulate_normal(of(np.ones(SIZE)), gradient)


@pytest.mark.parametrize("policy", [ExactTopK, ThresholdSearch, RandomK, SampledThreshold])
@pytest.mark.parametrize("of", [np.asarray, tensor_of], ids=["host", "device"])
@pytest.mark.parametrize("k", [-1, 0, SIZE + 1])
def test_a_policy_that_is_to_choose_none_or_more_than_there_are(policy: Any, of: Call, k: int) -> None:
    residual, gradient, indices, values = map(of, _arrays())
    with pytest.raises(ValueError, match=f"{k} must be 1 to "):
        policy().select(Residual("weight", residual, k), gradient, indices, values, 0)


def test_buckets_send_at_least_one_and_no_more_than_they_have() -> None:
    residual, gradient, indices, values = _arrays()
    assert BucketTopK(10).select(Residual("weight", residual.copy(), 0), gradient, indices, values, 0) == 10
    with pytest.raises(ValueError, match="per_bucket=11 must be 1 to bucket=10"):
        BucketTopK(10).select(Residual("weight", residual, 110), gradient, indices, values, 0)


def test_buckets_that_leave_over_what_they_do_not_say() -> None:
    x, g, indices, values = _arrays()
    for of_last in (0, 2):
        with pytest.raises(ValueError, match=f"of_last={of_last} must be 1 to 1, the entries that buckets leave over"):
            cpu.accumulate_buckets(x, g, 11, 1, of_last, indices, values, 0)
    with pytest.raises(ValueError, match="per_bucket=11 must be 1 to bucket=10"):
        cpu.accumulate_buckets(x, g, 10, 11, 0, indices, values, 0)


def test_nothing_to_choose_from() -> None:
    for of, kernels in ((np.asarray, cpu), (tensor_of, gpu)):
        x, indices, values = (of(np.zeros(0, dtype)) for dtype in (np.float32, np.uint32, np.float32))
        with pytest.raises(ValueError, match="k=1: residual is empty"):
            kernels.accumulate_topk(x, None, 1, indices, values, 0)  # type: ignore[attr-defined]
        assert kernels.accumulate_select(x, None, 0.5, indices, values, 0) == 0  # type: ignore[attr-defined]
