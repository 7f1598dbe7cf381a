"""``python -m lab redraw``: pictures of results from the rows that are committed beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab import redraw
from lab.redraw import FOLDER, draw_of, pictures
from telegrad.tools.report import figures

pytest.importorskip("matplotlib")

_app = typer.Typer()
_app.command()(redraw.command)

# One of each kind; the study of accuracy and the paper's steps take long, and share their code with these.
DRAWN = (
    "2026-11-21-faults-1000",
    "2026-11-22-accuracy-schemes",
    "2026-11-22-accuracy-schemes-time",
    "2026-11-22-linear-1gbit-p8",
    "2026-11-22-simulate-sparse-sweep",
    "2026-11-22-topk-allreduce-measured",
    "2026-11-22-topk-balancing",
    "2026-11-22-training-step",
    "2026-11-22-training-step-aluminum-2-7",
    "2026-11-22-training-step-measured-1gbit-p4",
    "2026-11-23-allreduce-p4",
    "2026-11-23-demo-1gbit-p4",
    "2026-11-23-predictions-1gbit",
    "2026-11-25-sparse-sweep-1gbit",
    "2026-11-26-advise-vgg16-1gbit",
    "2026-11-27-gpu-demo",
    "2026-11-27-gpu-overlap",
    "2026-11-27-gpu-select",
    "2026-11-27-gpu-transfers",
)


@pytest.fixture(autouse=True)
def _few_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a picture's time goes by dots, of which none says more here."""
    monkeypatch.setattr(figures, "DOTS_PER_INCH", 40)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "300"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_every_picture_of_a_result_can_be_drawn_again() -> None:
    assert len(pictures()) >= 34
    assert [name for name in pictures() if draw_of(name) is None] == []
    rows = {name.removesuffix("-time") for name in pictures()}
    assert [name for name in rows if not (FOLDER / f"{name}.json").is_file()] == []


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_drawn_from_its_rows(name: str, tmp_path: Path) -> None:
    status, output = run(name, "--folder", str(tmp_path))
    assert status == 0, output
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]
    head = (tmp_path / f"{name}.png").read_bytes()[:26]
    assert head.startswith(b"\x89PNG")
    assert head[25] == 3, "colours from a palette"
    assert f"{name}.png" in output


def test_all_pictures_of_a_folder_are_drawn_beside_their_rows(tmp_path: Path) -> None:
    names = ["2026-11-27-gpu-select", "2026-11-27-gpu-select-later"]
    for name in names:
        shutil.copy(FOLDER / f"{name}.json", tmp_path / f"{name}.json")
        (tmp_path / f"{name}.png").write_bytes(b"old")
    shutil.copy(FOLDER / "2026-11-27-gpu-select.json", tmp_path / "mine-without-a-picture.json")
    status, output = run("--rows", str(tmp_path))
    assert status == 0, output
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == names
    assert all(path.stat().st_size > 1_000 for path in tmp_path.glob("*.png"))


def test_rows_without_a_day_in_their_name_have_that_of_their_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days: list[str] = []
    monkeypatch.setitem(redraw.DRAWS, "select", lambda _data, day, _path: days.append(day))
    shutil.copy(FOLDER / "2026-11-23-select.json", tmp_path / "select.json")
    monkeypatch.setattr(redraw, "_limit_colors", lambda _path: None)
    redraw.redraw("select", tmp_path, tmp_path)
    redraw.redraw("2026-11-23-select", tmp_path)
    assert len(days) == 2
    assert days[0].startswith("2026-11-2")
    assert days[1] == "2026-11-23"


@pytest.mark.parametrize("name", ["2026-11-23-selection", "2026-11-24-select"])
def test_names_without_rows_or_picture_are_refused(name: str, tmp_path: Path) -> None:
    status, output = run("2026-11-23-select", name, "--folder", str(tmp_path))
    assert status == 2
    assert f"{name} has no rows in" in output
    assert "2026-11-23-select" in output
    assert not list(tmp_path.iterdir()), "nothing is drawn where a name is wrong"
    with pytest.raises(ValueError, match=f"{name} (is no result|has no rows)"):
        redraw.redraw(name, tmp_path)


def test_without_matplotlib_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redraw.importlib.util, "find_spec", lambda _name: None)
    status, output = run("2026-11-23-select")
    assert status == 2
    assert "pip install 'telegrad[cli]'" in output
