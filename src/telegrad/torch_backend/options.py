"""Options of the Communicator behind a group, which torch hands through."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.cost import Tuning


@dataclass(frozen=True)
class Options:
    """``init_process_group("telegrad", pg_options=Options(...))`` and ``new_group(pg_options=...)``: the arguments of
    these names of ``Communicator.from_torch``, which checks them. A group that is given none has the defaults."""

    liveness_timeout_s: float | None = 8.0
    interface: str | None = None
    tuning: Tuning | str | None = "auto"
    device_algorithm: str = "auto"

    @property
    def _timeout(self) -> None:
        """torch's device meshes ask for it (``backend_override``): their groups have the default."""
