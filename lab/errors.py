"""What every rank is told when something goes wrong, with telegrad and with Gloo.

Rank 1 is the one to whom it happens, or who calls something else. Rank r contributes r + 1 everywhere, so that a sum, a
maximum and a mean can be told apart. Each rank says in a line of JSON what it got: an error, or a result. The table is
made of that alone: nothing is known beforehand.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from lab.faults.ranks import say
from telegrad.errors import TransportError
from telegrad.launch import Ranks, RanksTimedOut, join, rank_and_size
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.plan import open_network, why_missing
from telegrad.tools.cli.outputs import check_writable, written

# What each rank runs

RANKS, CULPRIT = 3, 1
SCENES = {
    "kill": "`kill -9`",
    "freeze": "SIGSTOP: it freezes",
    "size": "another size (1,001 values, not 1,000)",
    "dtype": "equal bytes of another dtype (2,000 bf16, not 1,000 f32)",
    "reduction": "another reduction",
    "nan": "NaN in a gradient, under DDP",
}
"""What happens to rank 1, in words."""
NEED_TORCH = ("dtype", "nan")

_COUNT = 1000
_SETTLE_S = 0.5  # a slow rank would hear of the mistake in the sum before
_JOIN_TIMEOUT_S = 60.0


class _Library(Protocol):
    other_reduction: str

    def all_reduce(self, x: Any, reduction: str) -> None: ...

    def hook(self, ddp: Any) -> Any:
        """Registers what the library has for DDP; returns its state."""

    def close(self) -> None: ...


class _Telegrad:
    other_reduction = "avg"

    def __init__(self, store: str) -> None:
        self._communicator = join(join_timeout_s=_JOIN_TIMEOUT_S)

    def all_reduce(self, x: Any, reduction: str) -> None:
        self._communicator.all_reduce(x, reduction)

    def hook(self, ddp: Any) -> Any:
        from telegrad import DDPState, ddp_hook

        state = DDPState(self._communicator, ddp, nonfinite="raise")
        ddp.register_comm_hook(state, ddp_hook)
        return state

    def close(self) -> None:
        self._communicator.close()


class _Gloo:
    other_reduction = "max"  # it has no mean

    def __init__(self, store: str) -> None:
        _join_gloo(store)

    def all_reduce(self, x: Any, reduction: str) -> None:
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[reduction])

    def hook(self, ddp: Any) -> None:
        """DDP averages over Gloo by itself."""

    def close(self) -> None:
        """After an error it may not return."""


def _join_gloo(store: str) -> None:
    import torch.distributed as dist

    rank, size = rank_and_size()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def rank_main(library_name: str, scene: str, store: str) -> None:
    """One rank of one scene."""
    libraries: dict[str, Callable[[str], _Library]] = {"telegrad": _Telegrad, "gloo": _Gloo}
    library = libraries[library_name](store)
    rank, _ = rank_and_size()
    warm_up = np.full(_COUNT, rank + 1, np.float32)
    library.all_reduce(warm_up, "sum")
    time.sleep(_SETTLE_S)
    if scene == "nan":
        if library_name == "telegrad":
            _join_gloo(store)  # DDP itself needs it, to send the parameters round
        _say_outcome(lambda: _train(library, rank))
    else:
        _say_outcome(lambda: _reduce(library, scene, rank))
    library.close()
    os._exit(0)  # as after an error that nobody catches, but without a second one on the way out


def _say_outcome(act: Callable[[], dict[str, Any]]) -> None:
    try:
        outcome = act()
    except Exception as error:
        outcome = _described(error)
    say(end={"at_s": time.monotonic(), **outcome})


def _described(error: Exception) -> dict[str, Any]:
    """Whom it names: by attributes where it has them, otherwise by its words."""
    text = str(error)
    if isinstance(error, TransportError):
        named = error.peer
    else:
        found = re.search(r"\brank[ =](\d+)", text)
        named = getattr(error, "rank", int(found[1]) if found else None)
    return {
        "error": type(error).__name__,
        "text": text,
        "named": named,
        "host": bool(getattr(error, "host", None)),
        "parameter": getattr(error, "parameter", None),
    }


def _reduce(library: _Library, scene: str, rank: int) -> dict[str, Any]:
    odd = rank == CULPRIT
    x: Any = np.full(_COUNT + (odd and scene == "size"), rank + 1, np.float32)
    if odd and scene == "dtype":
        import torch

        x = torch.full((2 * _COUNT,), rank + 1, dtype=torch.bfloat16)
    if odd and scene in ("kill", "freeze"):
        say(fault=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL if scene == "kill" else signal.SIGSTOP)
    reduction = library.other_reduction if odd and scene == "reduction" else "sum"
    say(called=time.monotonic())
    library.all_reduce(x, reduction)
    first = float(x[0])
    return {"error": None, "result": first if math.isfinite(first) else None, "reduction": reduction}


def _train(library: _Library, rank: int) -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
    state = library.hook(ddp)
    x = torch.ones(4, 64)
    ddp(x).sum().backward()  # a sound step first
    if rank == CULPRIT:
        x[0, 0] = float("nan")
    say(called=time.monotonic())
    try:
        ddp(x).sum().backward()
    except Exception as error:
        failure = getattr(state, "failure", None)  # DDP makes a RuntimeError of everything
        return _described(failure if isinstance(failure, Exception) else error)
    gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
    spoilt = sum(not bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return {"error": None, "spoilt": spoilt, "gradients": len(gradients)}


# What became of each scene

_STARTING_S = 90.0
_LISTEN_S = 0.1


@dataclass(frozen=True)
class Row:
    """A scene in words, and by library what happened."""

    scene: str
    cells: Mapping[str, str]


def measure(
    libraries: Sequence[str],
    *,
    give_up_s: float,
    without_torch: str | None,
    scenes: Sequence[str] = tuple(SCENES),
    on_start: Callable[[str, str], None] = lambda *_: None,
) -> list[Row]:
    """All scenes with each library in turn. ``give_up_s``: how long to wait for an answer, in seconds. What needs
    torch says ``without_torch`` instead, if that is given."""
    rows = []
    for scene in scenes:
        cells = {}
        for library in libraries:
            if without_torch and (library == "gloo" or scene in NEED_TORCH):
                cells[library] = without_torch
                continue
            on_start(library, scene)
            said, codes = run_scene(library, scene, give_up_s)
            cells[library] = described(scene, said, codes, give_up_s, time_out_s=_time_out_s(library))
        rows.append(Row(SCENES[scene], cells))
    return rows


def run_scene(
    library: str, scene: str, give_up_s: float
) -> tuple[Mapping[int, Sequence[Mapping[str, Any]]], Mapping[int, int]]:
    """What each rank said, and the exit status of those that ended within ``give_up_s`` after it had happened."""
    said: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def take(rank: int, line: str) -> None:
        if line.startswith("{"):
            said[rank].append(json.loads(line))

    with tempfile.TemporaryDirectory(prefix="telegrad-errors-") as folder, open_network("shm", RANKS) as network:
        environment = {"OMP_NUM_THREADS": "1", "TELEGRAD_REPORT_DIR": folder, **network.environment}
        with Ranks(
            "lab.errors:rank_main",
            RANKS,
            timeout_s=_STARTING_S + give_up_s,
            arguments=[library, scene, os.path.join(folder, "store")],
            environment=environment,
            on_line=take,
        ) as ranks:
            try:
                while _concerned(scene, ranks.running()):
                    ranks.listen(_LISTEN_S)
                    since_s = began_s(scene, said)
                    if since_s is not None and time.monotonic() - since_s > give_up_s:
                        break
            except RanksTimedOut:
                pass  # who has said nothing by now is told as such
            running = ranks.running()
            for rank in running:
                ranks.signal(rank, signal.SIGKILL)
            exits = ranks.wait(until_all=True)
    return dict(said), {end.rank: end.returncode for end in exits if end.rank not in running}


def _concerned(scene: str, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` of whom an answer is wanted."""
    return [rank for rank in ranks if scene not in ("kill", "freeze") or rank != CULPRIT]


