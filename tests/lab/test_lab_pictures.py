"""The pictures of the explanation pages: they are drawn from what the library computes, and pages show them."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.common.programs import ROOT
from lab.pictures import (
    DENSITY,
    DEVICE,
    ENTRIES,
    FOLDER,
    LEAST_BYTES,
    MAP_NETWORK,
    MODEL,
    MOST_BYTES,
    NETWORK,
    NODES,
    PATH,
    PICTURES,
    RANKS,
    SCHEMES,
    SENT_ENTRIES,
    STEPS,
    TIE,
    UNCALIBRATED_RING_BYTES,
    Region,
    default_ring_bytes,
    draw,
    predictions,
    regions,
    residual_life,
    winners,
)
from telegrad.cost import allreduce_table, fastest_allreduce
from telegrad.tools.cli import make_app
from telegrad.tools.sim.measure import network_of

LEAST_POINTS = 9


def pictures(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app(["pictures"]), ["pictures", *arguments], env={"COLUMNS": "120", "TERM": "dumb"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("pictures")
    status, output = pictures("--folder", str(made))
    assert status == 0, output
    assert all(f"plot: {made / name}" in output.replace("\n", "") for name in PICTURES)
    return made


def test_the_command_writes_all_pictures_and_nothing_else(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == set(PICTURES)
    assert len(PICTURES) == 4
    assert {path.name for path in FOLDER.iterdir()} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_svg_with_text_of_nine_points_or_more(name: str, folder: Path) -> None:
    for path in (folder / name, FOLDER / name):
        text = path.read_text()
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        sizes = [float(size) * 100 for size in re.findall(r"scale\((0?\.\d+) -0?\.\d+\)", text)]
        assert len(sizes) > 10, "text is drawn as glyphs of 100 units"
        assert min(sizes) >= LEAST_POINTS - 1e-9
        assert len(text) < 100_000


def test_drawing_again_gives_the_same(folder: Path, tmp_path: Path) -> None:
    """But for the last digits of places, which the solver of layouts finds in an order of its own, and for names that
    matplotlib makes of places."""
    draw("residual-life.svg", tmp_path)
    made = re.compile(r"\bp[0-9a-f]{10}\b")
    once, again = (made.sub("p", (where / "residual-life.svg").read_text()) for where in (folder, tmp_path))
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("…", once) == number.sub("…", again)
    np.testing.assert_allclose(*([float(one) for one in number.findall(text)] for text in (once, again)), atol=0.01)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    status, output = pictures("--folder", str(tmp_path / "gone"))
    assert status == 2
    assert "does not exist" in re.sub(r"[\s│]+", " ", output)


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / next(iter(PICTURES))).mkdir()
    status, output = pictures("--folder", str(tmp_path))
    assert status == 1
    assert "cannot write" in output


# The pages.


@pytest.mark.parametrize("name", PICTURES)
def test_pages_show_a_picture_with_text_command_and_date(name: str) -> None:
    shown = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for alt, after in re.findall(
            rf"!\[([^\]]+)\]\([./]*pictures/{re.escape(name)}\)\n\n(\*[^*]+\*)\n", page.read_text()
        ):
            shown += 1
            assert len(alt.split()) >= 25, f"{page}: the alt text says what the picture shows"
            assert "`python -m lab pictures`" in after
            assert re.search(r"\b\d{1,2} [A-Z][a-z]+ 20\d\d\b", after)
    assert shown >= 1
    mentions = sum(page.read_text().count(name) for page in (ROOT / "docs").rglob("*.md"))
    assert mentions == shown


# The path of a gradient.


def test_files_on_the_path_exist() -> None:
    assert len(PATH) == 6
    for stage in PATH:
        assert all((ROOT / file).exists() for file in stage.files), stage
    assert [stage.name for stage in PATH if not stage.files] == ["backward pass", "optimizer step"]


# The timelines.


def test_timelines_are_what_the_command_predicts(tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    options = ["--model", MODEL, "--nodes", str(NODES), "--network", NETWORK, "--device", DEVICE]
    done = CliRunner().invoke(make_app(), ["advise", *options, "--density", str(DENSITY), "--json", str(file)])
    assert done.exit_code == 0, done.output
    rows: dict[str, Any] = {row["scheme"]: row for row in json.loads(file.read_text())["rows"]}
    for one in predictions():
        row = rows[one.scheme.name]
        assert (one.step.step_s, one.step.exposed_s) == (row["step_s"], row["exposed_s"])
    assert [one.scheme.name for one in predictions()] == list(SCHEMES)


def test_the_tutorial_says_when_the_steps_end() -> None:
    dense, sparse = (one.step for one in predictions())
    text = (ROOT / "docs" / "tutorial" / "2-compress-ddp.md").read_text()
    said = (
        f"busy for {dense.exposed_s * 1e3:.0f} ms after the backward pass has ended at "
        f"{(dense.step_s - dense.exposed_s) * 1e3:.0f} ms, and the step ends at {dense.step_s * 1e3:.0f} ms"
    )
    assert said in text
    assert len(sparse.groups) == 5
    assert f"the step ends at {sparse.step_s * 1e3:.0f} ms]" in text


# The map.


@cache
def all_regions() -> tuple[Region, ...]:
    return tuple(regions())


def region_of(ranks: int, size: int) -> Region:
    (found,) = (one for one in all_regions() if one.ranks == ranks and one.from_bytes <= size < one.to_bytes)
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_a_column_has_each_size_once(ranks: int) -> None:
    column = [one for one in all_regions() if one.ranks == ranks]
    assert column[0].from_bytes == LEAST_BYTES
    assert column[-1].to_bytes == MOST_BYTES
    for one, above in itertools.pairwise(column):
        assert one.to_bytes == above.from_bytes
        assert one.algorithms != above.algorithms


@pytest.mark.parametrize("ranks", [2, 3, 8, 12, 16, 96, 1024])
@pytest.mark.parametrize("size", [1 << 10, 6 << 10, 48 << 10, 700 << 10, 5 << 20, 200 << 20])
def test_the_map_has_what_the_cost_functions_say(ranks: int, size: int) -> None:
    costs = network_of(MAP_NETWORK).costs
    found = region_of(ranks, size).algorithms
    assert found == winners(ranks, size)
    assert fastest_allreduce(ranks, size, costs) in found
    assert allreduce_table(ranks, costs, tolerance=TIE).algorithm(size) in found


def test_what_the_page_says_of_the_map() -> None:
    assert region_of(8, 4 << 10).algorithms == ("recursive_doubling",)
    assert region_of(8, 64 << 10).algorithms == ("rabenseifner",)
    assert region_of(8, 600 << 10).algorithms == ("ring",)
    assert region_of(8, 64 << 20).algorithms == ("rabenseifner", "ring")
    assert all("recursive_doubling" in one.algorithms for one in all_regions() if one.ranks == 2)
    alone = {
        ranks for ranks in RANKS if any(one.ranks == ranks and one.algorithms == ("ring",) for one in all_regions())
    }
    assert alone == {3, 4, 6, 8, 12}
    for ranks in RANKS[1:]:
        below = [one for one in all_regions() if one.ranks == ranks and "recursive_doubling" in one.algorithms]
        assert 1 << 10 < below[-1].to_bytes <= 10 << 10
    for ranks in (16, 96, 1024):
        both = [one for one in all_regions() if one.ranks == ranks and one.algorithms == ("rabenseifner", "ring")]
        assert both[0].from_bytes == pytest.approx(ranks * (60 << 10), rel=0.1)


def test_the_dashed_line_is_the_core_s_rule() -> None:
    source = (ROOT / "core" / "collectives" / "dense" / "choice.cpp").read_text()
    assert f"constexpr std::size_t kRingMessageBytes = {UNCALIBRATED_RING_BYTES >> 10}_KiB;" in source
    assert "bytes < kRingMessageBytes * size ? Algorithm::rabenseifner : Algorithm::ring" in source
    assert default_ring_bytes() == [ranks * UNCALIBRATED_RING_BYTES for ranks in RANKS[1:]]


# The residual.


def test_all_of_a_gradient_is_sent_or_in_the_residual() -> None:
    life = residual_life()
    np.testing.assert_allclose(np.cumsum(life.gradient), np.cumsum(life.sent) + life.residual, atol=1e-5)
    assert life.gradient.shape == (STEPS,)


def test_an_entry_is_sent_when_it_is_among_the_largest() -> None:
    life = residual_life()
    sent = life.sent != 0
    assert sent.sum() == 4, "the page says four times"
    assert (life.residual[sent] == 0).all()
    assert (np.abs(life.sent[sent]) >= life.least[sent]).all()
    assert (np.abs(life.residual[~sent]) <= life.least[~sent]).all()
    assert 0 < SENT_ENTRIES < ENTRIES
    assert life.residual.min() >= 0, "the plot begins at 0"
    assert 0.8 < life.gradient.max() < 0.9, "the page says at most 0.9"
