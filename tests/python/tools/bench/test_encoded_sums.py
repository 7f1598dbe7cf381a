"""What counts as wrong in a sum that may round."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad import Communicator
from telegrad.tools.bench.allreduce import WIRE_BITS, EncodedSums


@pytest.mark.parametrize("wire", WIRE_BITS)
def test_a_value_that_is_too_far_off_is_wrong(wire: str) -> None:
    (communicator,) = Communicator.local(1)
    sums = EncodedSums(communicator, 5000)
    sums.call(wire)(np.zeros(5000, np.float32))
    assert sums.wrong(wire, 5000) == 0
    sums._sum[17] += 100
    sums._sum[18] = np.nan
    assert sums.wrong(wire, 5000) == 2
    communicator.close()
