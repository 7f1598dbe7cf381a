"""What a comparison of predictions with reality measures: plain data, which travels to the ranks as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.bench.json_fields import JsonFields
from telegrad.calibration.probes import Probe, probes
from telegrad.plan.cost import CARD_BYTES

ENTRY_BYTES = 8
"""Of a sparse vector's entry in memory: a 4-byte index and a float."""

_ONE_WAY_BYTES = tuple(1 << power for power in range(15, 23))  # 32 KiB … 4 MiB, as collectives send
_EXCHANGE_BYTES = (32 << 10, 48 << 10, CARD_BYTES)
_MOST_BYTES_IN_BLOCKS = 32 << 20
ALLREDUCES = ("ring", "recursive_doubling", "rabenseifner")
OF_VECTORS = ("reduce_scatter", "reduce", "broadcast")
OF_BLOCKS = ("allgather", "gather", "scatter", "all_to_all")


@dataclass(frozen=True)
class Measurement:
    """One thing whose time is taken. ``bytes``: of a rank's vector, or of a block where an operation moves one per
    rank; ``nnz``: entries of a sparse vector, None for a dense one; ``density``: what part of the vector they are;
    ``wire``: how messages hold them."""

    operation: str
    algorithm: str
    bytes: int
    density: float | None = None
    wire: str | None = None

    @property
    def nnz(self) -> int | None:
        """Entries of each rank, at least one; None where the vector is dense."""
        return None if self.density is None else max(1, int(self.bytes // 4 * self.density))

    @property
    def input_bytes(self) -> int:
        """What a rank brings: its vector, or the entries of it."""
        return self.bytes if self.nnz is None else self.nnz * ENTRY_BYTES


@dataclass(frozen=True)
class PredictionPlan(JsonFields):
    """``sizes`` in bytes; ``repetitions``: samples of each measurement, of at least ``sample_s`` seconds each."""

    network: str
    ranks: int
    sizes: tuple[int, ...]
    densities: tuple[float, ...] = (0.01, 0.1)
    repetitions: int = 9
    sample_s: float = 0.04

    @property
    def wire(self) -> str:
        """How sparse sums are sent: as a communicator does by itself that has no tuning."""
        return "blocked" if self.network == "shm" else "packed"


def calibration() -> list[Measurement]:
    """What the model's costs come from, whatever they will predict: one for each of ``calibration_probes()``, in the
    same order."""
    return [Measurement(probe.kind, "", probe.bytes) for probe in calibration_probes()]


def calibration_probes() -> list[Probe]:
    return probes(_ONE_WAY_BYTES, _EXCHANGE_BYTES)


def collectives_of(plan: PredictionPlan) -> list[Measurement]:
    """What is predicted: every collective at every size. Where an operation moves a block per rank, that is ``sizes``
    long, up to a total of 32 MiB."""
    blocks = [size for size in plan.sizes if size * plan.ranks <= _MOST_BYTES_IN_BLOCKS]
    return [
        *(Measurement("allreduce", algorithm, size) for algorithm in ALLREDUCES for size in plan.sizes),
        *(
            Measurement("sparse_allreduce", "split_allgather", size, density, plan.wire)
            for density in plan.densities
            for size in plan.sizes
        ),
        *(Measurement(operation, "", size) for operation in OF_VECTORS for size in plan.sizes),
        *(Measurement(operation, "", block) for operation in OF_BLOCKS for block in blocks),
    ]


def measurements_of(plan: PredictionPlan) -> list[Measurement]:
    """All, in the order in which ranks number them."""
    return [*calibration(), *collectives_of(plan)]
