"""The pages on papers: every name in code spans exists, every result that is linked is there, and numbers that are
computed from results are those of the results."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import telegrad
from lab.accuracy.runs import METHODS
from lab.common import experiments
from lab.paper_steps import FIGURES, TABLES
from telegrad.communicator import reductions
from telegrad.communicator.operands import formats_named, without_sums
from telegrad.compress import SELECTIONS, BySize
from telegrad.cost import DEVICE_ALGORITHMS
from telegrad.ddp.options import COMBINE, FEEDBACK
from telegrad.synchronizer import merge
from telegrad.synchronizer.group_planning import PLANS
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.tools.cli import make_app

ROOT = Path(__file__).resolve().parents[2]
EXPLANATION = ROOT / "docs" / "explanation"
START = EXPLANATION / "papers.md"
PAPERS = sorted((EXPLANATION / "papers").glob("*.md"))
FIGURES_PAGE = ROOT / "docs" / "results" / "papers.md"
"""Has a section for each paper: our figures beside the published ones, and what is not reproduced."""
PAGES = [START, *PAPERS, FIGURES_PAGE]
RESULTS = ROOT / "benchmarks" / "results"
CODE_FOLDERS = ("core/", "src/", "lab/", "tests/", "examples/", "benchmarks/", "docs/")


def results(name: str) -> dict[str, Any]:
    found = json.loads((RESULTS / name).read_text())
    assert isinstance(found, dict)
    return found


def spans_of(text: str) -> list[str]:
    """Code spans of a page, not those of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


# What can be named


class Signatures:
    """Stands for a Communicator: a call must fit the method's signature."""

    def __getattr__(self, name: str) -> Callable[..., inspect.BoundArguments]:
        method = getattr(telegrad.Communicator, name)
        return lambda *given, **named: inspect.signature(method).bind(self, *given, **named)


NAMES: dict[str, Any] = {
    "telegrad": telegrad,
    "torch": torch,
    "merge": merge,
    "BySize": BySize,
    "comm": Signatures(),
    "x": object(),
    **{name: getattr(telegrad, name) for name in telegrad.__all__},
}
TAKE_OPTIONS: tuple[Any, ...] = (
    telegrad.Communicator.all_reduce,
    telegrad.Communicator.from_torch,
    telegrad.TopK,
    telegrad.DDPState,
    telegrad.Synchronizer,
    merge.optimal,
)
HAVE_FIELDS = (telegrad.Communicator, telegrad.SparseVector, telegrad.communicator.topk.TopkReport, MergePlan)


def parameters() -> set[str]:
    return {
        name
        for one in (*TAKE_OPTIONS, telegrad.DiLoCo, telegrad.DiLoCo.sparse, telegrad.DiLoCo.streaming)
        for name in inspect.signature(one).parameters
    }


def is_word(name: str) -> bool:
    """An argument, a field, or a choice of an experiment that a sentence names by itself."""
    row = results("2026-11-22-topk-allreduce.json")["rows"][0]
    fields = {name for one in HAVE_FIELDS for name in (*dir(one), *getattr(one, "__annotations__", ()))}
    return name in {*parameters(), *fields, *METHODS, *FIGURES, *TABLES, *row, *PLANS}


def is_choice(option: str, value: object) -> bool:
    """Whether ``value`` can be given for ``option``; numbers, ``None`` and flags only need the option."""
    if not isinstance(value, str):
        return option in parameters()
    if option in ("wire", "values"):
        formats_named(without_sums(value)[0], "f32")  # raises
        return True
    choices: dict[str, tuple[str, ...]] = {
        "algorithm": (*reductions.DENSE_DEVICE_ALGORITHMS, *reductions.SPARSE_ALGORITHMS),
        "device_algorithm": ("auto", *DEVICE_ALGORITHMS),
        "op": ("sum", "avg", "prod", "min", "max"),
        "combine": COMBINE,
        "feedback": FEEDBACK,
        "select": tuple(SELECTIONS),
        "plan": tuple(PLANS),
    }
    return option in parameters() and value in choices[option]


