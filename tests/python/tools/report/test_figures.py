"""The style of all pictures: names that do not overlap, looks that tell lines apart, and widths that fit a page."""

from __future__ import annotations

import itertools
import random
import re
import struct
from pathlib import Path

import pytest

from telegrad.tools.report.figures import (
    COLORS,
    Panel,
    Timeline,
    dated,
    draw,
    draw_timelines,
    grid_of,
    ink_of,
    looks_of,
    merged,
    name_lines,
    names_of,
    picture,
    spread,
)

ROOT = Path(__file__).resolve().parents[4]
PICTURES = sorted([*ROOT.glob("docs/**/*.png"), *ROOT.glob("benchmarks/results/*.png")])
WIDEST = 1600


def width_of(file: Path) -> int:
    """Of a PNG, as its header says."""
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int(struct.unpack(">I", head[16:20])[0])


@pytest.mark.parametrize("file", PICTURES, ids=[file.stem for file in PICTURES])
def test_pictures_are_no_wider_than_a_page_shows(file: Path) -> None:
    assert width_of(file) <= WIDEST


def test_there_are_pictures() -> None:
    assert len(PICTURES) > 30


def overlaps(middles: list[float], sizes: list[float]) -> list[tuple[float, float]]:
    spans = sorted((middle - size / 2, middle + size / 2) for middle, size in zip(middles, sizes, strict=True))
    return [(a[1], b[0]) for a, b in itertools.pairwise(spans) if b[0] < a[1] - 1e-9]


