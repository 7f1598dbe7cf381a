"""What tests of ranks in one process share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from gpu_ranks import RANKS, own_streams

from telegrad import Communicator


@pytest.fixture
def comms() -> Iterator[list[Communicator]]:
    communicators = Communicator.local(RANKS, timeout_s=60.0)
    yield communicators
    for communicator in communicators:
        communicator.close()


@pytest.fixture(scope="module")
def streams() -> Sequence[torch.cuda.Stream]:
    return own_streams(RANKS)
