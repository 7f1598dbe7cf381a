"""Which runs a study has, and what they are called."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lab.accuracy.runs import DENSE, METHODS, TASKS, Method, Run, default_of
from lab.accuracy.study import Study, in_order
from telegrad import Momentum, OkTopk, TopK, Warmup
from telegrad.compress import SELECTIONS

RUN = Run("vgg", "topk", 0.01, 0, 300, 64, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"batch": 0}, "batch=0"),
        ({"ranks": -1}, "ranks=-1"),
        ({"evaluations": 0}, "evaluations=0"),
        ({"batch": 66}, "batch=66 must be a multiple of ranks=4"),
        ({"task": "vg"}, "task='vg' does not exist: use one of vgg, "),
        ({"method": "x"}, "method='x' does not exist: use one of dense, "),
        ({"size": "huge"}, "size='huge' does not exist: use one of small, large"),
        ({"density": 0.0}, "density=0.0 must be above 0"),
        ({"density": 1.5}, "density=1.5"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"rate": 0.0}, "rate=0.0 must be a finite number above 0"),
    ],
)
def test_runs_that_cannot_be_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(RUN, **changes)
    assert said in str(caught.value)


def test_a_name_says_what_differs() -> None:
    others = [
        dataclasses.replace(RUN, **change)
        for change in ({"seed": 1}, {"density": 0.001}, {"steps": 301}, {"evaluations": 3}, {"device": "cuda"})
    ]
    assert len({run.name for run in [RUN, *others]}) == 6
    assert RUN.name.startswith("vgg-topk-1%-b64-p4-seed0-")
    assert Run.from_dict(json.loads(RUN.to_json())).name == RUN.name


def test_a_run_at_the_usual_rate_is_called_as_before_there_were_rates() -> None:
    assert "rate" not in json.loads(RUN.to_json())
    other = dataclasses.replace(RUN, rate=0.5)
    assert other.name.startswith("vgg-topk-1%-0.5x-b64-p4-seed0-")
    assert Run.from_dict(json.loads(other.to_json())) == other
    assert other.learning_rate_at(20) == 0.5 * RUN.learning_rate_at(20)


def test_rates_are_compared_with_the_first_seed_and_the_others_have_the_best() -> None:
    study = Study(("lstm-words",), (DENSE, "topk"), seeds=2, all_seeds=True, sweeps=(), rates=(0.5, 1.0, 2.0))
    best = {("lstm-words", "topk", 0.01): 2.0, ("lstm-words", DENSE, 1.0): 1.0}
    runs = study.parts(best)["methods"]
    assert [(run.method, run.seed, run.rate) for run in runs] == [
        (method, *one)
        for method, best in ((DENSE, 1.0), ("topk", 2.0))
        for one in ((0, 0.5), (0, 1.0), (0, 2.0), (1, best))
    ]
    assert len(study.parts()["methods"]) == len(runs)


def test_a_large_study_evaluates_less_often_and_may_have_judged_densities_alone() -> None:
    runs = Study(("lstm-words",), ("reused",), seeds=1, sweeps=(), size="large", judged_only=True).parts()["methods"]
    assert [(run.density, run.evaluations, run.size) for run in runs] == [(0.01, 6, "large")]


def test_evaluations_are_even_and_end_with_the_last_step() -> None:
    assert sorted(RUN.evaluation_steps()) == list(range(25, 301, 25))
    assert sorted(dataclasses.replace(RUN, steps=5).evaluation_steps()) == [1, 2, 3, 4, 5]


def test_what_is_judged_has_all_seeds_and_the_others_one() -> None:
    runs = Study(seeds=3).parts()["methods"]
    assert len(runs) == len(set(runs))
    for name, task in TASKS.items():
        for method in METHODS.values():
            found = [run for run in runs if (run.task, run.method) == (name, method.name)]
            if not method.fits(task):
                assert found == []
                continue
            reference = method.name in (DENSE, default_of(task))
            for density in (0.01, 0.001) if method.sparse else (1.0,):
                judged = density == (0.001 if task.judged_by == "accuracy" else 0.01) or not method.sparse
                seeds = (3 if judged else 1) if reference else int(judged)
                assert sorted(run.seed for run in found if run.density == density) == list(range(seeds))
            assert {(run.batch, run.steps, run.ranks) for run in found} == {(task.batch, 3000, 4)}


def test_all_methods_have_all_seeds_where_that_is_asked_one_seed_after_the_other() -> None:
    parts = Study(("vgg", "lstm"), (DENSE, "reused", "oktopk"), seeds=3, all_seeds=True, sweeps=()).parts()
    of_oktopk = [(run.task, run.density, run.seed) for run in parts["methods"] if run.method == "oktopk"]
    assert of_oktopk == [("vgg", 0.001, seed) for seed in range(3)] + [("lstm", 0.01, seed) for seed in range(3)]
    assert sum(run.method == "reused" and run.seed > 0 for run in parts["methods"]) == 4
    seeds = [run.seed for run in in_order(parts)]
    assert seeds == sorted(seeds)


def test_all_methods_have_the_densities_that_are_given_where_no_judged_one_is_among_them() -> None:
    runs = Study(("vgg",), ("topk",), densities=(0.05, 0.02), sweeps=()).parts()["methods"]
    assert [(run.density, run.seed) for run in runs] == [(0.05, 0), (0.02, 0)]


def test_sweeps() -> None:
    parts = Study(("gpt",), densities=(0.01,), steps=1000).parts()
    batch, ranks = parts["batch"], parts["ranks"]
    assert {(run.task, run.ranks, run.steps) for run in batch} == {("vgg", 4, 125)}
    assert [run.batch for run in batch if run.method == DENSE] == [128, 256, 512, 1024, 2048]
    assert [run.batch for run in batch if run.method == "reused"] == [128, 256, 512, 1024, 2048]
    both = Study().parts()
    assert {run.density for run in both["batch"] if run.method == "reused"} == {0.001}
    assert {run.density for run in both["ranks"]} == {0.01, 0.001}
    assert [(run.method, run.ranks, run.batch, run.steps) for run in ranks] == [
        ("reused", count, 16 * count, 100) for count in (2, 4, 8, 16, 32)
    ]
    assert set(Study(sweeps=()).parts()) == {"methods"}
    assert Study(methods=("topk",)).parts()["ranks"] == []


def test_an_early_end_leaves_the_most() -> None:
    parts = Study(seeds=2).parts()
    runs = in_order(parts)
    assert len(runs) == len(set(runs)) == sum(map(len, parts.values()))
    assert {run.seed for run in Study(densities=(0.05,), seeds=2).parts()["methods"] if run.method == "reused"} == {
        0,
        1,
    }
    first = runs[: len(TASKS) * 3]
    assert {(run.task, run.method, run.density, run.seed) for run in first} == {
        (task, method, density, 0)
        for task in TASKS
        for method, density in ((DENSE, 1.0), (default_of(TASKS[task]), 0.01), (default_of(TASKS[task]), 0.001))
    }
    assert all(run.seed == 1 for run in runs[-2 * len(TASKS) :])


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_the_document_has_every_method(method: Method) -> None:
    document = (Path(__file__).resolve().parents[3] / "docs" / "results" / "accuracy.md").read_text()
    assert f"\n| `{method.name}` | {method.about} |\n" in document


def test_the_document_has_every_task() -> None:
    document = (Path(__file__).resolve().parents[3] / "docs" / "results" / "accuracy.md").read_text()
    assert all(f"\n| `{name}` | " in document for name in TASKS)


def test_what_a_method_tells_ddp_state() -> None:
    def told(method: Method, task: str = "vgg") -> dict[str, object]:
        return method.arguments(TASKS[task], density=0.02, steps=300, optimizer="the optimizer")

    assert told(METHODS[DENSE]) == told(METHODS[DENSE], "gpt") == {"compress": None}
    few = TopK(0.02)
    assert told(METHODS["topk"]) == {"compress": TopK(0.02, "topk")}
    assert told(METHODS["reused"]) == told(METHODS["cold"], "gpt") == {"compress": few}
    of_paper = dataclasses.replace(TopK.oktopk(0.02), combine="oktopk")
    assert told(METHODS["oktopk-steps"]) == {"compress": of_paper, "optimizer": "the optimizer"}
    assert OkTopk() == TopK.oktopk().combine
    assert told(METHODS["reused"], "gpt") == {"compress": few, "warmup": Warmup(30)}
    assert told(METHODS["falling"], "gpt") == {"compress": few, "warmup": Warmup(30, "falling")}
    assert told(METHODS["steps"]) == {"compress": TopK(0.02, feedback="steps"), "optimizer": "the optimizer"}
    assert told(METHODS["momentum"], "vgg-momentum") == {
        "compress": few,
        "warmup": Warmup(30),
        "momentum": Momentum(0.9),
        "optimizer": "the optimizer",
    }
    assert told(METHODS["reused"], "lstm-words") == {"compress": few, "clip_norm": 1.0}
    assert told(METHODS[DENSE], "lstm-words") == {"compress": None}  # whose averages are clipped
    assert told(METHODS["momentum"], "resnet18")["momentum"] == Momentum(0.9, nesterov=True)
    assert told(METHODS["unmasked"], "vgg-momentum")["momentum"] == Momentum(0.9, masking=False)
    assert "warmup" not in told(METHODS["cold-momentum"], "vgg-momentum")


def test_which_methods_fit() -> None:
    def fitting(task: str) -> set[str]:
        return {method.name for method in METHODS.values() if method.fits(TASKS[task])}

    everywhere = {name for name, method in METHODS.items() if method.needs is None}
    assert everywhere >= {DENSE, "reused", "topk"}
    assert fitting("vgg") == fitting("resnet") == fitting("lstm") == everywhere | {"steps", "oktopk-steps"}
    assert fitting("gpt") == everywhere | {"cold", "falling"}
    assert fitting("vgg-momentum") == {
        *(DENSE, "reused", "momentum", "unmasked", "cold-momentum"),
        *(name for name in METHODS if name.startswith(("lowrank", "fp16", "powersgd"))),
    }
    assert {default_of(task) for task in TASKS.values()} == {"reused", "momentum"}
    assert set(SELECTIONS) <= {method.options.get("select") for method in METHODS.values()}