def check_expression(text: str) -> None:
    """A name that can be looked up, or a call that can be made."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert is_choice(str(node.arg), node.value.value), text
    for name in re.findall(r"telegrad(?:\.[a-z_]+)+", text):  # modules that nobody has imported yet
        parts = name.split(".")
        for end in range(2, len(parts) + 1):
            try:
                importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:  # what is in a module
                break
    eval(compile(tree, "span", "eval"), dict(NAMES))


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line names, and what follows its name. Raises ``AssertionError`` for none."""
    if words[:3] == ["python", "-m", "lab"]:
        name, rest = words[3], words[4:]
        assert name in experiments.experiments(), name
        return typer.main.get_command(experiments.app([name])).commands[name], rest
    command, rest = typer.main.get_command(make_app()), words[1:]
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, rest[0]
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def check_command(text: str) -> None:
    command, rest = command_of(shlex.split(text))
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= known, text
    for option, value in itertools.pairwise(rest):
        if option == "--figure":
            assert value in FIGURES | TABLES, text
        if option == "--methods":
            assert {*value.split(",")} <= METHODS.keys(), text


def check_span(span: str) -> None:
    """Raises where ``span`` names nothing of telegrad's."""
    if span.startswith(("python -m lab ", "telegrad ")):
        check_command(span)
    elif span.startswith(CODE_FOLDERS):
        assert (ROOT / span).is_file(), span
    elif span.startswith("TELEGRAD_"):
        assert any(span in path.read_text() for path in (ROOT / "src").rglob("*.py")), span
    elif re.fullmatch(r"[\w-]+", span) and span not in NAMES:
        assert is_word(span), span
    elif option := re.fullmatch(r"(\w+)=(.+)", span):
        value = option[2]
        if "(" in value:
            check_expression(value)
            assert option[1] in parameters(), span
        else:
            assert is_choice(option[1], ast.literal_eval(value)), span
    else:
        check_expression(span)


# The pages


def test_there_is_a_page_for_each_paper() -> None:
    assert [page.stem for page in PAPERS] == ["aluminum", "diloco", "mg-wfbp", "ok-topk", "redsync", "sparcml"]
    assert set(re.findall(r"\]\(papers/([\w-]+)\.md\)", START.read_text())) == {page.stem for page in PAPERS}
    for page in PAPERS:
        assert re.search("not reproduced|No figure .* was reproduced", page.read_text(), re.IGNORECASE), page


def figures_of(paper: str) -> str:
    """The section of a paper on the page of figures; the empty string without one."""
    parts = re.split(r"^## (.+)$", FIGURES_PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(map(str.lower, parts[1::2]), parts[2::2], strict=True)).get(paper, "")


def test_each_paper_with_figures_has_a_section_of_them() -> None:
    papers = {page.stem for page in PAPERS} - {"diloco"}
    for paper in papers:
        assert f"(../../results/papers.md#{paper})" in (EXPLANATION / "papers" / f"{paper}.md").read_text()
        reproduced, _, missing = figures_of(paper).partition("**Not reproduced:**")
        assert "| published |" in reproduced, paper
        assert "benchmarks/results/" in reproduced, paper
        assert "\n- " in missing, paper


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_every_code_span_names_something(page: Path) -> None:
    spans = {*spans_of(page.read_text())}
    assert spans
    for span in sorted(spans):
        try:
            check_span(span)
        except Exception as error:
            pytest.fail(f"`{span}`: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "span",
    [
        "core/collectives/sparse/halving.cpp",
        "python -m lab paper-steps --figure aluminum-12",
        "python -m lab topkk",
        "python -m lab accuracy --sweeps ranks",
        "python -m lab accuracy --methods trim",
        "telegrad linear train --coordinate 100",
        "telegrad linear fit",
        "TopK.sparcml(per_buckets=8)",
        "TopK(combine='ok-topk')",
        'algorithm="split_gather"',
        'wire="qsgd5"',
        "slack_factor=1.0",
        "comm.all_reduce(x, wires='qsgd4')",
        "telegrad.cost.way.double_trees",
        "telegrad.Momentum(1.9)",
        "least_word",
        "TELEGRAD_ENGINE_CORES",
    ],
)
def test_a_name_that_is_none_is_found(span: str) -> None:
    with pytest.raises((AssertionError, AttributeError, ImportError, NameError, TypeError, ValueError, KeyError)):
        check_span(span)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_results_that_are_linked_exist_and_have_the_date_that_is_told(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\[([^\]]+)\]\(([^)\s]*benchmarks/results/[^)\s]+)\)", text)
    assert len(links) == text.count("benchmarks/results/")
    for label, target in links:
        file = (page.parent / target).resolve()
        assert file.is_file(), target
        content = json.loads(file.read_text())
        date = content["machine"]["date"][:10] if "machine" in content else file.name[:10]
        assert date in label or re.search(rf"\b{date}\b", text), (target, date)


