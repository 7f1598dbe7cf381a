"""Trials in which something goes wrong, drawn by seed: what every rank calls, what happens to whom, and who is then to
be blamed. Plain data without network or clock: the ranks and the judge draw the same trial from the same seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from telegrad.tools.bench.plan import JsonFields

_OF_50 = {
    "none": 2,  # nothing happens, and nobody may say that it did
    "kill": 9,
    "freeze": 4,
    "exception": 4,
    "interrupt": 2,
    "abort": 3,
}
_MISMATCHES_OF_50 = {
    "count": 4,
    "dtype": 3,
    "reduction": 3,
    "root": 2,
    "algorithm": 3,
    "operation": 3,
    "order": 2,
    "fewer": 2,
    "more": 2,
    "switch_factor": 2,
}
MISMATCHES = tuple(_MISMATCHES_OF_50)
"""One rank, or some, call something else than the others."""
KINDS = (*_OF_50, *MISMATCHES)
"""What can happen."""

LIVENESS_TIMEOUT_S = 8.0
"""The default of ``Communicator``."""

_MOST_ELEMENTS = 1 << 20
_MOST_GATHERED = 1 << 17
_CLOSING = 2


@dataclass(frozen=True)
class Options(JsonFields):
    """What trials are drawn from. ``ranks``: fewest and most. ``liveness_timeout_s`` is for trials with a frozen rank;
    the others keep the default, so that a busy machine accuses nobody."""

    ranks: tuple[int, int] = (2, 8)
    networks: tuple[str, ...] = ("shm", "tcp")
    kinds: tuple[str, ...] = KINDS
    liveness_timeout_s: float = LIVENESS_TIMEOUT_S


@dataclass(frozen=True)
class Call:
    """One collective. ``operation``: all_reduce, sparse, sparse_into, all_gather, broadcast or barrier; ``density`` of
    a sparse vector is each rank's own affair."""

    operation: str
    count: int = 0
    dtype: str = "f32"
    reduction: str = "sum"
    algorithm: str = "auto"
    root: int = 0
    switch_factor: float = 1.0
    density: float = 0.0

    @property
    def family(self) -> str:
        """Operations of one family are the same to the peers."""
        return "sparse" if self.operation == "sparse_into" else self.operation

    @property
    def rooted(self) -> bool:
        """A rank may be through with it without having heard of all others."""
        return self.operation == "broadcast"

    def agreed(self) -> tuple[object, ...]:
        """All that ranks must call alike."""
        return tuple(asdict(replace(self, operation=self.family, density=0.0)).values())

    def __str__(self) -> str:
        words = [f"{self.count} {self.dtype}"] if self.operation != "barrier" else []
        if self.operation == "broadcast":
            words.append(f"root {self.root}")
        if self.family in ("all_reduce", "sparse"):
            words += [self.reduction, self.algorithm]
        if self.family == "sparse":
            words.append(f"switch {self.switch_factor:g}")
        return f"{self.operation}({', '.join(words)})"


Batch = tuple[Call, ...]
"""Calls that are in flight together; one alone blocks."""


