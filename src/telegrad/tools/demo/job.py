"""A run of the demo without torch: its settings, its data, the start of its ranks, and the judgement of its results."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import math
import random
import socket
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.bench.netlab import INTERFACE, Netlab

# Settings, which travel from the parent to the ranks as JSON.

RUNS = ("ddp-gloo", "telegrad-dense", "telegrad-sparse")
"""Plain DistributedDataParallel over Gloo; the same with our hook, dense; with our hook, sparse."""
FP16, POWERSGD, LOW_RANK = "ddp-fp16", "ddp-powersgd-", "telegrad-lowrank-"
"""DDP over Gloo with hooks that torch has: half-precision gradients, and PowerSGD of the rank that follows. And our own
hook with LowRank of the rank that follows."""
OUTER = DILOCO, SPARSELOCO, STREAMING = "telegrad-diloco-", "telegrad-sparseloco-", "telegrad-streaming-"
"""Replicas that exchange every so many steps, as follows: all of what they have learnt, a part, or all in turn."""
TORCHFT = "torchft-diloco-"
"""The same by torchft's DiLoCo over Gloo, where torchft is installed."""
POWERSGD_DENSE_STEPS = 2  # at least: it keeps what it remembers by bucket, and DDP makes its buckets anew in the second


def check_run(name: str) -> None:
    """Raises ``ValueError`` unless it is one of those above, and installed."""
    if number_in(name, TORCHFT):
        if importlib.util.find_spec("torchft") is None:
            raise ValueError(f"run={name!r} needs torchft: pip install torchft")
        return
    if name in (*RUNS, FP16) or any(number_in(name, one) for one in (POWERSGD, LOW_RANK, *OUTER)):
        return
    names = ", ".join((*RUNS, FP16))
    raise ValueError(
        f"run={name!r} does not exist: use {names}, {POWERSGD}R or {LOW_RANK}R of any rank R, or {DILOCO}H, "
        f"{SPARSELOCO}H, {STREAMING}H or {TORCHFT}H of any number H of steps"
    )


def number_in(name: str, prefix: str) -> int | None:
    """The 4 in ``ddp-powersgd-4``, whose prefix is ``POWERSGD``; ``None`` for another name."""
    number = name.removeprefix(prefix)
    return int(number) if number != name and number.isascii() and number.isdigit() and int(number) > 0 else None


DEVICES = ("cpu", "cuda")

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"combine": name} for name in ("allreduce", "oktopk", "gtopk", "bounded", "allgather")},
    "topka": {"select": "topk", "combine": "allgather"},
    "topkdsa": {"select": "topk", "combine": "allreduce"},
    "gaussiank": {"select": "gaussian", "combine": "allgather"},
}
"""How the sparse run's entries meet, as options of TopK: what ``combine`` takes, and what Ok-Topk is compared with."""


@dataclass(frozen=True)
class ModelSize:
    """Of the byte-level GPT. The default has 5.3 million parameters: two wide layers learn more in a few minutes than
    many narrow ones. Windows are short because a step's arithmetic grows with them but its traffic does not, and the
    demo is about traffic.
    """

    width: int = 448
    layers: int = 2
    heads: int = 7
    context: int = 64
    history: int = 3


@dataclass(frozen=True)
class Settings:
    """One run.

    ``interface``: whose byte counters are read (``eth0``, or ``lo`` for all ranks together); with ``shared_memory`` a
    communicator's own are, where there is one. ``device``: ``"cpu"``, or ``"cuda"``, one GPU for all ranks. ``corpus``:
    the folder with the text. ``scheme``: see ``SCHEMES``. ``warmup_steps``: dense steps before the first sparse one,
    and before PowerSGD's first, which needs two. ``validations``: how often the held-out loss is taken, evenly over the
    run. ``optimizer``'s figures are those at
    which plain DDP does best in so short a run; beta1 is low because error feedback delivers an entry's gradients in
    one piece, which is momentum enough.
    """

    run: str
    corpus: str
    steps: int
    interface: str
    shared_memory: bool = False
    device: str = "cpu"
    seed: int = 0
    batch: int = 1
    density: float = 0.01
    scheme: str = "allreduce"
    warmup_steps: int = 0
    validations: int = 8
    validation_windows: int = 192
    bucket_mb: float = 4.0
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    ramp_steps: int = 10
    beta1: float = 0.5
    beta2: float = 0.95
    weight_decay: float = 0.1
    model: ModelSize = ModelSize()

    def __post_init__(self) -> None:
        check_run(self.run)
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} does not exist: use one of {', '.join(DEVICES)}")
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme={self.scheme!r} does not exist: use one of {', '.join(SCHEMES)}")
        for name in ("steps", "batch", "validations", "validation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "bucket_mb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")
        every = number_in(self.run, TORCHFT)
        if every and self.steps % every:
            raise ValueError(f"steps={self.steps} must be a multiple of {every}: torchft's replicas agree only then")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative")
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be above 0 and at most 1: the share of entries that is sent")

    def validation_steps(self) -> set[int]:
        """After how many steps the held-out loss is taken; the last is among them."""
        return {round(self.steps * (i + 1) / self.validations) for i in range(self.validations)} - {0}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "model": ModelSize(**fields["model"])})