def began_s(scene: str, said: Mapping[int, Sequence[Mapping[str, Any]]]) -> float | None:
    """When it happened: the fault, or the last rank's call. None if it has not yet."""
    key = "fault" if scene in ("kill", "freeze") else "called"
    of_ranks = [CULPRIT] if key == "fault" else range(RANKS)
    times = [line[key] for rank in of_ranks for line in said.get(rank, ()) if key in line]
    return max(times) if len(times) == len(of_ranks) else None


def described(
    scene: str,
    said: Mapping[int, Sequence[Mapping[str, Any]]],
    codes: Mapping[int, int],
    give_up_s: float,
    *,
    time_out_s: float | None,
) -> str:
    """One cell: what each rank got, ranks with the same fate together."""
    since_s = began_s(scene, said)
    fates: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for rank in _concerned(scene, range(RANKS)):
        end = next((line["end"] for line in said.get(rank, ()) if "end" in line), None)
        if end is not None:
            fate = _error_fate(end) if end["error"] else _result_fate(end)
            if end["error"] and since_s is not None:
                times[fate].append(max(0.0, end["at_s"] - since_s))
        elif rank in codes:
            how = f"exit status {codes[rank]}" if codes[rank] >= 0 else signal.Signals(-codes[rank]).name
            fate = f"the process dies ({how})"
        else:
            limit = f" (its time-out is {time_out_s / 60:.0f} min)" if time_out_s else ""
            fate = f"nothing within {give_up_s:g} s{limit}"
        fates[fate].append(rank)
    parts = []
    for fate, ranks in fates.items():
        after = f" after {_rounded(max(times[fate]))} s" if times[fate] else ""
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        parts.append(f"{who}: {fate}{after}")
    return "; ".join(parts)


