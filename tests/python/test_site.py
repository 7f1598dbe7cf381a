"""The site: it builds without a warning, fetches nothing when it is read, and its reference is complete."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PARTS = ("tutorial", "how-to", "reference", "explanation", "results")
PACKAGES = (
    "telegrad",
    "telegrad.communicator",
    "telegrad.compress",
    "telegrad.cost",
    "telegrad.ddp",
    "telegrad.launch",
    "telegrad.linear",
    "telegrad.sparse_vector",
    "telegrad.tools.sim",
    "telegrad.torch_backend",
    "telegrad.tuning",
)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def exported(package: str) -> set[str]:
    """The names in a package's ``__all__``, from its source."""
    source = ROOT / "src" / Path(*package.split(".")) / "__init__.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


def documented() -> set[str]:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    return set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    found = documented()
    whole = {name for one in PACKAGES if one in found for name in exported(one)}
    names = (
        {one.rpartition(".")[2] for one in found} | whole | {"__version__", "errors"}
    )  # the package's version; the module of its errors
    assert exported(package) - names == set(), f"add `::: {package}.NAME` to a page of docs/reference/api"


def test_an_object_is_documented_once() -> None:
    names = [one.rpartition(".")[2] for one in documented()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("part", PARTS)
def test_every_page_is_linked_from_the_index_of_its_part(part: str) -> None:
    """So that a reader finds it without the search."""
    reached: set[Path] = set()
    waiting = [DOCS / part / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.is_relative_to(DOCS / part):
            reached.add(page)
            waiting += [
                (page.parent / target).resolve() for target in LINK.findall(page.read_text()) if ".md" in target
            ]
    assert set((DOCS / part).rglob("*.md")) - reached == set()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("results/index.md", "| 10 Gbit/s Ethernet |"),
        ("how-to/adamw.md", "## With accumulation"),
        ("reference/glossary.md", "**DSAR, DSAR_Split_allgather**"),
        ("reference/glossary.md", "τ′: steps between two exact thresholds"),
        ("how-to/gpu.md", '`"host_transfer"`'),
        ("how-to/hangs.md", "telegrad report"),
        ("how-to/other-ranks.md", "reshard"),
        ("results/index.md", "## What was not tested"),
        ("reference/command-line.md", "telegrad calibrate"),
        ("how-to/linear.md", "telegrad linear train"),
    ],
)
def test_answers_are_two_clicks_from_the_start_page(page: str, said: str) -> None:
    assert said in (DOCS / page).read_text()
    reached = {DOCS / "index.md"}
    for _ in range(2):
        links = [(one.parent / target).resolve() for one in reached for target in LINK.findall(one.read_text())]
        reached |= {one for one in links if one.suffix == ".md" and one.is_file()}
    assert DOCS / page in reached


def test_pages_are_in_a_part() -> None:
    assert [page.name for page in DOCS.glob("*.md")] == ["index.md"]
    assert {page.relative_to(DOCS).parts[0] for page in DOCS.rglob("*.md")} == {"index.md", *PARTS}


def test_the_start_page_leads_to_all_parts() -> None:
    assert {f"{part}/index.md" for part in PARTS} <= set(LINK.findall((DOCS / "index.md").read_text()))


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("hooks")
    finally:
        sys.path.remove(str(DOCS))


def test_pages_stand_in_the_order_of_the_index(hooks: ModuleType) -> None:
    pages = {
        "index.md": "",
        "results/a.md": "",
        "results/b.md": "",
        "results/index.md": "[b](b.md#there) [far](../index.md)",
        "explanation/papers/one.md": "",
        "how-to/index.md": "",
    }
    assert hooks.navigation(pages) == [
        {"Start": "index.md"},
        {"How-to": ["how-to/index.md"]},
        {"Explanation": [{"Papers": ["explanation/papers/one.md"]}]},
        {"Results": ["results/index.md", "results/b.md", "results/a.md"]},
    ]


def test_links_to_the_repository_lead_to_copies(hooks: ModuleType) -> None:
    text = "[a](../../examples/ddp.py#x) [b](../../examples/slurm) [c](errors.md) [d](https://example.org/)"
    assert hooks.relinked("reference/x.md", text) == (
        "[a](../repository/examples/ddp.py.md#x) [b](../repository/examples/slurm/index.md) "
        "[c](errors.md) [d](https://example.org/)"
    )
    assert [*hooks.outside("reference/x.md", text)] == [ROOT / "examples" / "ddp.py", ROOT / "examples" / "slurm"]


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    for package in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.html")}
    assert "telegrad.DDPState" in pages["reference/api/training.html"]
    assert (tmp_path / "repository" / "examples" / "ddp.py.html").exists()
    assert "<code>--communicator</code>" in pages["reference/command-line.html"]
    loaded = (
        r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//[^"]*|<link[^>]*rel="stylesheet"[^>]*href="https?://[^"]*'
    )
    assert {name: found for name, text in pages.items() if (found := re.findall(loaded, text))} == {}


