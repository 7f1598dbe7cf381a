"""A rank that says which nodes it knows, and what a sum by two levels is."""

from __future__ import annotations

import numpy as np

from telegrad.launch import join

with join(timeout_s=30.0) as communicator:
    x = np.full(5000, communicator.rank + 1, np.float32)
    communicator.all_reduce(x, algorithm="two_level")
    assert (x == x[0]).all()
    print(communicator.nodes, float(x[0]))
