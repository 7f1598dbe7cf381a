"""Counters of the hook."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DDPStats:
    """Sums over all buckets so far, of this rank. Bytes on the wire are in ``Communicator.stats()``."""

    buckets: int = 0
    elements: int = 0  # of all buckets
    dense_elements: int = 0  # reduced densely
    wanted: int = 0  # entries at exactly the density (the sum of k)
    selected: int = 0  # entries that were sent sparsely
    # Of collectives whose sums keep a part ("oktopk", "gtopk", "bounded"), without dropped steps:
    kept: int = 0  # entries that the sums have kept
    overflow: int = 0  # of this rank's selected entries, those that did not fit into messages; they wait
    words_sent: int = 0  # an index is a word, a value is one; counts are none
    words_received: int = 0
    nonfinite_buckets: int = 0  # had NaN or infinity in them here, or made a residual overflow
    clipped_steps: int = 0  # in which this rank scaled its gradient down (clip_norm)
    skipped_steps: int = 0  # dropped on all ranks (nonfinite="skip")
    discarded_passes: int = 0  # gradients cleared before an optimizer stepped; residuals are as before the pass
    hook_s: float = 0.0  # time in the hook on the thread of the backward pass, most of it selection

    @property
    def selected_to_wanted(self) -> float:
        """selected / wanted; 1 for exact top-k."""
        return self.selected / self.wanted if self.wanted else 1.0
