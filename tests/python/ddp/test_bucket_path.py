"""How much Python one compressed bucket goes through. The limits may only shrink."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bucket_path import BucketPath, Call, bucket_calls, counted


@pytest.mark.parametrize(
    ("parameters", "most"), [(1, BucketPath(12, 43, 25)), (4, BucketPath(12, 52, 34))], ids=["one", "four"]
)
def test_one_bucket_in_its_fourth_pass(parameters: int, most: BucketPath) -> None:
    found = counted(bucket_calls(parameters))
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), f"{found}: at most {most}"


def test_all_that_a_bucket_goes_through_is_counted() -> None:
    calls = bucket_calls(elements=1 << 13)
    assert calls[0][:2] == ("ddp/hook.py", "ddp_hook")
    expected = {"take", "compress", "select_on_host", "accumulate_reused", "future_of_all"}
    assert {call.function for call in calls} >= expected
    assert max(call.depth for call in calls) > 5


def test_changes_from_file_to_file() -> None:
    assert counted([Call(file, "f", 1, 0) for file in "aabab"]) == BucketPath(files=2, calls=5, changes=3)
