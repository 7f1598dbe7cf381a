"""Measures what a job's network costs and which algorithm is fastest on it; the next job uses what was found.

Every rank takes part, with real operations. docs/reference/tuning.md says what is measured.
"""

from telegrad.tuning.calibration import Calibration, calibrate, measure

__all__ = ["Calibration", "calibrate", "measure"]
