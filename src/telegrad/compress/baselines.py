"""Policies that others use, to compare with: top-k per bucket, the estimate of a normal distribution, random-k."""

from __future__ import annotations

import math
import statistics
import zlib
from dataclasses import dataclass

from telegrad.compress.arguments import checked_whole
from telegrad.compress.residual import Residual
from telegrad.compress.selection import Floats, Indices, noted, select_all

LOWERED_BY = 0.9  # thresholds of a normal distribution that too few entries reach
LOWERED_MOST = 20  # times: to an eighth


@dataclass(frozen=True)
class BucketTopK:
    """The largest of every ``bucket_elements`` consecutive entries, ties to the lowest index. Source: SparCML §8.3.

    ``per_bucket``: how many of each bucket. ``None``: the bucket's share of k. A shorter bucket at the end sends its
    share, but all it has up to ``least``. The number of entries is always the same."""

    bucket_elements: int = 512
    per_bucket: int | None = None
    least: int = 1

    def __post_init__(self) -> None:
        bucket = checked_whole(self.bucket_elements, "bucket_elements", 1, None, "entries of a bucket")
        object.__setattr__(self, "bucket_elements", bucket)
        if self.per_bucket is not None:
            own = checked_whole(self.per_bucket, "per_bucket", 1, bucket, "entries of each bucket that are sent")
            object.__setattr__(self, "per_bucket", own)
        least = checked_whole(self.least, "least", 1, bucket, "entries that a short bucket sends, if it has so many")
        object.__setattr__(self, "least", least)

    def capacity(self, entry: Residual) -> int:
        """The number of entries that all buckets send together."""
        bucket, per_bucket, of_last = self.shares(entry)
        return entry.size // bucket * per_bucket + of_last

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        chosen = entry.kernels.accumulate_buckets(entry.values, gradient, *self.shares(entry), indices, values, offset)
        noted(entry, chosen)
        entry.threshold = None  # each bucket has its own
        return chosen.count

    def shares(self, entry: Residual) -> tuple[int, int, int]:
        """Size of a bucket, entries sent of each, and of the shorter one at the end (0: there is none)."""
        size, bucket = entry.size, min(self.bucket_elements, entry.size)
        k, of = (entry.k, size) if self.per_bucket is None else (self.per_bucket, self.bucket_elements)

        def share(elements: int) -> int:
            rounded = (2 * k * elements + of) // (2 * of)  # a half upwards
            return max(rounded, min(self.least, elements))

        return bucket, share(bucket), share(size % bucket) if size % bucket else 0


@dataclass(frozen=True)
class GaussianThreshold:
    """All entries at or above the threshold that k would reach if residual + gradient were normally distributed.

    It is |mean| + z deviation; k/size of a normal distribution lies further than z deviations from its mean. Residuals
    are not normal, and have a shorter tail. If fewer than 3k/4 reach the threshold it is lowered by a tenth, up to 20
    times. So it sends 3k/4 to 2k entries, fewer if nearly all are tiny. If there would be more, or sums are NaN or Inf,
    it sends the entries of ``ExactTopK``. Source: the baseline "Gaussiank" of Ok-Topk, §5.4."""

    def capacity(self, entry: Residual) -> int:
        """2k, or all there are if that is less."""
        return min(2 * entry.k, entry.size)

    def deviations(self, entry: Residual) -> float:
        """How many make the threshold."""
        return statistics.NormalDist().inv_cdf(1 - entry.k / (2 * entry.size))

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        size = entry.size
        if entry.k == size:
            return select_all(entry, gradient, indices, values, offset)
        mean, deviation = entry.kernels.accumulate_normal(entry.values, gradient)
        threshold = abs(mean) + self.deviations(entry) * deviation
        if math.isfinite(threshold):
            most = self.capacity(entry)
            indices, values = indices[:most], values[:most]
            for lowered in range(1 + LOWERED_MOST):
                count = entry.kernels.accumulate_select(entry.values, None, threshold, indices, values, offset)
                if count <= most and (4 * count >= 3 * entry.k or lowered == LOWERED_MOST):
                    entry.threshold = entry.peak = threshold
                    return count
                moved = min(count, most)
                entry.kernels.put_back(entry.values, indices[:moved], values[:moved], offset)
                if count > most:
                    break
                threshold *= LOWERED_BY
        return noted(entry, entry.kernels.accumulate_topk(entry.values, None, entry.k, indices, values, offset))


@dataclass(frozen=True)
class RandomK:
    """k random entries, whatever their magnitude; always exactly k, every set of k as likely as any other.

    Which ones is a function of ``seed`` (64 bits), ``rank`` (32 bits), the parameter's name and the number of the call
    alone. Ranks with the same ``rank`` here choose the same entries."""

    seed: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", checked_whole(self.seed, "seed", 0, 2**64 - 1, "of the random numbers"))
        object.__setattr__(self, "rank", checked_whole(self.rank, "rank", 0, 2**32 - 1, "which makes ranks differ"))

    def capacity(self, entry: Residual) -> int:
        """k."""
        return entry.k

    def stream(self, entry: Residual) -> int:
        """Which of the random sequences is this parameter's."""
        return zlib.crc32(entry.name.encode())

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        draw = (self.seed, entry.calls % 2**32, self.rank, self.stream(entry))
        entry.calls += 1
        chosen = entry.kernels.accumulate_random(entry.values, gradient, entry.k, draw, indices, values, offset)
        noted(entry, chosen)
        entry.threshold = None
        return chosen.count