@dataclass(frozen=True)
class Trial:
    """``kind`` befalls rank ``culprit`` (or the ranks ``odd``, in a mismatch) at call number ``at``, ``delay_s`` after
    it began. ``odd_calls``: what odd ranks call instead, where one call is exchanged for another. ``uncaught``: an
    exception ends the process instead of a ``with`` block. ``thaws``: a frozen rank goes on when the others are gone.
    """

    seed: int
    kind: str
    size: int
    network: str
    batches: tuple[Batch, ...]
    at: int
    culprit: int
    delay_s: float
    liveness_timeout_s: float
    odd: tuple[int, ...] = ()
    odd_calls: tuple[Call, ...] = ()
    uncaught: bool = False
    thaws: bool = False

    @property
    def is_mismatch(self) -> bool:
        return self.kind in MISMATCHES

    @property
    def calls(self) -> tuple[Call, ...]:
        """What a rank calls that does as it should, in order."""
        return tuple(call for batch in self.batches for call in batch)

    def batches_of(self, rank: int) -> tuple[Batch, ...]:
        """What this rank calls."""
        if rank not in self.odd:
            return self.batches
        calls = list(self.calls)
        lengths = [len(batch) for batch in self.batches]
        home = next(number for number in range(len(lengths)) if sum(lengths[: number + 1]) > self.at)
        match self.kind:
            case "order":
                calls[self.at], calls[self.at + 1] = calls[self.at + 1], calls[self.at]
            case "fewer":
                del calls[self.at]
                lengths[home] -= 1
            case "more":
                calls.insert(self.at, self.odd_calls[0])
                lengths[home] += 1
            case _:
                calls[self.at] = self.odd_calls[self.odd.index(rank)]
        return tuple(_cut(calls, lengths))

    def calls_of(self, rank: int) -> tuple[Call, ...]:
        """What this rank calls, in order: number n is operation n of its communicator."""
        return tuple(call for batch in self.batches_of(rank) for call in batch)

    def blamed(self) -> int | None:
        """The rank that every other one must name; None if nothing happens.

        In a mismatch: the lowest rank outside the largest group that called alike, of groups of equal size the one with
        the lowest rank.
        """
        if self.kind == "none":
            return None
        if not self.is_mismatch:
            return self.culprit
        said = [self.calls_of(rank)[self.at].agreed() for rank in range(self.size)]
        sizes = Counter(said)
        right = max(said, key=lambda call: (sizes[call], -said.index(call)))
        return next(rank for rank, call in enumerate(said) if call != right)

    def __str__(self) -> str:
        where = f"{self.size} ranks over {self.network}"
        if self.kind == "none":
            return f"{where}, {len(self.calls)} calls, no fault"
        who = f"ranks {', '.join(map(str, self.odd))}" if len(self.odd) > 1 else f"rank {self.culprit}"
        also = f" instead of {self.calls[self.at]}" if self.is_mismatch else f", {self.calls[self.at]}"
        mine = f": {self.calls_of(self.odd[0])[self.at]}" if self.is_mismatch else ""
        return f"{where}, {self.kind} of {who} at call {self.at} of {len(self.calls)}{mine}{also}"


def _cut(calls: list[Call], lengths: list[int]) -> Iterator[Batch]:
    start = 0
    for length in lengths:
        if length:
            yield tuple(calls[start : start + length])
        start += length


def _deck() -> list[str]:
    cards = [kind for kind, count in (_OF_50 | _MISMATCHES_OF_50).items() for _ in range(count)]
    random.Random(0).shuffle(cards)
    return cards


_DECK = _deck()
DECK_SIZE = len(_DECK)
"""So many seeds one after another hold every kind of fault."""


def draw(seed: int, options: Options) -> Trial:
    """The trial of this seed."""
    chance = random.Random(seed)
    cards = [kind for kind in _DECK if kind in options.kinds]
    kind = cards[seed % len(cards)]
    size = chance.randint(*options.ranks)
    network = chance.choice(options.networks)
    count = chance.randint(4, 18)
    at = chance.randrange(count)
    calls = _calls(chance, kind, size, count, at)
    culprit = chance.randrange(size)
    odd = _odd_ranks(chance, size, culprit) if kind in MISMATCHES else ()
    return Trial(
        seed=seed,
        kind=kind,
        size=size,
        network=network,
        batches=tuple(_cut(calls, _lengths(chance, count))),
        at=at,
        culprit=culprit,
        delay_s=0.0 if chance.random() < 0.2 else 10 ** chance.uniform(-5.0, -2.3),
        liveness_timeout_s=options.liveness_timeout_s if kind == "freeze" else LIVENESS_TIMEOUT_S,
        odd=odd,
        odd_calls=_odd_calls(chance, kind, size, calls, at, len(odd)),
        uncaught=chance.random() < 0.5,
        thaws=chance.random() < 0.5,
    )


def _odd_ranks(chance: random.Random, size: int, culprit: int) -> tuple[int, ...]:
    if size < 3 or chance.random() < 0.75:
        return (culprit,)
    return tuple(sorted(chance.sample(range(size), chance.randint(2, size - 1))))


def _lengths(chance: random.Random, count: int) -> list[int]:
    """How many calls are in flight at a time. The closing calls block."""
    lengths: list[int] = []
    while (left := count - sum(lengths)) > 0:
        lengths.append(1 if chance.random() < 0.55 else min(left, chance.randint(2, 6)))
    return [*lengths, *[1] * _CLOSING]


