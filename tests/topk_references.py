"""What all_reduce_topk of each kind must give, in one place and by plain dictionaries: index to value."""

from __future__ import annotations

from collections.abc import Sequence

Entries = dict[int, float]


def largest(entries: Entries, most: int, least: float = 0.0) -> Entries:
    """The ``most`` largest that reach ``least``, ties to the lowest index."""
    order = sorted(entries, key=lambda index: (-abs(entries[index]), index))
    return {index: entries[index] for index in order[:most] if abs(entries[index]) >= least}


def added(to: Entries, entries: Entries) -> Entries:
    """Their sum, at all indices that either has."""
    total = dict(to)
    for index, value in entries.items():
        total[index] = total.get(index, 0.0) + value
    return total


def without(entries: Entries, others: Entries) -> Entries:
    """Those at indices that ``others`` has not."""
    return {index: value for index, value in entries.items() if index not in others}


def within(entries: Entries, others: Entries) -> Entries:
    """Those at indices that ``others`` has."""
    return {index: value for index, value in entries.items() if index in others}


def by_tree(given: Sequence[Entries], k: int) -> tuple[Entries, list[Entries]]:
    """gTopk: the result, and what each rank gets back."""
    sums = [largest(own, k) for own in given]
    dropped = [without(own, kept) for own, kept in zip(given, sums, strict=True)]
    distance = 1
    while distance < len(given):
        for rank in range(0, len(given) - distance, 2 * distance):
            whole = added(sums[rank], sums[rank + distance])
            sums[rank] = largest(whole, k)
            dropped[rank] = added(dropped[rank], without(whole, sums[rank]))
        distance *= 2
    kept = sums[0]
    return kept, [without(own, kept) | within(rest, kept) for own, rest in zip(given, dropped, strict=True)]


def by_bounded_messages(
    given: Sequence[Entries], capacity: int, lengths: Sequence[int], threshold: float
) -> tuple[Entries, list[Entries], list[Entries]]:
    """The result, what each rank gets back, and what of that did not fit. ``lengths``: of the slices."""
    kept: Entries = {}
    unsent: list[Entries] = [{} for _ in given]
    begin = 0
    for owner, length in enumerate(lengths):
        sums: Entries = {}
        for rank, own in enumerate(given):
            share = {index: value for index, value in own.items() if begin <= index < begin + length}
            fits = share if rank == owner else largest(share, capacity)
            unsent[rank] |= without(share, fits)
            sums = added(sums, fits)
        kept |= largest(sums, capacity, threshold)
        begin += length
    return kept, [without(own, kept) | over for own, over in zip(given, unsent, strict=True)], unsent
