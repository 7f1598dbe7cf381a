"""``python -m lab value-formats``: what is measured of each format, and what options refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from lab.common.experiments import app
from lab.value_formats import BLOCKS, CHUNK, ITERATIONS, codebook_error, largest, rows_of
from telegrad.communicator.operands import WIRES


def _called(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        app(["value-formats"]), ["value-formats", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    return done.exit_code, done.output


def test_the_largest_of_every_chunk() -> None:
    vector = np.zeros(2 * CHUNK + 5, np.float32)
    vector[[3, 70, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1]] = 2, -9, -1, 3, 100
    stream = largest(vector, 2)
    assert stream.indices.tolist() == [3, 70, CHUNK + 1, CHUNK + 2]
    assert stream.values.tolist() == [2, -9, -1, 3]


def test_errors_and_bits_of_normal_values() -> None:
    vector = np.random.default_rng(0).standard_normal(64 * CHUNK).astype(np.float32)
    rows = {(row["wire"], row["sparse"]): row for row in rows_of({"normal": vector}, 64)}
    assert len(rows) == 2 * len(WIRES)
    assert 0.115 < rows["codebook2", False]["error"] < 0.125  # Lloyd-Max of four levels: 0.1175
    assert rows["codebook2", True]["error"] < rows["e3m0", True]["error"] < rows["qsgd2", True]["error"] / 5
    assert rows["codebook2", True]["bits"] == pytest.approx(rows["qsgd2", True]["bits"] + 3 / 32, abs=0.02)
    assert rows["e3m0", True]["bits"] == pytest.approx(rows["qsgd4", True]["bits"], abs=0.01)


def test_codebooks() -> None:
    vector = np.random.default_rng(0).standard_normal(64 * CHUNK).astype(np.float32)
    found = {row["wire"]: row["error"] for row in rows_of({"normal": vector}, 64) if not row["sparse"]}
    assert codebook_error(vector, 512, 2) == pytest.approx(found["codebook2"], rel=1e-3)
    assert codebook_error(vector, 512, 4) < codebook_error(vector, 512, 0) < codebook_error(vector, 512, None)
    assert codebook_error(np.tile(np.float32([1, 2, 5, 9]), 64), 256, 2) == 0


def test_a_short_training(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, output = _called("--steps", "2", "--every", "1", "--batch", "1", "--width", "14", "--json", str(file))
    assert status == 0, output
    assert "pseudo-gradient, largest" in output
    written = json.loads(file.read_text())
    assert len(written["rows"]) == 4 * len(WIRES) + 2 * len(BLOCKS) * (1 + len(ITERATIONS))
    assert all(0 <= row["error"] < 1.1 for row in written["rows"])


def test_more_steps_in_a_round_than_in_all() -> None:
    status, output = _called("--steps", "2", "--every", "3")
    assert status == 2
    assert "3 is more than the 2 of --steps: use fewer" in " ".join(output.replace("│", " ").split())
