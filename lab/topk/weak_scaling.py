"""Training iterations of the paper's models in virtual time, more and more ranks with as many samples each (Ok-Topk,
Figures 8, 10 and 12): recorded gradients stand for the models', with n and k scaled down and β and γ scaled up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.topk.recording import Recording
from lab.topk.schemes import SCHEMES, Dense
from lab.topk.simulated import ARIES, PUBLISHED, Row, scaled, selection_seconds
from lab.topk.streams import side_by_side
from telegrad.sparse_vector import SparseVector
from telegrad.tools.sim.measure import Network

DENSE, OVERLAPPED = "dense", "dense-overlapped"

_CALLS = 2
_THRESHOLD_EVERY = 32  # τ′: one call in so many is like the first
_FACTOR = 64  # about; as many recorded gradients are put side by side as it takes
_DENSE_FACTOR = 64  # dense sums are of sizes only, and need not be scaled down as far
_BUCKET_BYTES = 25e6  # as DDP has them
_BACKWARD_SHARE = 2 / 3  # of the computation
_FLOPS_PER_S = 4.65e12  # half the peak of a P100


@dataclass(frozen=True)
class Model:
    """``flops``: of a rank's mini-batch, forward and backward; ``samples``: in it."""

    name: str
    parameters: int
    density: float
    samples: int
    flops: float

    @property
    def compute_s(self) -> float:
        """Of a rank's iteration, an assumption."""
        return self.flops / _FLOPS_PER_S


MODELS = (
    Model("VGG-16", 14_728_266, 0.02, 16, 16 * 3 * 0.627e9),
    Model("LSTM", 27_569_568, 0.02, 2, 2 * 6 * 27_569_568 * 200),
    Model("BERT", 133_547_324, 0.01, 8, 8 * 6 * 133_547_324 * 128),
)
"""Sizes, densities and samples of the paper's Table 2 and §5.4."""

ABOUT = (
    "Network and selection as for the other rows. Recorded gradients side by side, n/factor elements in all, of which "
    "density is selected, with residuals; what a sum does not keep does not go back into them. Beta and gamma times "
    "factor; headers and counts, which do not shrink, weigh factor times as much. time_s: of the call, one "
    f"in {_THRESHOLD_EVERY} like the first, the others like the second. compute_s: floating-point "
    "operations of the mini-batch at 4.65 Tflop/s, half the peak of a P100 (VGG-16: 0.627 Gflop forward an image; "
    "LSTM: 200 time steps, BERT: 128 tokens a sample, 6 flop a parameter each). iteration_s: compute_s + selection_s + "
    "time_s; dense-overlapped: buckets of 25 MB are summed one after the other as the backward pass, two thirds of "
    "compute_s, makes them ready"
)
"""What the rows are of, for result files."""


def weak_scaling(
    model: Model, ranks: Sequence[int], schemes: Sequence[str], recording: Recording, network: Network = ARIES
) -> list[Row]:
    """A row for each scheme (but as published) and number of ranks; with ``"dense"`` also ``"dense-overlapped"``."""
    blocks = max(1, round(model.parameters / recording.elements / _FACTOR))
    schemes = [name for name in schemes if name != PUBLISHED]
    selected = {
        selection: side_by_side(recording, model.density, selection, _CALLS, max(ranks), blocks)
        for selection in dict.fromkeys(SCHEMES[name].selection for name in schemes if name != DENSE)
    }
    rows: list[Row] = []
    for count in ranks:
        for name in schemes:
            if name == DENSE:
                rows += _dense_rows(model, count, network)
            else:
                rows.append(_sparse_row(model, name, count, network, selected[SCHEMES[name].selection]))
    return rows


def _dense_rows(model: Model, ranks: int, network: Network) -> list[Row]:
    def seconds(elements: float) -> float:
        n = max(1, round(elements / _DENSE_FACTOR))
        return Dense(ranks, n, n, scaled(network, _DENSE_FACTOR)).call(()).time_s

    whole_s, compute_s = seconds(model.parameters), model.compute_s
    buckets = math.ceil(4 * model.parameters / _BUCKET_BYTES)
    bucket_s = seconds(model.parameters / buckets)
    end_s = 0.0
    for bucket in range(buckets):
        ready_s = compute_s * (1 - _BACKWARD_SHARE * (1 - (bucket + 1) / buckets))
        end_s = max(end_s, ready_s) + bucket_s
    return [
        _row(model, DENSE, ranks, _DENSE_FACTOR, whole_s, 0.0, compute_s + whole_s, "sizes"),
        _row(model, OVERLAPPED, ranks, _DENSE_FACTOR, bucket_s * buckets, 0.0, end_s, "sizes"),
    ]


def _sparse_row(
    model: Model, name: str, ranks: int, network: Network, selected: Sequence[Sequence[SparseVector]]
) -> Row:
    n = selected[0][0].n
    factor = model.parameters / n
    scheme = SCHEMES[name].make(ranks, n, max(1, round(model.density * n)), scaled(network, factor))
    calls = [scheme.call(streams[:ranks]) for streams in selected]
    time_s = (calls[0].time_s + (_THRESHOLD_EVERY - 1) * calls[1].time_s) / _THRESHOLD_EVERY
    selection_s = selection_seconds(model.parameters, SCHEMES[name].selection)
    iteration_s = model.compute_s + selection_s + time_s
    return _row(model, name, ranks, factor, time_s, selection_s, iteration_s, calls[-1].payloads)


def _row(
    model: Model,
    scheme: str,
    ranks: int,
    factor: float,
    time_s: float,
    selection_s: float,
    iteration_s: float,
    payloads: str,
) -> Row:
    return {
        "model": model.name,
        "scheme": scheme,
        "ranks": ranks,
        "n": model.parameters,
        "k": round(model.density * model.parameters),
        "density": model.density,
        "factor": factor,
        "time_s": time_s,
        "selection_s": selection_s,
        "compute_s": model.compute_s,
        "iteration_s": iteration_s,
        "payloads": payloads,
    }
