"""How advice is shown: the timeline's segments, rows for JSON, the table, the picture."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.advice import Advice, advise
from telegrad.tools.advise.sending import Cluster, PhasedWay
from telegrad.tools.advise.step import StepGroup, simulate
from telegrad.tools.advise.workload import DEVICES, of_model
from telegrad.tools.cli.advise import for_json, plot, segments_of, table_of
from telegrad.tools.sim.measure import network_of

V100 = DEVICES["v100"]


def advice_of(model: str, network: str) -> Advice:
    return advise(of_model(model, V100), Cluster(16, network_of(network).costs), V100, optimizer="sgd")


def test_segments_by_hand() -> None:
    trace = Trace(("c", "b", "a"), (4, 8, 12), (1.0, 2.0, 3.0), 10.0)
    way = PhasedWay("picked", lambda size: 1.5, lambda size: 0.25, lambda size: 0.5)
    assert segments_of(simulate(trace, [StepGroup((0,), way), StepGroup((1, 2), way)])) == [
        ("processor", "forward", 0.0, 10.0),
        ("processor", "backward", 10.0, 1.0),
        ("processor", "selecting", 11.0, 0.25),
        ("processor", "backward", 11.25, 5.0),
        ("processor", "selecting", 16.25, 0.25),
        ("network", "on the network", 11.25, 1.0),
        ("processor", "unpacking", 16.5, 0.5),
        ("network", "on the network", 16.5, 1.0),
        ("processor", "unpacking", 17.5, 0.5),
    ]


def test_a_processor_does_one_thing_at_a_time() -> None:
    for one in advice_of("resnet50", "10gbit").predictions:
        for lane in ("processor", "network"):
            parts = sorted((start_s, for_s) for where, _, start_s, for_s in segments_of(one.step) if where == lane)
            for (start_s, for_s), (next_s, _) in itertools.pairwise(parts):
                assert start_s + for_s <= next_s + 1e-9
        found = segments_of(one.step)
        passes_s = sum(for_s for _, what, _, for_s in found if what in ("forward", "backward"))
        assert passes_s == pytest.approx(one.step.compute_s)
        assert max(start_s + for_s for _, _, start_s, for_s in found) == pytest.approx(one.step.step_s)


def test_json_has_it_all() -> None:
    advice = advice_of("vgg16", "1gbit")
    found = json.loads(json.dumps(for_json(advice), allow_nan=False))
    assert found["recommended"] == advice.recommended.scheme.name
    assert found["line"] == advice.line
    assert [row["scheme"] for row in found["rows"]] == [one.scheme.name for one in advice.predictions]
    row = found["rows"][0]
    assert row["groups"][-1]["finish_s"] == row["step_s"]


def test_the_table_has_a_line_for_each_scheme() -> None:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as said:
        console.print(table_of(advice_of("resnet50", "100gbit")))
    text = said.get()
    for name in ("ddp", "optimal", "wfbp", "single", "topk", "allgather", "oktopk", "qsgd8", "qsgd4"):
        assert f" {name} " in text
    assert "16 ranks, 16 nodes" in text
    assert "1.00x" in text


def test_the_picture_shows_every_scheme_and_cuts_long_steps_off(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "drawn.svg"
    advice = advice_of("vgg16", "1gbit")
    plot(advice, "vgg16 somewhere", drawn)
    picture = drawn.read_text()
    shortest = f"{1e3 * advice.of('oktopk').step_s:.2f} ms"
    for label in ("vgg16 somewhere", "ddp", "oktopk  ✓", "8.94 s →", shortest, "unpacking", "on the network"):
        assert label in picture
