"""Policies: which tensor is sent how."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.compress import (
    BySize,
    ExactTopK,
    ParameterCompression,
    ParameterInfo,
    ReusedThreshold,
    SampledThreshold,
    ThresholdSearch,
    TrimmedTopK,
)
from telegrad.compress.policies import compressions_of

TENSORS = [
    ParameterInfo("embedding", 500_000, 2, False),
    ParameterInfo("hidden", 40_000, 2, False),
    ParameterInfo("bias", 200, 1, False),
    ParameterInfo("head", 500_001, 2, True),
]


def test_by_size() -> None:
    policy = BySize(density=0.1, small_elements=200, middle="topk", large_elements=500_000, interval=3, dense=("head",))
    assert compressions_of(policy, TENSORS) == {
        "embedding": ParameterCompression(ExactTopK(), 0.1),
        "hidden": ParameterCompression(ExactTopK(), 0.1),
        "bias": ParameterCompression(None),
        "head": ParameterCompression(None),
    }
    assert BySize(large_elements=40_000, interval=5)(TENSORS[0]) == ParameterCompression(ReusedThreshold(5), 0.01)


def test_a_selection_may_be_given_itself() -> None:
    policy = BySize(middle=ExactTopK(), large_elements=100_000, large=ReusedThreshold(2, 0.5))
    assert [policy(tensor).selection for tensor in TENSORS[:3]] == [ReusedThreshold(2, 0.5), ExactTopK(), None]


def test_redsync() -> None:
    sizes = {"norm": 32768, "convolution": 32769, "embedding": 1 << 21, "head": 1 << 22}
    tensors = [ParameterInfo(name, size, 2, name == "head") for name, size in sizes.items()]
    plain, one_signed = BySize.redsync(), BySize.redsync(0.01, same_sign=True)
    assert [plain(tensor) for tensor in tensors] == [
        ParameterCompression(None),
        ParameterCompression(TrimmedTopK(), 0.001),
        ParameterCompression(SampledThreshold(), 0.001),
        ParameterCompression(SampledThreshold(), 0.001),
    ]
    assert [one_signed(tensor) for tensor in tensors] == [
        ParameterCompression(None),
        ParameterCompression(TrimmedTopK(same_sign=True), 0.01),
        ParameterCompression(ThresholdSearch(same_sign=True), 0.01),
        ParameterCompression(ThresholdSearch(), 0.01),
    ]
    assert [one_signed(tensor).same_sign for tensor in tensors] == [False, True, True, False]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BySize(middle="best")(TENSORS[0]), ValueError, "middle='best' does not exist"),
        (
            lambda: BySize(middle="reused", same_sign=True)(TENSORS[0]),
            ValueError,
            "same_sign=True does not fit middle='reused'",
        ),
        (lambda: BySize(density=2)(TENSORS[0]), ValueError, "density=2 must be in"),
        (lambda: BySize(density=2), ValueError, "density=2 must be in"),
        (lambda: BySize(large="best"), ValueError, "large='best' does not exist"),
        (lambda: BySize(dense="hidden"), TypeError, r"dense='hidden' must be a tuple of names"),  # type: ignore[arg-type]
        (
            lambda: BySize(middle=ExactTopK(), same_sign=True),
            ValueError,
            r"middle is ExactTopK\(.*: give ExactTopK\(same_sign=True\)",
        ),
        (lambda: BySize(same_sign="yes"), TypeError, "same_sign='yes' must be True or False"),  # type: ignore[arg-type]
        (lambda: BySize(middle=None), TypeError, "middle=None must be a selection or its name"),  # type: ignore[arg-type]
        (lambda: BySize(large=3), TypeError, "large=3 must be a selection or its name"),  # type: ignore[arg-type]
        (lambda: BySize(small_elements="x"), TypeError, "small_elements='x' must be an int"),  # type: ignore[arg-type]
        (lambda: BySize(small_elements=-1), ValueError, "small_elements=-1 must not be negative"),
        (lambda: BySize(large_elements=-3), ValueError, "large_elements=-3 must not be negative"),
        (lambda: ParameterCompression(None, -1), ValueError, "density=-1 must be in"),
        (lambda: ParameterCompression("topk", 0.1), TypeError, "selection='topk' must be an object"),  # type: ignore[arg-type]
        (lambda: ParameterCompression(ExactTopK, 0.1), TypeError, "must be an object"),  # type: ignore[arg-type]
        (
            lambda: compressions_of(lambda tensor: "dense", TENSORS),  # type: ignore[arg-type, return-value]
            TypeError,
            "policy says 'dense' of parameter 'embedding': it must return a telegrad.ddp.ParameterCompression",
        ),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