# Commands

COMMAND_LINE = (DOCS / "reference" / "command-line.md").read_text()


def commands() -> dict[str, Any]:
    """By name (``simulate allreduce``), the parsers of all commands."""
    typer = pytest.importorskip("typer")
    from telegrad.tools.cli import make_app

    found = {}
    for name, one in typer.main.get_command(make_app()).commands.items():
        inner = getattr(one, "commands", None)
        found |= {f"{name} {its}": command for its, command in inner.items()} if inner else {name: one}
    return found


def test_the_reference_has_every_command_with_all_options(hooks: ModuleType) -> None:
    text = hooks.with_options(COMMAND_LINE)
    for name, command in commands().items():
        _, found, rest = text.partition(f"\n```text\ntelegrad {name} [OPTIONS]")
        assert found, f"add <!-- options of telegrad {name} --> to docs/reference/command-line.md"
        beside = re.search(rf"^<!-- options of telegrad {name} beside telegrad ([a-z -]+) -->", COMMAND_LINE, re.M)
        listed = rest.partition("```text")[0] + (
            text.partition(f"\ntelegrad {beside[1]} [OPTIONS]")[2].partition("```text")[0] if beside else ""
        )
        options = {option for one in command.params for option in one.opts if option.startswith("--")}
        assert options
        assert {one for one in options if f"`{one}`" not in listed} == set(), name


def test_options_beside_another_commands(hooks: ModuleType) -> None:
    text = hooks.with_options("<!-- options of telegrad simulate training-step beside telegrad simulate allreduce -->")
    assert "Without `--bytes`" in text
    assert "`--alpha`" not in text


def test_a_command_that_cannot_be_imported_is_an_error(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import telegrad.tools.cli as cli

    monkeypatch.setattr(cli.make_app, "__defaults__", ((cli.Command("doctor", "telegrad.no_module", "doctor"),),))
    with pytest.raises(RuntimeError, match=r"^telegrad doctor cannot be imported here: call `make build` first$"):
        hooks.command_of("doctor")


def test_commands_that_pages_show_have_these_options() -> None:
    pages = [ROOT / "README.md", *(page for page in DOCS.rglob("*.md") if page.parent.name != "results")]
    fences = [found for page in pages for found in re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.M | re.S)]
    blocks = "\n".join(block for language, block in fences if language in ("", "sh"))
    lines = re.findall(r"^(?:\$ )?telegrad ((?:[a-z]\S* ?)+)([^\n#]*)", blocks, re.M)
    known, seen = commands(), set()
    for words, rest in lines:
        name = max((one for one in known if f"{words} ".startswith(f"{one} ")), key=len, default=None)
        assert name, f"telegrad {words} is no command"
        options = {option for one in known[name].params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z0-9-]*", words + rest)) <= options, f"telegrad {words}{rest}"
        seen.add(name)
    assert len(seen) > 10


# The launcher tells ranks about themselves by some; benchmarks take their commit from one.
_INTERNAL = {
    "TELEGRAD_COMMIT",
    "TELEGRAD_EXCHANGE",
    "TELEGRAD_LAUNCHER",
    "TELEGRAD_RANK",
    "TELEGRAD_WORLD_SIZE",
}


def test_the_environment_variables_of_the_reference_are_those_of_the_sources() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "core" / "drivers").rglob("*.cpp")]
    named = {name for path in sources for name in re.findall(r'"(TELEGRAD_[A-Z_]+)"', path.read_text())}
    page = (DOCS / "reference" / "environment.md").read_text()
    assert set(re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)) != set()
    listed = {
        name for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE) for name in re.findall(r"TELEGRAD_\w+", row)
    }
    assert listed == named - _INTERNAL


# The README: read in a minute, and its program runs.

README = (ROOT / "README.md").read_text()


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.encode()) <= 8192
    for paper in ("SparCML", "Aluminum", "MG-WFBP", "Ok-Topk", "RedSync"):
        assert paper in README


@pytest.mark.timeout(300)
def test_the_quick_start_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (program,) = re.findall(r"^```python\n(# train\.py\n.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    form = r"loss [\d.]+; sent (\d+) MB instead of (109) MB\n"
    said = re.search(r"^\$ torchrun (--nproc-per-node 2) train\.py\n" + form + "```", README, re.MULTILINE)
    assert said is not None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *said[1].split(), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = re.fullmatch(form, done.stdout)
    assert printed is not None, done.stdout
    # The algorithm, and so the bytes, depend on the costs of the way between the ranks: 1.6 MB over TCP.
    assert 1 <= int(printed[1]) <= 5, done.stdout
    assert 1 <= int(said[2]) <= 5