# The demo's data: the source code of Python's own standard library, as one stream of bytes.
# Every machine that can run the demo has this text, so nothing is downloaded. The files are read once, by the parent;
# the ranks map the two resulting files into memory and draw their batches from them. Which bytes a step sees depends
# on the seed, the step and the rank only, never on the communication: all runs of the demo train on the same data in
# the same order. This module must not know of models, processes or networks.

VOCABULARY = 256
"""One token is one byte."""

_HELD_OUT_IN = 20
_FOREIGN = {"site-packages", "dist-packages", "__pycache__"}

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]


def source_files(root: Path | None = None) -> list[Path]:
    """All ``*.py`` files of the standard library in sorted order, without installed third-party packages.

    ``root`` replaces the standard library's folder. Raises ``FileNotFoundError`` when there is no Python file in it.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = [path for path in sorted(folder.rglob("*.py")) if not _FOREIGN.intersection(path.relative_to(folder).parts)]
    if not files:
        if root is not None:
            raise FileNotFoundError(f"--text {root} has no *.py file to train on: name a folder that has")
        raise FileNotFoundError(
            f"{folder} has no *.py file to train on: install Python's standard library with its sources"
        )
    return files


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the validation set: one in 20, decided by a hash of its path inside the library."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:4], "big") % _HELD_OUT_IN == 0


@dataclass(frozen=True)
class Corpus:
    """The training and the held-out text: 1-D uint8 arrays, usually mapped from files that all ranks share."""

    training: Bytes
    held_out: Bytes

    @classmethod
    def prepare(cls, folder: Path, root: Path | None = None) -> Corpus:
        """Reads every source file once and writes ``training.bin`` and ``held_out.bin`` into ``folder``.

        Raises ``FileNotFoundError`` when ``root`` (default: the standard library) has no Python file.
        """
        files = source_files(root)
        base = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for path in files:
            parts[is_held_out(path.relative_to(base).as_posix())].append(path.read_bytes())
        (folder / "training.bin").write_bytes(b"\n".join(parts[False]))
        (folder / "held_out.bin").write_bytes(b"\n".join(parts[True]))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Maps what :meth:`prepare` wrote. Raises ``ValueError`` when a set is empty."""
        sets = []
        for name in ("training.bin", "held_out.bin"):
            if (folder / name).stat().st_size == 0:
                raise ValueError(f"{folder / name} is empty: the text is too small to be split, give a larger one")
            sets.append(np.memmap(folder / name, dtype=np.uint8, mode="r"))
        return cls(sets[0], sets[1])


def _windows(text: Bytes, starts: Tokens, context: int) -> tuple[Tokens, Tokens]:
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


def check_length(text: Bytes, context: int) -> None:
    """Raises ``ValueError`` when ``text`` is shorter than one window and the byte after it."""
    if len(text) <= context:
        raise ValueError(f"context={context} needs a longer text than {len(text)} bytes: choose a shorter context")


def training_batch(text: Bytes, *, seed: int, step: int, rank: int, batch: int, context: int) -> tuple[Tokens, Tokens]:
    """The windows that ``rank`` trains on at ``step``: inputs and next bytes, both int64 of shape (batch, context).

    Raises ``ValueError`` when the text is shorter than one window.
    """
    check_length(text, context)
    random = np.random.default_rng([seed, step, rank])
    return _windows(text, random.integers(0, len(text) - context, size=batch), context)