def _error_fate(end: Mapping[str, Any]) -> str:
    if end["named"] is None:
        return f"{end['error']} that names nobody"
    host = " and its host" if end["host"] else ""
    parameter = f" and the parameter `{end['parameter']}`" if end["parameter"] else ""
    return f"{end['error']} that names rank {end['named']}{host}{parameter}"


def _result_fate(end: Mapping[str, Any]) -> str:
    if "spoilt" in end:
        return f"no error, {'but' if end['spoilt'] else 'and'} NaN in {end['spoilt']} of {end['gradients']} gradients"
    given = range(1, RANKS + 1)
    asked = end["reduction"]
    truth = {"sum": sum(given), "max": max(given), "avg": sum(given) / RANKS}[asked]
    if end["result"] == truth:
        return f"no error, and the {asked} {truth:g}"
    got = "NaN" if end["result"] is None else f"{end['result']:g}"
    return f"no error, but {got} instead of the {asked} {truth:g}"


def _rounded(seconds: float) -> str:
    """Two digits, but no more than hundredths: the rest is the machine's."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{max(0.01, math.ceil(seconds * 100) / 100):.2f}"


def _time_out_s(library: str) -> float | None:
    """After which the library itself gives up, unless told otherwise."""
    if library != "gloo":
        return None
    from torch.distributed.constants import default_pg_timeout

    return float(default_pg_timeout.total_seconds())


BEGIN, END = "<!-- begin python -m lab errors -->", "<!-- end python -m lab errors -->"


def insert(text: str, path: Path) -> None:
    """Puts ``text`` between the two markers of a file. Raises ``ValueError`` if they are not there, once each and in
    order."""
    before, after = around(path)
    path.write_text(f"{before}{BEGIN}\n{text.strip()}\n{END}{after}")


def around(path: Path) -> tuple[str, str]:
    """What a file has before and after the two markers. Raises ``ValueError`` as ``insert``."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after or END in before:
        raise ValueError(f"{path} must hold the lines {BEGIN!r} and {END!r} once, in this order: add them")
    return before, after


