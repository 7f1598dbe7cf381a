"""What sums of sparse vectors cost by the closed forms by which ranks choose."""

from __future__ import annotations

from telegrad import _core
from telegrad.sim.measure import Point


def sparse_sum_costs(point: Point) -> dict[str, float]:
    """Seconds by algorithm: ``recursive_doubling``, ``split_allgather``, ``split_dense_allgather``, and ``dense``,
    which makes the vectors dense and sums them by the fastest dense algorithm.

    With as many entries of the sum as are to be expected of independent indices, but for ``point.overlap``, and on a
    network of one level; values are packed or as they are, not rounded. Raises ``ValueError`` for points of other
    operations. Source: SparCML §5.3.
    """
    if point.operation != "sparse_allreduce":
        raise ValueError(f"{point.operation} has no entries: give a point of a sparse_allreduce")
    costs = point.network.costs
    return _core.sparse_sum_costs(
        point.ranks,
        point.size // 4,
        point.nnz,
        point.overlap,
        _core.DType.f32,
        point.formats["indices"],
        point.formats["packs_values"],
        _core.NetworkCosts(
            costs.alpha_s, costs.beta_s_per_byte, costs.beta_exchange_s_per_byte, costs.gamma_s_per_byte
        ),
    )
