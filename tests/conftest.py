"""What all tests share: no tuning that this user has calibrated chooses their algorithms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