# Table and plot

_NAMES = {"telegrad": "telegrad", "gloo": "Gloo"}


def table_of(rows: Sequence[Row], libraries: Sequence[str]) -> Table:
    """A line per scene, a column per library, a line in a cell per fate."""
    table = Table(
        title=f"What happens to rank 1 of {RANKS}", title_justify="left", header_style="bold", show_lines=True
    )
    table.add_column("")
    for library in libraries:
        table.add_column(_NAMES[library])
    for row in rows:
        table.add_row(row.scene, *(row.cells[library].replace("; ", "\n") for library in libraries))
    return table


def markdown(rows: Sequence[Row], libraries: Sequence[str], machine: Mapping[str, object], command: str) -> str:
    """The same as Markdown, with the command that makes it and what it was made with."""
    lines = [
        "| " + " | ".join([f"What happens to rank 1 of {RANKS}", *(_NAMES[library] for library in libraries)]) + " |",
        "|" + "---|" * (1 + len(libraries)),
    ]
    for row in rows:
        cells = [row.scene, *(row.cells[library] for library in libraries)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    torch = f", torch {machine['torch']}" if machine["torch"] else ""
    day = str(machine["date"]).partition("T")[0]
    made = f"Measured by `{command}` on {day}, {machine['cores']} cores{torch}, commit {machine['commit']}."
    return "\n".join([*lines, "", made])


# The command

_GIVE_UP_S = 15.0


def command(
    peer: Annotated[str, typer.Option(help="Whom to put beside us: gloo (needs torch) or none.")] = "gloo",
    give_up: Annotated[float, typer.Option(min=1, help="Seconds to wait for an answer.")] = _GIVE_UP_S,
    into: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help=f"Write the table into this Markdown file, between {BEGIN} and {END}."
        ),
    ] = None,
    scenes: Annotated[str, typer.Option(help=f"Which, separated by commas: {', '.join(SCENES)}; or all.")] = "all",
) -> None:
    """Let the same things go wrong with telegrad and with Gloo, and say what every rank heard of it.

    Three ranks; rank 1 is killed, frozen, or calls something else than the others. Times are seconds from the fault, in
    a mismatch from the last rank's call.
    """
    console = Console()
    if peer not in ("gloo", "none"):
        raise typer.BadParameter(f"peer {peer!r} is not known: use gloo or none", param_hint="--peer")
    chosen = tuple(SCENES) if scenes == "all" else tuple(name.strip() for name in scenes.split(","))
    for name in chosen:
        if name not in SCENES:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(SCENES)}", param_hint="--scenes")
    if into is not None:
        _check_page(into, chosen)
    libraries = ["telegrad"] if peer == "none" else ["telegrad", peer]
    missing = why_missing("gloo")  # torch is wanted by scenes of our own too
    with console.status("starting") as status:
        rows = measure(
            libraries,
            give_up_s=give_up,
            without_torch=f"not measured: {missing}" if missing else None,
            scenes=chosen,
            on_start=lambda library, scene: status.update(f"{library}: {scene}"),
        )
    console.print(table_of(rows, libraries))
    if into is not None:
        command = f"python -m lab errors --peer {peer}" + (f" --give-up {give_up:g}" if give_up != _GIVE_UP_S else "")
        with written(console, into):
            insert(markdown(rows, libraries, describe_machine(), command), into)
        console.print(f"table: {into}")
    if peer != "none" and missing:
        console.print(f"[yellow]Without Gloo:[/] {missing}")


def _check_page(page: Path, scenes: tuple[str, ...]) -> None:
    """Before anything is measured."""
    if left_out := [name for name in SCENES if name not in scenes]:
        raise typer.BadParameter(
            f"the table in {page} would lose {', '.join(left_out)}: leave out --scenes, or this", param_hint="--into"
        )
    check_writable(page, "--into")
    try:
        around(page)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--into") from error