def test_the_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", START.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "papers.md", "exec"), {})


@pytest.mark.parametrize("page", [START, *PAPERS], ids=lambda page: str(page.stem))
def test_a_page_has_at_most_150_lines(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("DSAR_Split_allgather", 'algorithm="split_dense_allgather"'),
        ("SSAR_Split_allgather", 'algorithm="split_allgather"'),
        ("SSAR_Recursive_double", 'algorithm="recursive_doubling"'),
        ("τ′, threshold period", "TopK.oktopk(threshold_every=32)"),
        ("boundaries, τ", "TopK.oktopk(boundaries_every=64)"),
        ("host-transfer allreduce", 'algorithm="host_transfer"'),
        ("δ, κ", "switch_factor=1.0"),
        ("same sign, quantised RedSync", "same_sign=True"),
        ("SyncEASGD", 'plan="single"'),
        ("WFBP", 'plan="wfbp"'),
    ],
)
def test_words_that_people_look_for_are_on_the_start_page(word: str, option: str) -> None:
    (row,) = re.findall(rf"^\| {re.escape(word)} \|.*$", START.read_text(), flags=re.MULTILINE)
    assert f"`{option}`" in row


# Pointers from sources and documents to the papers

SECTIONS = {
    "SparCML": "1 2 2.1 2.2 3 4 5 5.1 5.2 5.3 5.3.1 5.3.2 5.3.3 6 7 8 8.1 8.2 8.3 8.4 9 10",
    "Aluminum": "I II II-A II-B II-C II-D III III-A III-B IV IV-A IV-B IV-V V V-A V-B V-B1 V-B2 V-B3 VI VI-A VI-B VII",
    "MG-WFBP": "1 2 2.1 2.2 2.3 2.4 2.5 3 4 4.1 4.2 4.3 5 5.1 5.2 5.3 6 6.1 6.2 6.3 6.3.1 6.3.2 6.4 7 8 9",
    "Ok-Topk": "1 2 3 3.1 3.1.1 3.1.2 3.1.3 3.1.4 3.2 4 4.1 5 5.1 5.2 5.3 5.4 5.4.1 5.4.2 5.4.3 6",
    "RedSync": "1 2 2.1 2.1.1 2.2 2.3 2.4 3 3.1 3.2 3.3 4 A B C",
}
"""Of the papers. "IV-V" stands for sections IV and V."""
ALGORITHMS = {"SparCML": 1, "Aluminum": 0, "MG-WFBP": 2, "Ok-Topk": 2, "RedSync": 4}
AUTHORS = {
    "Renggli": "SparCML",
    "Dryden": "Aluminum",
    "Shi, Chu, Li": "MG-WFBP",
    "Li, Hoefler": "Ok-Topk",
    "Fang": "RedSync",
}
NAMED = "|".join([*SECTIONS, *AUTHORS])
PLACE = r"(?:§[\dA-Z]+(?:[.-][\dA-Z]+)*|Algorithms? \d+)"
POINTER = re.compile(rf"({NAMED})(?:(?!{NAMED})[^§;]){{0,100}}?({PLACE}(?:(?:,| and) (?:{PLACE}|\d\b))*)")


def wrong_pointers(text: str) -> list[str]:
    """Those to a section or an algorithm that the paper has not."""
    line = re.sub(r"\s*\n\s*(?://+|#+)?\s*", " ", text)
    wrong = []
    for found in POINTER.finditer(line):
        paper = AUTHORS.get(found[1], found[1])
        sections = set(re.findall(r"§([\dA-Z.-]*[\dA-Z])", found[2]))
        algorithms = map(int, re.findall(r"(?:Algorithms?|and) (\d+)", found[2]))
        if not sections <= {*SECTIONS[paper].split()} or any(one > ALGORITHMS[paper] for one in algorithms):
            wrong.append(found[0])
    return wrong


