"""What all tests share: no tuning that this user has calibrated chooses their algorithms, examples that Hypothesis
draws have no time limit of their own, and GPU kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

settings.register_profile("telegrad", deadline=None)
settings.load_profile("telegrad")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