@pytest.mark.parametrize(
    ("wanted", "sizes", "expected"),
    [
        ([], [], []),
        ([5.0], [2.0], [5.0]),
        ([2.0, 8.0], [2.0, 2.0], [2.0, 8.0]),
        ([5.0, 5.0], [2.0, 2.0], [4.0, 6.0]),
        ([0.0, 10.0], [2.0, 2.0], [1.0, 9.0]),
        ([0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [1.0, 3.0, 5.0]),
        ([10.0, 9.5], [2.0, 4.0], [9.0, 6.0]),
        ([4.0, 5.0, 7.5], [2.0, 2.0, 2.0], [3.5, 5.5, 7.5]),
        ([5.0] * 6, [2.0] * 6, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
    ],
    ids=["none", "one", "apart", "alike", "at the ends", "at the bottom", "unlike", "two of three", "too many"],
)
def test_labels_by_hand(wanted: list[float], sizes: list[float], expected: list[float]) -> None:
    assert spread(wanted, sizes, 0.0, 10.0) == pytest.approx(expected)


def test_labels_never_overlap_and_keep_their_order() -> None:
    dice = random.Random(1)
    for _ in range(500):
        count = dice.randrange(1, 12)
        wanted = [dice.choice((dice.uniform(0, 100), 50.0, dice.gauss(30, 3))) for _ in range(count)]
        sizes = [dice.choice((5.0, 5.0, 8.0)) for _ in range(count)]
        found = spread(wanted, sizes, 0.0, 100.0)
        assert not overlaps(found, sizes), (wanted, sizes)
        in_order = sorted(range(count), key=lambda at: wanted[at])
        assert [found[at] for at in in_order] == sorted(found)
        assert all(size / 2 - 1e-9 <= at <= 100 - size / 2 + 1e-9 for at, size in zip(found, sizes, strict=True))
        if not overlaps(wanted, sizes) and all(s / 2 <= w <= 100 - s / 2 for w, s in zip(wanted, sizes, strict=True)):
            assert found == pytest.approx(wanted)


def test_curves_that_lie_on_each_other_are_one() -> None:
    curves = {
        "low": [(2.0, 1.0), (1.0, 1.0)],
        "high": [(1.0, 100.0), (2.0, 200.0)],
        "as low": [(1.0, 1.01), (2.0, 0.99)],
        "elsewhere": [(1.0, 1.0), (3.0, 1.0)],
        "near at one end": [(1.0, 1.0), (2.0, 1.5)],
    }
    assert merged(curves) == {
        ("low", "as low"): [(1.0, 1.0), (2.0, 1.0)],
        ("high",): [(1.0, 100.0), (2.0, 200.0)],
        ("elsewhere",): [(1.0, 1.0), (3.0, 1.0)],
        ("near at one end",): [(1.0, 1.0), (2.0, 1.5)],
    }
    assert merged({}) == {}
    assert list(merged({"none": [], "nor here": []})) == [("none",), ("nor here",)]
    assert list(merged({"a": [(1.0, 0.0)], "b": [(1.0, 0.0)]})) == [("a", "b")]


def test_no_two_looks_are_alike_and_an_algorithm_keeps_its_color() -> None:
    names = ["ring", "auto", "Gloo", "something", "oktopk 1 %", "oktopk 0.1 %", "bound of qsgd4", "qsgd4"]
    looks = looks_of(names)
    assert list(looks) == names
    assert len({(look.color, look.dashes) for look in looks.values()}) == len(names)
    alone = {name: looks_of([name])[name].color for name in names if name != "something"}
    assert {name: looks[name].color for name in alone} == alone
    assert looks_of(["telegrad-ring"])["telegrad-ring"] == looks_of(["ring"])["ring"]
    assert alone["oktopk 1 %"] == alone["oktopk 0.1 %"]
    assert alone["bound of qsgd4"] == alone["qsgd4"]
    assert looks_of(["gloo-dense"])["gloo-dense"] == looks_of(["ddp-gloo"])["ddp-gloo"] == looks_of(["Gloo"])["Gloo"]
    assert looks_of([]) == {}


def test_the_word_that_differs_most_gives_the_color() -> None:
    looks = looks_of([f"{where}, {plan}" for where in ("ring", "elsewhere") for plan in ("wfbp", "single", "greedy")])
    assert looks["ring, single"].color == looks["elsewhere, single"].color == looks_of(["single"])["single"].color
    assert looks["ring, single"].dashes != looks["elsewhere, single"].dashes


def test_more_names_than_colors_have_dashes() -> None:
    looks = looks_of([f"name {number}" for number in range(30)])
    assert len({(look.color, look.dashes) for look in looks.values()}) == 30


def test_ink_is_dark_enough_for_text() -> None:
    for color in COLORS:
        red, green, blue = (int(ink_of(color)[at : at + 2], 16) / 255 for at in (1, 3, 5))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue <= 0.45


def test_a_title_has_its_day() -> None:
    assert dated("steps", "2026-11-28") == "steps; 2026-11-28"
    assert re.fullmatch(r"steps; \d{4}-\d\d-\d\d", dated("steps"))


def test_names_in_a_picture_do_not_overlap_and_stay_within_their_axes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with picture(tmp_path / "drawn.png", "a long title " * 12, height=6) as figure:
        above, below = grid_of(figure, 2, 1)
        for place in range(9):
            above.plot([1, 2, 3], [1, 2, 3 + place / 100], label=f"_line {place}")
        above.plot([1, 3], [1, 1])
        above.plot([1, 2], [2, float("nan")], label="ends early $")
        below.plot([1, 2], [1, 5], label="leaves\nthe axes")
        below.set_ylim(0, 2)
        for axes in (above, below):
            name_lines(axes)
    assert width_of(tmp_path / "drawn.png") == WIDEST
    assert [len(names_of(axes)) for axes in (above, below)] == [10, 1]
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    box = above.get_window_extent(renderer)
    from matplotlib.text import Text

    spans = [Text.get_window_extent(name, renderer) for name in names_of(above)]
    assert not overlaps([(one.y0 + one.y1) / 2 for one in spans], [one.height for one in spans])
    assert min(one.y0 for one in spans) >= box.y0 - 1
    assert max(one.y1 for one in spans) <= box.y1 + 1
    assert max(one.x1 for one in spans) <= figure.bbox.x1, "all text is on the picture"
    assert names_of(below)[0].xy == (1, 1)


@pytest.mark.parametrize("levels", [{}, {"dense": 1.0}])
def test_panels_of_curves(tmp_path: Path, levels: dict[str, float]) -> None:
    pytest.importorskip("matplotlib")
    curves = {"ring": [(4.0, 1e-5), (1 << 20, 1e-2)], "auto": [(4.0, 1e-5), (1 << 20, 1e-2)], "Gloo": [(4.0, 1e-3)]}
    panels = [Panel("bytes", "shm", curves, levels, base=2), Panel("density", "tcp", {"ring": [(0.1, 0.0)]})]
    draw(panels, "times", tmp_path / "drawn.svg")
    text = (tmp_path / "drawn.svg").read_text()
    for label in ("shm", "tcp", "ring", "Gloo", "1 MiB", "10 µs", "size of the vector", *levels):
        assert f"<!-- {label} -->" in text or f"<!-- {label},\nauto -->" in text, label


def test_timelines_are_named_by_lane_and_cut_where_they_are_long(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    short = Timeline(
        "short", [("processor", "forward", 0.0, 0.1), ("network", "on the network", 0.05, 0.1)], 0.15, True
    )
    long = Timeline("long", [("network", "on the network", 0.0, 2.0), ("processor", "backward", 1.9, 0.1)], 2.0)
    draw_timelines([long, short], 0.1, "steps", tmp_path / "drawn.svg")
    text = (tmp_path / "drawn.svg").read_text()
    for label in ("short  ✓: processor", "long: processor", "network", "150.00 ms", "2.00 s →", "forward", "backward"):
        assert f"<!-- {label} -->" in text, label
    assert text.index("short  ✓: processor") < text.index("long: processor")
    assert "unpacking" not in text, "the key has what is drawn"
