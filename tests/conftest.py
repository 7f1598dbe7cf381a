"""What all tests share: no tuning that this user has calibrated chooses their algorithms, and examples that Hypothesis
draws have no time limit of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("telegrad", deadline=None)
settings.load_profile("telegrad")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
