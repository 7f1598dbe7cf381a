"""What ``telegrad bench sparse`` measures: plain data, which travels to the ranks as JSON, and the vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from telegrad.bench.gradient_values import exponent_bits
from telegrad.bench.json_fields import JsonFields

PATTERNS = ("uniform", "clustered", "identical")
_RUN = 64  # consecutive indices of a cluster
_RANDOM_SEED = 1_000_003
_VALUE_BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8 + 32 / 256}

DENSE = ("gloo-dense", "mpich-dense", "telegrad-dense", "telegrad-dense-out")
WIRES = ("raw-f32", "indices-f32", "packed-f32", "indices-bf16", "packed-bf16", "packed-int8")
TO_DENSE = ("raw-f32", "packed-f32", "packed-bf16")
BY_ALGORITHM = ("split_allgather", "recursive_doubling", "ring", "split_dense_allgather", "two_level")
NAMES = (
    *DENSE,
    "gloo-coo",
    *(f"telegrad-{wire}" for wire in WIRES),
    *(f"telegrad-{wire}-to-dense" for wire in TO_DENSE),
    *(f"telegrad-{algorithm}" for algorithm in BY_ALGORITHM),
)
"""Everything that can be measured. ``-dense``: in place; ``-dense-out``: into another vector. ``telegrad-WIRE``: the
automatic choice, with a stream as the result; ``-to-dense``: into a dense vector; ``telegrad-ALGORITHM``: that one,
with packed indices and float32 values."""


SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "density": ("density", (1e-5, 1e-4, 1e-3, 0.0078125, 0.03125, 0.125, 0.5)),
    "length": ("n", (1 << 16, 1 << 20, 1 << 24, 1 << 26)),
    "ranks": ("ranks", (2, 4, 8)),
}
"""What can be swept: the field of a plan, and its values."""


@dataclass(frozen=True)
class SparsePlan(JsonFields):
    """A vector of ``n`` float32, of which every rank has the part ``density``, at indices that follow ``pattern``."""

    network: str
    ranks: int
    n: int
    density: float
    pattern: str
    names: tuple[str, ...]
    samples: int = 9
    sample_s: float = 0.05
    seconds: float = 60.0
    calibrates: bool = False  # first of all, so that the automatic choice knows this network
    nodes: int = 1  # on which the ranks live, neighbours together
    store: str = ""  # a path at which Gloo's processes meet

    @property
    def nnz(self) -> int:
        """Entries of each rank."""
        return max(1, round(self.n * self.density))

    @property
    def peers(self) -> tuple[str, ...]:
        """Of which libraries something is measured."""
        return tuple(peer for peer in ("gloo", "mpich") if any(name.startswith(f"{peer}-") for name in self.names))


def swept(plans: Sequence[SparsePlan], what: Sequence[str]) -> list[SparsePlan]:
    """``plans`` with every value of each of ``what`` (see ``SWEEPS``) besides their own, one thing varied at a time;
    each plan once."""
    found = [
        replace(plan, **{name: value})
        for name, values in (SWEEPS[one] for one in what)
        for plan in plans
        for value in sorted({*values, getattr(plan, name)})
    ]
    return list(dict.fromkeys(found or plans))


def indices_of(plan: SparsePlan, rank: int) -> npt.NDArray[np.uint32]:
    """Ascending. ``uniform``: anywhere, independent of other ranks'; ``clustered``: in runs of 64, the same way;
    ``identical``: anywhere, the same on all ranks."""
    draw = np.random.default_rng(_RANDOM_SEED if plan.pattern == "identical" else rank)
    if plan.pattern != "clustered":
        return np.sort(draw.choice(plan.n, plan.nnz, replace=False, shuffle=False)).astype(np.uint32)
    runs = math.ceil(plan.nnz / _RUN)
    starts = np.sort(draw.choice(max(plan.n // _RUN, runs), runs, replace=False, shuffle=False)) * _RUN
    return (starts[:, None] + np.arange(_RUN, dtype=np.uint32)).reshape(-1)[: plan.nnz].astype(np.uint32)


def value_bits(encoding: str, *, packed: bool) -> float:
    """Bits of a value as ``largest_of_gradients`` draws them; packed, with the entropy of its exponent."""
    bits = _VALUE_BITS[encoding]
    return bits - 8 + exponent_bits() if packed and encoding in ("f32", "bf16") else bits


def entropy_bits(density: float) -> float:
    """Bits per index of a set that holds each index with this probability: H(d)/d."""
    if not 0 < density < 1:
        return 0.0
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density
