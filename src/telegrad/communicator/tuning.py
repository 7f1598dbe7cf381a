"""How the ranks of a job come to hold the same tuning: what each wants travels with its address, and rank 0 decides.

All ranks see the same answers, so all take the same tuning, or raise the same error.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from telegrad import _core
from telegrad.communicator import tuning_cache
from telegrad.communicator.nodes import label_of, numbered, process_mark, two_levels
from telegrad.communicator.rendezvous.joining import Exchange
from telegrad.cost import Costs, Place, Tuning
from telegrad.cost.tuning import NETWORK_VARIABLES

AUTO = "auto"
_BUILT_IN = "built-in"
_LENGTH_BYTES = 4
_SPARSE_WORK_S_PER_BYTE = 2e-10


def checked_tuning(tuning: Any, size: int | None = None) -> Tuning | str | None:
    """``tuning`` if it is one for ``size`` ranks (``None``: any number), ``"auto"`` or ``None``. Raises ``TypeError``
    and ``ValueError``."""
    if isinstance(tuning, str) and tuning != AUTO:
        raise ValueError(
            f"tuning={tuning!r} is none: give a Tuning, 'auto' (what calibration found), or None (built-in)"
        )
    if not (tuning is None or isinstance(tuning, str | Tuning)):
        raise TypeError(
            f"tuning is a {type(tuning).__name__}: give a Tuning, 'auto' or None; a file's text goes through "
            "Tuning.from_json()"
        )
    if isinstance(tuning, Tuning) and size is not None and tuning.ranks != size:
        raise ValueError(
            f"tuning is for {tuning.ranks} ranks, but this job has {size}: calibrate with {size}, or give 'auto'"
        )
    return tuning


def network_costs(costs: Costs) -> _core.NetworkCosts:
    """What sums of sparse vectors choose their algorithm by. Their work is merging and packing, which takes longer than
    the additions that were measured."""
    work_s_per_byte = max(costs.gamma_s_per_byte, _SPARSE_WORK_S_PER_BYTE)
    return _core.NetworkCosts(costs.alpha_s, costs.beta_s_per_byte, costs.beta_exchange_s_per_byte, work_s_per_byte)


@dataclass(frozen=True)
class _Word:
    """What a rank says: its host, its node's label, what it wants (``"auto"``, ``"built-in"`` or a tuning's digest),
    the tunings that it knows of, of which those of rank 0 count, and which process it is."""

    host: str
    node: str
    wants: str
    offers: list[str]
    process: str

    def pack(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TuningAgreement:
    """One rank's part in it: ``swap`` is the exchange that the network's driver calls, once; then ``place``,
    ``tuning`` (``None``: the built-in choice) are known, and by rank ``nodes``, the numbers of nodes, and
    ``processes``, their marks. ``node``: what this rank calls its own, see ``label_of``."""

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        tuning: Tuning | str | None,
        interface: str | None,
        driver: str = "ucx",
        node: str | None = None,
    ) -> None:
        self._size = size
        self._exchange = exchange
        self._interface = interface
        self._driver = driver
        host = socket.gethostname()
        offers: list[Tuning] = []
        if isinstance(tuning, Tuning):
            offers, wants = [tuning], tuning.digest
        else:
            wants = AUTO if tuning == AUTO else _BUILT_IN
        if rank == 0 and wants == AUTO:
            offers = tuning_cache.candidates(self._place_on(((host, size),)))
        texts = [offer.to_json() for offer in offers] if rank == 0 else []
        self._word = _Word(host, label_of(node), wants, texts, process_mark())
        self.processes: tuple[str, ...] = (self._word.process,)
        self.place: Place | None = None
        self.nodes: tuple[int, ...] = ()
        self.tuning: Tuning | None = None
        self.is_built_in = False  # rank 0 asked for no tuning

    def swap(self, address: bytes) -> list[bytes]:
        """Every rank's address, by rank. Raises ``ValueError`` on all ranks if one wants what rank 0 has not."""
        blobs = list(self._exchange(self._word.pack() + address))
        words, addresses = [], []
        for rank, blob in enumerate(blobs):
            word, rest = _unpacked(blob, rank)
            words.append(word)
            addresses.append(rest)
        if len(words) == self._size:  # otherwise the driver says what is wrong
            self._agree(words)
        return addresses

    def _agree(self, words: Sequence[_Word]) -> None:
        self.nodes = numbered([word.node for word in words])
        self.processes = tuple(word.process for word in words)
        hosts = tuple(sorted(Counter(word.host for word in words).items()))
        self.place = self._place_on(hosts, self.nodes if two_levels(self.nodes) else ())
        offers = [Tuning.from_json(text) for text in words[0].offers]
        for offer in offers:
            checked_tuning(offer, self._size)
        if words[0].wants == AUTO:
            offers = [offer for offer in offers if offer.place.is_alike(self.place)]
        self.tuning = offers[0] if offers else None
        self.is_built_in = words[0].wants == _BUILT_IN
        agreed = self.tuning.digest if self.tuning else _BUILT_IN
        others = [str(rank) for rank, word in enumerate(words) if word.wants not in (AUTO, agreed)]
        if others:
            raise ValueError(
                f"rank {', '.join(others)} was given another tuning than rank 0, which has {agreed}: give all ranks "
                "the same, or leave tuning='auto' on all but rank 0"
            )

    def _place_on(self, hosts: tuple[tuple[str, int], ...], nodes: tuple[int, ...] = ()) -> Place:
        environment = sorted((name, os.environ[name]) for name in NETWORK_VARIABLES if os.environ.get(name))
        return Place(self._driver, hosts, self._interface, tuple(environment), nodes)


def _unpacked(blob: bytes, rank: int) -> tuple[_Word, bytes]:
    try:
        end = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "little")
        found = json.loads(blob[_LENGTH_BYTES:end])
        host, node, wants, process = (str(found[name]) for name in ("host", "node", "wants", "process"))
        word = _Word(host, node, wants, [str(offer) for offer in found["offers"]], process)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"exchange returned a blob that is no address of rank {rank}: it must return the bytes of each rank, by "
            "rank. All ranks must run the same version of telegrad"
        ) from error
    return word, blob[end:]
