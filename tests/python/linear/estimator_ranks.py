"""Rows for tests of estimators, and the ranks of one process that fit them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.datasets import make_classification

from telegrad import Communicator


def data(classes: int = 2) -> tuple[Any, Any]:
    x, y = make_classification(400, 20, n_informative=8, n_classes=classes, class_sep=0.7, flip_y=0.1, random_state=3)
    return sparse.csr_array(np.where(np.abs(x) > 0.3, x, 0).astype(np.float32)), y


def among(parts: list[tuple[Any, Any]], make: Callable[..., Any]) -> list[Any]:
    """What each rank's ``fit`` gives or raises."""
    comms = Communicator.local(len(parts), timeout_s=60)

    def one(rank: int) -> Any:
        with comms[rank]:
            try:
                return make(comms[rank]).fit(*parts[rank])
            except Exception as error:
                return str(error)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(one, range(len(parts))))
