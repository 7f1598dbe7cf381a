"""``python -m lab dense-sums``: the summary, from rows made by hand, and sums that round."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.dense_sums import WIRE_BITS, EncodedSums, Worst, _bounds_of, interleaved, lines_of, summary_of
from telegrad import Communicator, _core


def _row(algorithm: str, size: int, median_s: float, gloo_s: float | None, mpich_s: float | None, **more: Any) -> Any:
    return {
        "network": "1gbit",
        "ranks": 4,
        "algorithm": algorithm,
        "bytes": size,
        "median_s": median_s,
        "gloo_median_s": gloo_s,
        "mpich_median_s": mpich_s,
        "bound_s": None,
        "chosen": None,
        **more,
    }


def test_the_summary_counts_rows_and_finds_the_worst() -> None:
    big = 16 << 20
    found = summary_of(
        [
            _row("ring", 4, 9e-6, 5e-6, 8e-6),
            _row("auto", 4, 6.5e-6, 5e-6, 8e-6, chosen="ring"),  # 30 % slower than Gloo, but by less than 2 µs
            _row("ring", 1024, 1e-4, 9e-5, None),
            _row("auto", 1024, 1.2e-4, 9e-5, None, chosen="ring"),  # slower than both
            _row("ring", big, 0.25, 0.5, 0.3, bound_s=0.2),
            _row("auto", big, 0.25, 0.5, 0.3, bound_s=0.2),
        ]
    )
    assert (found.compared, found.as_fast) == (3, 2)
    assert found.worst == Worst(1024, "gloo", pytest.approx(4 / 3))
    assert (found.chosen, found.well_chosen) == (3, 2)
    assert found.worst_choice == Worst(1024, "ring", pytest.approx(1.2))
    assert (found.twice, found.unlike, found.most_unlike) == (2, 2, Worst(4, "ring", pytest.approx(9 / 6.5)))
    assert found.ratios_at_16mib == {"gloo": 0.5, "mpich": pytest.approx(0.25 / 0.3)}
    assert found.bound_shares == {big: pytest.approx(0.8)}
    assert lines_of(found) == [
        "auto within 10% or 2 µs of the better peer: 2 of 3 rows; worst 1.33x as long as Gloo at 1 KiB",
        "auto at 16 MiB: 2.00x as fast as Gloo, 1.20x as fast as MPICH",
        "auto within 5% or 2 µs of our best algorithm: 2 of 3 rows; worst 1.20x as long as ring at 1 KiB",
        "the algorithm that auto chose, under its own name: apart by more than that in 2 of 2 rows, "
        "at most 1.38x as long as ring at 4 B: so two measurements of one thing differ",
        "auto, share of the bound: 80.0% (76.5% of the line rate) at 16 MiB",
    ]


def test_nothing_is_said_about_what_was_not_measured() -> None:
    assert lines_of(summary_of([_row("auto", 4, 1e-6, None, None, network="shm")])) == []
    assert lines_of(summary_of([_row("ring", 4, 1e-6, 1e-6, None, network="shm")])) == []


@pytest.mark.parametrize("wire", WIRE_BITS)
def test_a_value_that_is_too_far_off_is_wrong(wire: str) -> None:
    (communicator,) = Communicator.local(1)
    sums = EncodedSums(communicator, 5000)
    sums.call(wire)(np.zeros(5000, np.float32))
    assert sums.wrong(wire, 5000) == 0
    sums._sum[17] += 100
    sums._sum[18] = np.nan
    assert sums.wrong(wire, 5000) == 2
    communicator.close()


def test_each_wire_has_a_bound_of_its_own() -> None:
    bounds = {"auto": 4.0, "ring": 4.0, "bf16": 2.0, "f16": 2.0, "qsgd4": 0.5, "int8": None}
    rows = [{"algorithm": name, "bytes": 8, "bound_s": bound} for name, bound in bounds.items()]
    assert _bounds_of(rows) == {"": [(8, 4.0)], "bf16, f16": [(8, 2.0)], "qsgd4": [(8, 0.5)]}


def dense_sums(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app(["dense-sums"]), ["dense-sums", *arguments], env={"COLUMNS": "160"})
    return done.exit_code, done.output


@pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")
def test_sums_that_round_stand_beside_the_others(tmp_path: Path) -> None:
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    status, output = dense_sums(
        *("--ranks", "2", "--network", "shm", "--peers", "none", "--wires", "bf16,qsgd4", "--plot", str(drawn)),
        *("--sizes", "64KiB", "--samples", "3", "--seconds", "0.05", "--json", str(found)),
    )
    assert status == 0, output
    rows = json.loads(found.read_text())["rows"]
    assert [(row["algorithm"], row["chosen"] is None, row["wrong"]) for row in rows] == [
        ("auto", False, 0),
        ("bf16", True, 0),
        ("qsgd4", True, 0),
    ]
    for row in rows:
        assert row["wire_bytes"] == row["bound_bytes"]
    assert rows[1]["bound_bytes"] == rows[0]["bound_bytes"] / 2
    assert "of our best algorithm" not in output  # another algorithm that auto could have chosen is not among them
    assert drawn.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--wires", "bf16,float8", f"'float8' does not exist: use {', '.join(WIRE_BITS)}, all"),
        ("--peers", "nccl", "use gloo, mpich, openmpi, impi, oneccl or none"),
        ("--nodes", "2", "network 'shm' has no nodes"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = dense_sums(option, value)
    assert status == 2
    assert message in " ".join(output.replace("│", " ").split())


def test_interleaved_ranks_have_neighbours_on_other_nodes() -> None:
    made = Communicator.local(6, nodes=(0, 0, 0, 1, 1, 1))
    dealt: list[Any] = [None] * 6

    def deal(rank: int) -> None:
        dealt[rank] = interleaved(made[rank])

    threads = [threading.Thread(target=deal, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.nodes for one in dealt} == {(0, 1, 0, 1, 0, 1)}
    for one in (*dealt, *made):
        one.close()