def validation_batches(
    text: Bytes, *, windows: int, batch: int, context: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tokens, Tokens]]:
    """This rank's share of ``windows`` evenly spaced windows of the held-out text, ``batch`` of them at a time.

    The set of windows does not depend on ``world_size``. Raises ``ValueError`` when the text is shorter than a window.
    """
    check_length(text, context)
    starts = np.linspace(0, len(text) - context - 1, windows).astype(np.int64)[rank::world_size]
    for first in range(0, len(starts), batch):
        yield _windows(text, starts[first : first + batch], context)


# Results of a run, and the conclusions from them.

FIRST_LOSS = math.log(VOCABULARY)
"""Nats per byte before the first step: the model calls all bytes equally likely."""


@dataclass(frozen=True)
class TrainingStep:
    """A training step on rank 0. ``sent``: bytes by one rank since the training began."""

    step: int
    loss: float
    step_s: float
    exposed_s: float
    sent: float


@dataclass(frozen=True)
class Validation:
    """The held-out loss (nats per byte) after ``step`` steps, ``training_s`` seconds, ``sent`` bytes by one rank."""

    step: int
    loss: float
    training_s: float
    sent: float


@dataclass
class RunResult:
    """One run, as far as it has got; ``take`` feeds it with what rank 0 says."""

    name: str
    parameters: int = 0
    tokens_per_step: int = 0
    steps: list[TrainingStep] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    training_s: float = 0.0
    total_s: float = 0.0
    sent_by_rank: list[float] = field(default_factory=list)
    ranks_agree: bool | None = None
    refused: str | None = None
    """Why it cannot be done on the device it was asked for."""

    def take(self, line: str) -> str | None:
        """Reads one line of rank 0's output; returns which kind of message it was, None for other output."""
        if not line.startswith('{"kind"'):
            return None
        message: dict[str, Any] = json.loads(line)
        kind = str(message.pop("kind"))
        if kind == "start":
            self.parameters, self.tokens_per_step = message["parameters"], message["tokens"]
        elif kind == "step":
            self.steps.append(TrainingStep(**message))
            self.training_s += self.steps[-1].step_s
        elif kind == "validation":
            self.validations.append(Validation(**message))
        elif kind == "refused":
            self.refused = message["reason"]
        elif kind == "end":
            self.training_s = message["training_s"]
            self.sent_by_rank = message["sent_by_rank"]
            weights = message["weights_by_rank"]
            self.ranks_agree = all(one == weights[0] for one in weights)
        return kind

    @property
    def validation_loss(self) -> float:
        """The last held-out loss, in nats per byte; NaN before the first."""
        return self.validations[-1].loss if self.validations else math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.validation_loss / math.log(2)

    @property
    def step_s_median(self) -> float:
        return statistics.median(step.step_s for step in self.steps)

    @property
    def exposed_s_median(self) -> float:
        return statistics.median(step.exposed_s for step in self.steps)

    @property
    def bytes_per_rank_step(self) -> float:
        """Bytes sent, averaged over ranks and steps."""
        return statistics.fmean(self.sent_by_rank) / len(self.steps)

    def loss_at(self, training_s: float) -> float:
        """The held-out loss after so many seconds of training, interpolated between validations; the last one after
        the end.
        """
        before = Validation(0, FIRST_LOSS, 0.0, 0.0)
        for after in self.validations:
            if training_s < after.training_s:
                share = (training_s - before.training_s) / (after.training_s - before.training_s)
                return before.loss + share * (after.loss - before.loss)
            before = after
        return before.loss

    def smoothed_loss(self, over: int = 20) -> float:
        """The mean training loss of the last ``over`` steps; a single step's is noise. NaN before the first."""
        return statistics.fmean(step.loss for step in self.steps[-over:]) if self.steps else math.nan


def equal_wall_s(results: Sequence[RunResult]) -> float:
    """The training time at which runs are compared: when the fastest of them was done."""
    return min(result.training_s for result in results)


