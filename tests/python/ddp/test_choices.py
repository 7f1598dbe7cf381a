"""Choices that train worse than they need to are told once, on rank 0, with the remedy; right ones, and what is only
perhaps wrong, are not."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import choices_program
import pytest
import torch

import telegrad
from telegrad import ChoiceWarning, Communicator, Warmup
from telegrad.compress import Compressor
from telegrad.ddp import choices
from telegrad.launch import Ranks

RANKS = 2
HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
Reports = list[dict[str, Any]]


def _ranks(function: str, folder: Path, lines: list[list[str]], **environment: str) -> Ranks:
    path = os.pathsep.join([str(HERE), *sys.path])
    return Ranks(
        function,
        RANKS,
        arguments=[f"file://{folder / 'store'}"],
        environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        on_line=lambda rank, line: lines[rank].append(line.rstrip()),
        timeout_s=240,
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank was told in each scenario; all of one job, since importing torch is slow."""
    lines: list[list[str]] = [[] for _ in range(RANKS)]
    failure = ""
    with _ranks("choices_program:run_all", tmp_path_factory.mktemp("job"), lines) as ranks:
        try:
            ranks.wait()
        except Exception as error:
            failure = str(error)
    split = [dict(line.split(" ", 1) for line in said if re.match(r"\w+ [\[\"]", line)) for said in lines]
    return [{"-": failure, **{name: json.loads(said) for name, said in of_rank.items()}} for of_rank in split]


@pytest.mark.ranks("torch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", [one.__name__ for one in choices_program.WRONG])
def test_a_wrong_choice_is_told_once_on_rank_0(reports: Reports, scenario: str) -> None:
    (text,) = (text for one, text in choices_program.WRONG.items() if one.__name__ == scenario)
    said = [of_rank.get(scenario, of_rank["-"]) for of_rank in reports]
    assert [len(said[0]), said[1]] == [1, []], said
    assert said[0][0].startswith(text)
    assert ". " not in said[0][0], "one sentence"
    assert re.search(r"=|wrap it once|leave (it )?out|load_state_dict\(\)", said[0][0].partition(": ")[2]), (
        "with the remedy"
    )
    assert len(said[0][0]) < 300


@pytest.mark.ranks("torch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", [one.__name__ for one in choices_program.RIGHT])
def test_a_right_choice_is_not(reports: Reports, scenario: str) -> None:
    assert [of_rank.get(scenario, of_rank["-"]) for of_rank in reports] == [[], []]


@pytest.mark.ranks("torch")
def test_all_of_them_can_be_silenced(tmp_path: Path) -> None:
    lines: list[list[str]] = [[] for _ in range(RANKS)]
    with _ranks("choices_program:run_some", tmp_path, lines, TELEGRAD_WARN="0") as ranks:
        ranks.wait()
    assert lines == [["0 told"], ["0 told"]]


def test_the_table_has_each_of_them() -> None:
    page = (DOCS / "how-to" / "choose-what-is-sent.md").read_text()
    for name in (
        "AdamW",
        "momentum",
        "clip_grad_norm_",
        "clip_norm",
        "load_state_dict",
        "density",
        "DistributedDataParallel",
    ):
        assert name in page.partition("## Warnings")[2], name
    assert "TELEGRAD_WARN=0" in page


@pytest.fixture
def _anew() -> Any:
    choices._told.clear()
    yield
    choices._told.clear()


@pytest.mark.usefixtures("_anew")
def test_of_other_ranks_and_of_what_was_said_nothing_is_said() -> None:
    with pytest.warns(ChoiceWarning, match="^a$"):
        choices.tell("one", "a", rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choices.tell("one", "a", rank=0)
        choices.tell("two", "a", rank=1)
    with pytest.warns(ChoiceWarning, match="^b$"):
        choices.tell("two", "b", rank=0)


def test_users_can_filter_them() -> None:
    assert issubclass(telegrad.ChoiceWarning, UserWarning)
    assert telegrad.errors.ChoiceWarning is telegrad.ChoiceWarning


@pytest.mark.parametrize("steps", [0.1, 0.5])
def test_a_share_of_the_steps_is_refused_with_the_remedy(steps: float) -> None:
    with pytest.raises(
        TypeError, match=rf"steps={steps} must be an int.*Warmup\(steps=int\({steps} \* total_steps\)\)"
    ):
        Warmup(steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1.0, 500.0])
def test_a_number_of_steps_that_is_no_int_is_refused(steps: float) -> None:
    with pytest.raises(TypeError, match=rf"steps={steps} must be an int"):
        Warmup(steps=steps)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_anew")
@pytest.mark.parametrize(
    ("saved", "earlier", "config", "said"),
    [
        ({"density": 0.1}, {}, {}, r"density=0.1, .* density=0.2: give compress=telegrad.TopK\(density=0.1\)"),
        ({}, {}, {}, r"density=0.1, .* density=0.2: give compress=telegrad.TopK\(density=0.1\)"),
        ({"density": 0.01}, {"policy": "BySize()"}, {}, r"density=0.1, .* density=0.2: give the policy="),
        ({"density": 0.1}, {}, {"policy": "BySize()"}, r"density=0.1, .* density=0.2: give the policy="),
        ({"density": 0.2}, {"warmup": "falling"}, {}, None),
        ({"density": 0.2}, {}, {"warmup": "falling"}, None),
        ({"density": 0.1}, {"warmup": "falling"}, {"warmup": "falling"}, r"density=0.1, .* density=0.2"),
    ],
)
def test_another_density(saved: Any, earlier: Any, config: Any, said: str | None) -> None:
    compressor = Compressor({"a": 100, "b": 300}, density=0.2)
    parameters = {"a": {"k": 10}, "b": {"k": 30}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = {"compressor": {"parameters": parameters, **saved}, "config": earlier}
        choices.tell_of_density(state, compressor, config, rank=0)
    assert len(told) == (said is not None)
    assert said is None or re.search(said, str(told[0].message))


@pytest.mark.usefixtures("_anew")
def test_an_optimizer_that_keeps_its_state_elsewhere(local: Callable[..., list[Communicator]]) -> None:
    class AdamElsewhere(choices_program.Adam8bit):
        state = None  # type: ignore[assignment]

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            del self.__dict__["state"]

    (comm,) = local(1)
    net = torch.nn.Linear(100, 100)
    sync = telegrad.Synchronizer(net, comm, compress=telegrad.TopK(0.01), plan="fixed")
    optimizer = AdamElsewhere(net.parameters())
    net(torch.ones(1, 100)).sum().backward()
    with pytest.warns(ChoiceWarning, match="AdamElsewhere takes its first steps on sparse averages"):
        optimizer.step()
    sync.close()


@pytest.mark.usefixtures("_anew")
def test_what_is_over_costs_nothing(local: Callable[..., list[Communicator]]) -> None:
    """After the first steps the watch looks at no gradient."""
    looked: list[torch.Tensor] = []
    (comm,) = local(1)
    net = torch.nn.Linear(100, 100)
    sync = telegrad.Synchronizer(net, comm, compress=telegrad.TopK(0.01), plan="fixed")
    watch = sync._compression._choices  # type: ignore[union-attr]
    assert watch is not None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        sample = choices._Sample.of
        patch.setattr(choices._Sample, "of", lambda one: looked.append(one) or sample(one))
        for _ in range(2 * choices._STEPS):
            optimizer.zero_grad()
            net(torch.ones(1, 100)).sum().backward()
            optimizer.step()
    assert len(looked) == choices._STEPS
    assert watch.is_over
    sync.close()
