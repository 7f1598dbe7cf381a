"""The ranks' side of ``telegrad calibrate``."""

from __future__ import annotations

import json

from telegrad.calibration.calibration import measure, to_data
from telegrad.calibration.keeping import store_unless_noisy
from telegrad.launch import join

_TIMEOUT_S = 120.0


def main(seconds: str) -> None:
    """One rank, which measures for about so long.

    Rank 0 prints ``{"part", "what"}`` as it goes on, at last ``{"found"}`` (``to_data()``) and either ``{"kept"}``, the
    file in which later jobs find it, or ``{"not_kept"}``, why they will not.
    """
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S, tuning=None) as communicator:
        first = communicator.rank == 0

        def say(**what: object) -> None:
            if first:
                print(json.dumps(what), flush=True)

        found = measure(communicator, seconds=float(seconds), on_progress=lambda part, what: say(part=part, what=what))
        say(found=to_data(found))
        if first:
            try:
                say(kept=str(store_unless_noisy(found.tuning, found.doubts)))
            except (OSError, RuntimeError) as error:
                say(not_kept=str(error))
