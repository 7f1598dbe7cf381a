"""What sums that keep a part leave to the next step: thresholds of a bucket's parameters, slices of its places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from telegrad.communicator import BoundedTopkState, GTopkState
from telegrad.communicator.topk_state import TopkState
from telegrad.compress import Part
from telegrad.ddp.options import OkTopk

MakeState = Callable[[int], TopkState]
"""Called with k."""

Places = list[list[Any]]  # [name, offset] of each part


class Held(NamedTuple):
    """A state, and where the parameters lie that it is of."""

    places: Places
    state: TopkState


class Past(NamedTuple):
    """What calls have left, and where the parameters lay then."""

    places: Places
    left: dict[str, Any]

    def fitting(self, places: Places) -> dict[str, Any]:
        """Of the same parameters in these places."""
        return self.left if places == self.places or "slices" not in self.left else {**self.left, "slices": []}


class TopkStates:
    """One for each bucket, of sums that ``combine`` names, which ``make`` makes.

    A bucket is known by which parameters it holds: DDP lays the first pass of a process out in another order. Where
    only the order differs, slices are cut anew, and the threshold stays.
    """

    def __init__(self, combine: str, make: MakeState) -> None:
        self._combine, self._make = combine, make
        self._held: dict[frozenset[str], Held] = {}
        self._unit = 1.0
        self._before: dict[frozenset[str], Past] | None = None  # at ``begin()``

    def begin(self) -> None:
        """Opens a step that can be undone."""
        self._before = {names: Past(held.places, held.state.state_dict()) for names, held in self._held.items()}

    def keep_step(self) -> None:
        """Closes the open step."""
        self._before = None

    def drop_step(self) -> None:
        """Undoes the open step, if there is one: no sum that is over has left anything. What may not be changed, as the
        sum that uses it has failed, is of no more use anyhow."""
        before, self._before = self._before, None
        if before is None:
            return
        for names, held in self._held.items():
            past = before.get(names) or Past(held.places, self._make(held.state.k).state_dict())
            if not held.state.in_use:
                held.state.load_state_dict(past.fitting(held.places))

    def set_unit(self, unit: float) -> None:
        """What 1 in the sums is worth from now on, as ``Compressor.set_units`` has it: thresholds follow."""
        ratio, self._unit = self._unit / unit, unit
        if ratio == 1:
            return
        for held in self._held.values():
            held.state.load_state_dict(_times(held.state.state_dict(), ratio))

    def of(self, parts: Sequence[Part]) -> TopkState:
        """A state for the sums of ``parts``, with what their last sum has left, if it was of as many entries."""
        places: Places = [[part.entry.name, int(part.offset)] for part in parts]
        state = self._make(sum(part.entry.k for part in parts))
        names = frozenset(part.entry.name for part in parts)
        before = self._held.get(names)
        if before is not None:
            state.load_state_dict(Past(before.places, before.state.state_dict()).fitting(places))
        # A parameter is in one bucket at a time: those that had one of these are gone.
        self._held = {other: held for other, held in self._held.items() if other.isdisjoint(names)}
        self._held[names] = Held(places, state)
        return state

    def state_dict(self) -> tuple[dict[str, Any], ...]:
        """A copy, as plain values, where 1 is worth 1; a tuple, which torch.distributed.checkpoint keeps in one piece.
        Raises ``ValueError`` while a sum is under way."""
        return tuple(
            {
                "combine": self._combine,
                "places": [list(place) for place in held.places],
                **_times(held.state.state_dict(), self._unit),
            }
            for held in self._held.values()
        )

    def load(self, fitting: Mapping[frozenset[str], Held]) -> None:
        """Takes over what ``fitting`` has found, instead of what is held."""
        self._held, self._unit = dict(fitting), 1.0

    def fitting(self, saved: Any) -> dict[frozenset[str], Held]:
        """What a ``state_dict()`` has of such sums, for ``load``. Raises ``ValueError`` for what is none."""
        if not isinstance(saved, Sequence) or isinstance(saved, str):
            raise ValueError(f"state['sums'] is a {type(saved).__name__}: it must come from state_dict()")
        held: dict[frozenset[str], Held] = {}
        for number, one in enumerate(saved):
            if not isinstance(one, Mapping) or not _are_places(one.get("places")):
                raise ValueError(f"state['sums'][{number}] has no places of parameters: it must come from state_dict()")
            if one.get("combine") != self._combine:
                continue
            try:
                state = self._make(one.get("k", 0))
                state.load_state_dict(one)
            except (TypeError, ValueError) as error:
                raise ValueError(f"state['sums'][{number}]: {error}") from error
            places = [list(place) for place in one["places"]]
            held[frozenset(name for name, _ in places)] = Held(places, state)
        return held


def topk_states_of(combine: str | OkTopk) -> TopkStates | None:
    """For ``TopK``'s ``combine``; ``None`` where sums keep everything."""
    if combine == "oktopk":
        combine = OkTopk()
    if isinstance(combine, OkTopk):
        return TopkStates("oktopk", combine.state)
    make: MakeState | None = {"gtopk": GTopkState, "bounded": BoundedTopkState}.get(combine)
    return None if make is None else TopkStates(combine, make)


def _times(past: dict[str, Any], ratio: float) -> dict[str, Any]:
    """What a call has left, in another unit."""
    return {**past, "threshold": past["threshold"] * ratio} if "threshold" in past else past


def _are_places(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(one, Sequence) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], int)
        for one in value
    )
