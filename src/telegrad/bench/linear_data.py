"""The rows that ``telegrad bench linear`` trains on: made up, of Python's sources, or of a file."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from telegrad import Communicator, SparseStream
from telegrad.bench.linear_plan import TEXT, LinearPlan
from telegrad.linear import Rows, hashed_ngrams, read_libsvm
from telegrad.linear.losses import are_classes, label_counts
from telegrad.linear.stdlib_task import stdlib_pieces
from telegrad.linear.synthetic import SHAPES, synthetic_rows

_PIECE_BYTES = 1024  # of source, so that there are enough for three steps of 8 ranks

About = dict[str, Any]


def rows_of(plan: LinearPlan, comm: Communicator) -> tuple[Rows, About]:
    """This rank's rows, ``plan.rows`` for each step if there are so many, and what is said of the data in results.

    ``scaled_to_rows``: in an epoch. ``non_empty_columns``: of all these rows, expected where they are made up and
    counted where they are real. ``columns_met``: of those in the steps. All ranks have as many rows. Raises
    ``ValueError``, ``OSError`` and ``ImportError`` for a file that cannot be read, or whose labels are not two classes.
    """
    want = plan.rows * plan.steps
    if plan.data in SHAPES:
        shape = SHAPES[plan.data]
        if plan.columns is not None:
            shape = dataclasses.replace(shape, columns=plan.columns)
        rows = synthetic_rows(shape, comm.rank * want, (comm.rank + 1) * want)
        law = shape.popularity
        about: About = {"synthetic": True, "exponent": law.exponent, "non_empty_columns": shape.columns}
        about |= {"scaled_to_rows": shape.rows, "columns_expected": round(law.columns(want * comm.world_size))}
    else:
        rows = _text_rows(comm) if plan.data == TEXT else read_libsvm(plan.data, rank=comm.rank, world_size=plan.ranks)
        every = comm.all_gather(np.array([len(rows), rows.n_features, *label_counts(rows.labels)], np.int64))
        if not are_classes(*every[:, [0, 2, 3, 4]].sum(0).tolist()):
            raise ValueError(f"{plan.data}: labels are not two classes: they must be -1 and 1 or 0 and 1")
        rows = dataclasses.replace(rows, n_features=int(every[:, 1].max()))
        about = {"synthetic": False, "scaled_to_rows": int(every[:, 0].sum())}
        about["non_empty_columns"] = columns_of(rows, comm)
        least = int(every[:, 0].min())
        if least == 0:
            raise ValueError(f"{plan.data} has too few rows for {plan.ranks} ranks: {every[:, 0].sum()}")
        each = min(plan.rows, least)
        rows = rows.part(0, each * min(plan.steps, least // each))
    return rows, {**about, "features": rows.n_features, "columns_met": columns_of(rows, comm)}


def _text_rows(comm: Communicator) -> Rows:
    pieces, labels = stdlib_pieces(_PIECE_BYTES)
    first, last = (len(pieces) * rank // comm.world_size for rank in (comm.rank, comm.rank + 1))
    return hashed_ngrams(pieces[first:last], labels[first:last])


def columns_of(rows: Rows, comm: Communicator) -> int:
    """How many features some rank's rows have."""
    indices = np.unique(rows.indices)
    mine = SparseStream.trusted(indices, np.ones(indices.size, np.float32), rows.n_features)
    total: SparseStream = comm.all_reduce(mine, "max")
    return int(np.count_nonzero(total.memory(0.0)[1] > 0))
