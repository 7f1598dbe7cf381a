"""Made-up jobs with a culprit that is known, and the reports that their ranks would write."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telegrad.tools.report.hang_files import Report, parse

NOW_S = 1_763_712_345.0
Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    operation: str = "allreduce"
    count: int = 1024
    dtype: str = "f32"
    reduction: str = "sum"
    algorithm: str = "ring"
    root: int | None = None

    @property
    def text(self) -> str:
        root = "" if self.root is None else f", root={self.root}"
        return (
            f"{self.operation}(count={self.count}, dtype={self.dtype}, reduction={self.reduction}, "
            f"algorithm={self.algorithm}{root})"
        )


class Job:
    """``size`` ranks that have completed ``before`` operations; then each calls what a test says. ``files`` by rank."""

    def __init__(self, size: int, before: int, communicator: str = "3fa9c2d1", began_s: float = 40.0) -> None:
        self.size = size
        self.before = before
        self.began_s = began_s
        self.files: list[Json] = [self._file(rank, communicator) for rank in range(size)]
        for tag in range(before):
            for rank in range(size):
                self.call(rank, Call(count=100 + tag), state="completed", ago_s=began_s + 0.01 * (before - tag))

    def _file(self, rank: int, communicator: str) -> Json:
        peers = [
            {
                "rank": peer,
                "host": f"node{peer // 4}",
                "pid": 1000 + peer,
                "state": "alive",
                "called": self.before,
                "heard_s_ago": 0.4,
            }
            for peer in range(self.size)
            if peer != rank
        ]
        return {
            "kind": "telegrad report",
            "version": 1,
            "why": "timeout",
            "communicator": communicator,
            "driver": "ucx",
            "rank": rank,
            "world_size": self.size,
            "host": f"node{rank // 4}",
            "pid": 1000 + rank,
            "written_unix_s": NOW_S + 0.001 * rank,
            "timeout_s": 1800.0,
            "liveness_timeout_s": 8.0,
            "called": 0,
            "completed": 0,
            "failure": None,
            "peers": peers,
            "operations": [],
        }

    def call(
        self,
        rank: int,
        call: Call,
        *,
        state: str = "running",
        ago_s: float | None = None,
        waits_for: list[int] | None = None,
        sends_to: list[int] | None = None,
    ) -> None:
        """The rank's next operation."""
        file = self.files[rank]
        file["operations"].append(
            {
                "tag": file["called"],
                "call": call.text,
                "operation": call.operation,
                "count": call.count,
                "dtype": call.dtype,
                "reduction": call.reduction,
                "algorithm": call.algorithm,
                "root": call.root,
                "state": state,
                "called_s_ago": self.began_s - 9.0 if ago_s is None else ago_s,
                "took_s": 0.002 if state == "completed" else None,
                "waits_for": waits_for or [],
                "sends_to": sends_to or [],
            }
        )
        file["called"] += 1
        file["completed"] += state == "completed"
        file["operations"] = file["operations"][-64:]

    def message(self, rank: int, operation: str, peer: int | None, tag: int = 0, ago_s: float = 31.0) -> None:
        """The rank's next send or receive, which is not over."""
        other = "to" if operation == "send" else "source"
        file = self.files[rank]
        file.setdefault("messages", []).append(
            {
                "call": f"{operation}(count=5, dtype=f32, {other}={'any' if peer is None else peer}, tag={tag})",
                "operation": operation,
                "peer": peer,
                "message_tag": tag,
                "before": file["called"],
                "state": "running",
                "called_s_ago": ago_s,
            }
        )

    def wait_round_the_ring(self, call: Call, without: set[int]) -> None:
        """All but ``without`` call, and wait for the rank before them; who comes before a silent rank also sends."""
        for rank in sorted(set(range(self.size)) - without):
            after = (rank + 1) % self.size
            self.call(rank, call, waits_for=[(rank - 1) % self.size], sends_to=[after] if after in without else [])

    def wait_in_pairs(self, call: Call, without: set[int]) -> None:
        """The same by recursive doubling, for a power of two: each gets as far as its partners let it."""
        stages = self.size.bit_length() - 1
        met = {rank: -1 if rank in without else 0 for rank in range(self.size)}
        for stage in range(stages):
            met = {rank: stage + 1 if got == stage == met[rank ^ (1 << stage)] else got for rank, got in met.items()}
        for rank in sorted(set(range(self.size)) - without):
            self.call(rank, call, waits_for=[rank ^ (1 << met[rank])])

    def knows(self, of: int, **facts: object) -> None:
        """What all peers say of a rank."""
        for file in self.files:
            for peer in file["peers"]:
                if peer["rank"] == of:
                    peer.update(facts)

    def reports(self, missing: set[int] | None = None) -> list[Report]:
        """As they are read from disk."""
        return [parse(json.dumps(file).encode()) for file in self.files if file["rank"] not in (missing or set())]

    def write(self, folder: Path, missing: set[int] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            if file["rank"] not in (missing or set()):
                path = folder / f"{file['communicator']}-rank{file['rank']}.json"
                path.write_text(json.dumps(file))

    def copy(self) -> Job:
        return copy.deepcopy(self)