def as_json(
    results: Sequence[RunResult], *, network: str, ranks: int, steps: int, missing: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What ``--json`` writes of the runs that were done; ``missing``: why others were not, by name. ``wall_s`` is
    training time, ``total_s`` includes start-up and validation; losses are in nats per byte, and None where training
    diverged; ``curve`` holds every validation.
    """
    at_s = equal_wall_s(results) if results else math.nan
    runs = [
        {
            "name": result.name,
            "validation_loss": _finite(result.validation_loss),
            "bits_per_byte": _finite(result.bits_per_byte),
            "wall_s": result.training_s,
            "total_s": result.total_s,
            "bytes_per_rank_step": result.bytes_per_rank_step,
            "step_s_median": result.step_s_median,
            "exposed_comm_s_median": result.exposed_s_median,
            "equal_wall_s": at_s,
            "validation_loss_at_equal_wall": _finite(result.loss_at(at_s)),
            "training_loss": _finite(result.smoothed_loss()),
            "parameters": result.parameters,
            "tokens_per_step": result.tokens_per_step,
            "ranks_agree": result.ranks_agree,
            "curve": [
                {
                    "step": one.step,
                    "validation_loss": _finite(one.loss),
                    "wall_s": one.training_s,
                    "bytes_per_rank": one.sent,
                }
                for one in result.validations
            ],
        }
        for result in results
    ]
    return {"runs": runs, "missing": dict(missing or {}), "network": network, "ranks": ranks, "steps": steps}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


LOOPBACK, SHARED_MEMORY = "loopback", "shm"

TARGET = "telegrad.tools.demo.training:main"
"""What the ranks run."""

_PORT = 29500


@dataclass(frozen=True)
class TrainingPlace:
    """Where the ranks run. ``interface``: the one they talk over and whose counters are read."""

    name: str
    ranks: int
    interface: str
    master: str
    prefix_of: Callable[[int], Sequence[str]] | None = None
    shared_memory: bool = False

    @property
    def environment(self) -> Mapping[str, str]:
        """Gloo over TCP, telegrad too, on the same interface, or over ``shared_memory``; one computing thread per
        rank."""
        common = {**SINGLE_THREADED, "GLOO_SOCKET_IFNAME": self.interface}
        return common if self.shared_memory else {**common, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": self.interface}


@contextlib.contextmanager
def open_place(network: str, ranks: int) -> Iterator[TrainingPlace]:
    """``"loopback"``; ``"shm"``: loopback for Gloo, shared memory for telegrad; or a rate such as ``"1gbit"``: one
    network namespace per rank, links shaped to it, removed afterwards. Raises ``ValueError`` for other names,
    ``NetlabError`` where namespaces cannot be made.
    """
    if network == LOOPBACK:
        yield TrainingPlace(network, ranks, "lo", "127.0.0.1")
        return
    if network == SHARED_MEMORY:
        yield TrainingPlace(network, ranks, "lo", "127.0.0.1", shared_memory=True)
        return
    with Netlab(ranks, network) as lab:
        yield TrainingPlace(network, ranks, INTERFACE, lab.address_of(0), lab.prefix_of)


def train(
    settings: Settings,
    place: TrainingPlace,
    *,
    timeout_s: float,
    on_message: Callable[[RunResult, str], None] = lambda result, kind: None,
) -> RunResult:
    """One training run. ``on_message(result so far, kind)`` is called after each message of rank 0. All ranks have
    ended when this returns or raises. Raises ``RankFailed`` with a dead rank's last words, ``RanksTimedOut``.
    """
    result = RunResult(settings.run)
    port = _PORT if place.prefix_of is not None else _free_port()

    def take(rank: int, line: str) -> None:
        kind = result.take(line) if rank == 0 else None
        if kind is not None:
            on_message(result, kind)

    def as_torchrun(rank: int) -> Mapping[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_WORLD_SIZE": str(place.ranks),
            "MASTER_ADDR": place.master,
            "MASTER_PORT": str(port),
        }

    started_s = time.monotonic()
    with Ranks(
        TARGET,
        place.ranks,
        timeout_s=timeout_s,
        arguments=[settings.to_json()],
        environment=place.environment,
        environment_of=as_torchrun,
        prefix_of=place.prefix_of,
        on_line=take,
    ) as ranks:
        ranks.wait()
    result.total_s = time.monotonic() - started_s
    return result


def _free_port() -> int:
    """Below the ports that the system gives to whoever asks for any: the ranks need it some seconds from now."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # taken
            continue