_SUITED = {
    "count": ("all_reduce", "sparse", "sparse_into", "all_gather", "broadcast"),
    "dtype": ("all_gather", "broadcast", "sparse", "sparse_into"),
    "reduction": ("all_reduce", "sparse", "sparse_into"),
    "root": ("broadcast",),
    "algorithm": ("all_reduce",),
    "switch_factor": ("sparse", "sparse_into"),
}
_OPERATIONS = ("all_reduce", "all_reduce", "all_reduce", "sparse", "sparse_into", "all_gather", "broadcast", "barrier")


def _calls(chance: random.Random, kind: str, size: int, count: int, at: int) -> list[Call]:
    """``count`` calls and the closing ones, which nobody finishes alone. Neighbours differ in what ranks agree on, so
    that a call left out cannot go unnoticed."""
    calls: list[Call] = []
    for number in range(count):
        while True:
            suited = _SUITED.get(kind, _OPERATIONS) if number == at else _OPERATIONS
            call = _call(chance, chance.choice(suited), size)
            if kind == "algorithm" and number == at:
                call = replace(call, algorithm=chance.choice(("ring", "recursive_doubling")))
            if not calls or call.agreed()[:2] != calls[-1].agreed()[:2]:
                break
        calls.append(call)
    odd_count = 17 if calls[-1].count != 17 else 19
    return [*calls, Call("all_reduce", odd_count, algorithm="ring"), Call("barrier")]


def _call(chance: random.Random, operation: str, size: int) -> Call:
    if operation == "barrier":
        return Call("barrier")
    count = _count(chance)
    if operation == "broadcast":
        return Call(operation, count, root=chance.randrange(size))
    if operation == "all_gather":
        return Call(operation, min(count, _MOST_GATHERED))
    reduction = chance.choice(("sum", "sum", "avg"))
    if operation == "all_reduce":
        return Call(
            operation, count, reduction=reduction, algorithm=chance.choice(("auto", "ring", "recursive_doubling"))
        )
    return Call(
        operation,
        count,
        reduction=reduction,
        switch_factor=chance.choice((1.0, 1.0, 0.0, 1e6)),
        density=10 ** chance.uniform(-4.0, -0.3),
    )


def _count(chance: random.Random) -> int:
    """From nothing to 4 MiB of float32; most are small, for the time of small ones is all protocol."""
    share = chance.random()
    if share < 0.06:
        return 0
    most = 1_000 if share < 0.5 else (1 << 16 if share < 0.82 else _MOST_ELEMENTS)
    return int(most ** chance.uniform(0.0, 1.0)) if most == 1_000 else chance.randint(1_000, most)


def _odd_calls(
    chance: random.Random, kind: str, size: int, calls: list[Call], at: int, odd_ranks: int
) -> tuple[Call, ...]:
    """What the odd ranks call at number ``at``: mostly the same, but counts may differ among them too."""
    call = calls[at]
    match kind:
        case "count":
            step = chance.choice((1, 1, 7, 4096))
            apart = chance.random() < 0.5
            return tuple(replace(call, count=call.count + step * (1 + apart * n)) for n in range(odd_ranks))
        case "dtype":
            sparse = call.family == "sparse"  # a result in bf16 is a new stream: writing into one would need torch
            other = replace(call, operation="sparse", dtype="bf16") if sparse else replace(call, dtype="i32")
        case "reduction":
            other = replace(call, reduction="avg" if call.reduction == "sum" else "sum")
        case "root":
            other = replace(call, root=(call.root + chance.randrange(1, size)) % size)
        case "algorithm":
            other = replace(call, algorithm="ring" if call.algorithm != "ring" else "recursive_doubling")
        case "switch_factor":
            other = replace(call, switch_factor=call.switch_factor + chance.choice((1e-6, 0.5, 3.0)))
        case "operation" | "more":
            while (other := _call(chance, chance.choice(_OPERATIONS), size)).family == call.family:
                pass
            if kind == "operation" and other.count:
                other = replace(other, count=call.count or other.count)  # as many bytes: only the operation differs
        case _:
            return ()
    return (other,) * odd_ranks
