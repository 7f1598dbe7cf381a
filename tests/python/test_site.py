"""The site: it builds without a warning, fetches nothing when it is read, and its reference is complete."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
    loaded = (
        r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//[^"]*|<link[^>]*rel="stylesheet"[^>]*href="https?://[^"]*'
    )
    assert {name: found for name, text in pages.items() if (found := re.findall(loaded, text))} == {}


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
    said = re.search(r"^\$ torchrun (--nproc-per-node 2) train\.py\nloss [\d.]+; (sent .+)\n```", README, re.MULTILINE)
    assert said is not None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *said[1].split(), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss [\d.]+; " + re.escape(said[2]) + "\n", done.stdout), done.stdout