def test_pointers_to_papers_lead_somewhere() -> None:
    folders = (ROOT / name for name in ("src", "core", "lab", "docs", "tests"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".hpp", ".md")]
    texts = {path: path.read_text() for path in files if path != Path(__file__)}
    assert sum(len(POINTER.findall(text)) for text in texts.values()) > 60
    assert {path: wrong for path, text in texts.items() if (wrong := wrong_pointers(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "Source: RedSync, §5.",
        'Source: RedSync §7 ("sampled")',
        "Renggli et al., SC 2019, Algorithm 2 and §8.3",
        "Fang et al., RedSync, JPDC 2019, §5.",
        "Renggli et al., SC 2019, Algorithm 1 and §8.5",
        "Source: SparCML §7 and §8.9 (MPI-OPT)",
        "// machine\n// learning (SparCML,\n// §5.4)",
        "Li, Hoefler, PPoPP 2022, Algorithms 1 and 3",
    ],
)
def test_a_wrong_pointer_is_found(text: str) -> None:
    assert wrong_pointers(text)
    assert not wrong_pointers("RedSync, Algorithm 4; Deep Gradient Compression, §9. Ok-Topk (Li, Hoefler, §3.1)")


# Numbers


def row_of(paper: str, begin: str) -> str:
    (row,) = (line for line in figures_of(paper).splitlines() if line.startswith(f"| {begin}"))
    return row


@pytest.mark.parametrize(
    ("begin", "model", "ranks"),
    [("Figure 8, ", "VGG-16", 32), ("Figure 10, ", "LSTM", 64), ("Figure 12, ", "BERT", 256)],
)
def test_ok_topks_weak_scaling(begin: str, model: str, ranks: int) -> None:
    rows = results("2026-11-22-topk-allreduce.json")["weak_scaling"]
    took = {one["scheme"]: one["iteration_s"] for one in rows if (one["model"], one["ranks"]) == (model, ranks)}
    own = took.pop("oktopk")
    del took["oktopk-bounded"]
    ratios = [rival / own for rival in took.values()]
    assert len(ratios) == 6
    assert f"{min(ratios):.2f}x to {max(ratios):.2f}x" in row_of("ok-topk", begin)


def test_ok_topks_deviations() -> None:
    found = results("2026-11-22-topk-allreduce.json")["training_averages"]
    told = f"{found['local_deviation']:.1%}, {found['global_deviation']:.1%}".replace("%", " %")
    assert told in row_of("ok-topk", "§5.2, local")


@pytest.mark.parametrize(("begin", "density"), [("0.01 %", 1e-4), ("0.1 %", 1e-3), ("0.78 %", 1 / 128), ("50 %", 0.5)])
def test_sparcmls_figure_3(begin: str, density: float) -> None:
    rows = results("2026-11-25-sparse-sweep-1gbit.json")["rows"]
    took = {one["name"]: one["median_s"] * 1e3 for one in rows if one["ranks"] == 8 and one["density"] == density}
    names = ("recursive_doubling", "split_allgather", "split_dense_allgather", "dense")
    told = [float(cell.replace(",", "")) for cell in row_of("sparcml", f"8 ranks, {begin}").split("|")[2:6]]
    assert told == pytest.approx([took[f"telegrad-{name}"] for name in names], rel=0.02, abs=0.05)


def rows_of_steps(figure: str, **want: object) -> Iterator[dict[str, Any]]:
    rows = results(f"2026-11-22-training-step-{figure}.json")["rows"]
    return (one for one in rows if all(one[name] == value for name, value in want.items()))


@pytest.mark.parametrize(("model", "name"), [("resnet50", "ResNet-50"), ("googlenet", "GoogleNet")])
def test_mg_wfbps_groups(model: str, name: str) -> None:
    rows = rows_of_steps("mg-wfbp-10", model=model, plan="greedy")
    told = ", ".join(str(one["groups"]) for one in rows if one["ranks"] <= 64)
    assert told in row_of("mg-wfbp", f"groups of {name}")


@pytest.mark.parametrize(
    ("begin", "model", "scheme"), [("VGG-16 |", "vgg16", "rgc"), ("LSTM, q", "lstm", "rgc-quantised")]
)
def test_redsyncs_speed_ups(begin: str, model: str, scheme: str) -> None:
    rows = [*rows_of_steps("redsync-5", model=model)]
    told = row_of("redsync", begin).split("|")[2:6]
    for ranks, cell in zip((2, 8, 32, 128), told, strict=True):
        step = {one["scheme"]: one["step_s"] for one in rows if one["ranks"] == ranks}
        assert float(cell.strip().removesuffix("x")) == pytest.approx(step["dense"] / step[scheme], rel=0.05)
