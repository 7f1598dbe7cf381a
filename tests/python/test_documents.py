"""What the documents say, as far as a machine can check it: errors, links, names of options and files, no pickle."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import telegrad

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ERRORS, SECURITY = (DOCS / "reference" / "errors.md").read_text(), (DOCS / "explanation" / "security.md").read_text()
HANGS, FAULTS = (DOCS / "how-to" / "hangs.md").read_text(), (DOCS / "results" / "faults.md").read_text()
MARKERS = "<!-- begin python -m lab errors -->", "<!-- end python -m lab errors -->"


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def error_classes() -> list[type[Exception]]:
    return [value for name, value in vars(telegrad.errors).items() if not name.startswith("_") and is_error(value)]


def is_error(value: object) -> bool:
    """Warnings have a page of their own."""
    return inspect.isclass(value) and issubclass(value, Exception) and not issubclass(value, Warning)


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_there_are_errors_to_look_for() -> None:
    assert {"PeerFailed", "NonFiniteGradient"} <= {one.__name__ for one in error_classes()}
    exported = {getattr(telegrad, name) for name in telegrad.__all__ if name[0].isupper()}
    assert set(filter(is_error, exported)) == set(error_classes())


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_has_a_section_with_its_attributes(error: type[Exception]) -> None:
    section = sections(ERRORS)[error.__name__]
    assert "**What to do.**" in section
    assert "\n```\n" in section, "a sample of its text"
    assert f"[`{error.__name__}`](#{anchor_of(error.__name__)})" in ERRORS, "a line in the table"
    owner = next(base for base in error.__mro__ if "__init__" in vars(base))
    attributes = list(inspect.signature(owner.__init__).parameters)[2:]  # type: ignore[misc]
    assert attributes
    table = sections(ERRORS)[owner.__name__]
    for name in attributes:
        assert f"\n| `{name}` |" in table
    assert owner is error or f"[{owner.__name__}](#{anchor_of(owner.__name__)})" in section


def test_the_place_for_the_measured_table() -> None:
    begin, end = (FAULTS.splitlines().index(marker) for marker in MARKERS)
    assert begin < end
    assert all(FAULTS.count(marker) == 1 for marker in MARKERS)


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def dead_links(path: Path, text: str) -> list[str]:
    """Those that lead to no file or folder, or to no heading of it. What stands in a block of code is no link."""
    dead = []
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file) if file else path
        headings = re.findall(r"^#+ (.+)$", other.read_text(), flags=re.MULTILINE) if other.suffix == ".md" else []
        if not other.exists() or (anchor and anchor not in {anchor_of(heading) for heading in headings}):
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path, path.read_text()) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One word\n")
    text = "[a](other.md#one-word) [b](other.md#two) [c](gone.json) [d](https://example.org/)\n```\nx[i](y)\n```\n"
    assert dead_links(tmp_path / "page.md", text) == ["other.md#two", "gone.json"]


@pytest.mark.parametrize("text", [ERRORS, HANGS, SECURITY], ids=["errors", "hangs", "security"])
def test_files_that_are_named_exist(text: str) -> None:
    places = (ROOT, ROOT / "src" / "telegrad")
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name and re.search(r"\.(py|cpp|md)$", name)}
    assert {name for name in named if not any((place / name).is_file() for place in places)} == set()


def test_options_of_the_report_command_exist() -> None:
    typer = pytest.importorskip("typer")
    pytest.importorskip("rich")
    from telegrad.tools.cli.report import report

    app = typer.Typer()
    app.command()(report)
    options = {text for parameter in typer.main.get_command(app).params for text in parameter.opts}
    named = set(re.findall(r"^\| `(--[a-z-]+)", sections(HANGS)["2. Read the first sentence"], flags=re.MULTILINE))
    assert named == {"--json", "--communicator"}
    assert named <= options


@pytest.mark.parametrize("name", ["timeout_s", "liveness_timeout_s", "join_timeout_s", "interface"])
def test_timeouts_that_are_named_are_arguments_with_the_defaults_that_are_told(name: str) -> None:
    default = inspect.signature(telegrad.Communicator.from_torch).parameters[name].default
    assert f"`{name}" in HANGS + SECURITY
    if default is not None:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", HANGS, flags=re.MULTILINE)
        assert f"| {default:,.0f} s |" in row


def test_what_security_says_of_ucx() -> None:
    driver = (ROOT / "core" / "drivers" / "ucx" / "ucx_driver.cpp").read_text()
    assert "UCP_FEATURE_AM | UCP_FEATURE_WAKEUP`" in SECURITY
    assert "params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;" in driver
    transport = ROOT / "core" / "transport"
    assert "kReasonMost = 2048" in (transport / "driver.hpp").read_text()
    assert "kCallsMost = 32" in (transport / "driver.hpp").read_text()
    assert "sizeof(Envelope) == 72" in (transport / "envelope.hpp").read_text()
    assert "sizeof(Call) == 40" in (transport / "envelope.hpp").read_text()


def enumerators(header: str, name: str) -> dict[str, str]:
    """By name, the numbers of an enumeration in a header of the core."""
    (body,) = re.findall(rf"enum class {name} : std::uint8_t {{(.*?)}};", header, flags=re.DOTALL)
    return dict(re.findall(r"(\w+) = (\d+)", re.sub(r"//.*", "", body)))


def test_the_wire_format_has_the_numbers_of_the_core() -> None:
    page, core = (DOCS / "reference" / "wire-format.md").read_text(), ROOT / "core"
    envelope, wire = (core / "transport" / "envelope.hpp").read_text(), (core / "codec" / "wire.hpp").read_text()
    types = (core / "base" / "types.hpp").read_text()
    for constant, said in [("kWireVersion", "wire version (now {})"), ("kVectorVersion", "the version (now {})")]:
        (number,) = re.findall(rf"{constant} = (\w+);", envelope + wire)
        assert said.format(number) in page
    assert "kVectorMagic = 0x534754U" in wire
    assert "`0x534754`" in page
    others = {"receive": "recv", "automatic": "auto", "boolean": "bool"}
    rows = {"operation": (envelope, "Operation"), "algorithm": (envelope, "Algorithm"), "dtype": (types, "DType")}
    rows |= {"reduction": (types, "Reduction"), "kind": (wire, "VectorKind"), "index_format": (wire, "IndexFormat")}
    for field, (header, name) in rows.items():
        row = next(line for line in page.splitlines() if f"| `{field}` |" in line and re.search(r"\| \d \w", line))
        said = dict(re.findall(r"(\d+) ([a-z]\w*(?: allreduce| allgather| reduce_scatter)?)", row))
        found = enumerators(header, name)
        assert found
        for one, number in found.items():
            expected = others.get(one, one)
            assert said[number].replace(" ", "_") == expected, field
    encodings = enumerators(types, "ValueEncoding")
    table = page.partition("### Encoded values")[2].partition("###")[0]
    listed: dict[str, str] = {}
    for numbers, names in re.findall(r"^\| ([\d, ]+) \| ([\w, ]+) \|", table, flags=re.MULTILINE):
        listed |= dict(zip(names.split(", "), numbers.split(", "), strict=True))
    assert listed == encodings


SIZES = {"uint8_t": 1, "uint32_t": 4, "uint64_t": 8, "double": 8, "Rank": 4, "Step": 4, "Call": 40}
SIZES |= dict.fromkeys(("Operation", "DType", "Reduction", "Algorithm", "VectorKind", "IndexFormat"), 1)
SIZES |= {"ValueEncoding": 1, "array<std::uint8_t, 3>": 3}


def fields_of(header: str, name: str) -> dict[str, tuple[int, int]]:
    """By name, the first and the last byte of each field of a struct in a header of the core."""
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", header, flags=re.DOTALL | re.MULTILINE)
    found, at = {}, 0
    for kind, field in re.findall(r"^  (?:std::)?([\w:<>, ]+?) (\w+)(?: = [^;]+|{})?;", body, flags=re.MULTILINE):
        found[field] = at, at + SIZES[kind] - 1
        at += SIZES[kind]
    return found


@pytest.mark.parametrize(
    ("file", "struct", "size"),
    [
        ("transport/envelope.hpp", "Envelope", 72),
        ("transport/envelope.hpp", "Call", 40),
        ("codec/wire.hpp", "VectorHeader", 32),
    ],
)
def test_the_wire_format_has_the_fields_of_the_core(file: str, struct: str, size: int) -> None:
    page = (DOCS / "reference" / "wire-format.md").read_text()
    fields = fields_of((ROOT / "core" / file).read_text(), struct)
    assert max(last for _, last in fields.values()) == size - 1
    for field, (first, last) in fields.items():
        if field in ("reserved", "end"):  # "end" shares the row of "begin"
            continue
        if field == "begin":
            last = fields["end"][1]
        at = str(first) if first == last else f"{first}–{last}"
        assert f"| {at} | `{field}`" in page, field


# No pickle

_FORBIDDEN_MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib"}


def readers_of_pickles(source: str) -> Iterator[str]:
    """Everything in a source that could turn bytes into code, as far as names tell."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.partition(".")[0] in _FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            if module.partition(".")[0] in _FORBIDDEN_MODULES | {"pickle", "_pickle"}:
                yield f"from {module}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"}:
                yield name
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                yield node.func.id
            yield from (str(one.arg) for one in node.keywords if one.arg == "allow_pickle")


def imports_pickle(source: str) -> bool:
    imported = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Import))
    return any(name.name in {"pickle", "_pickle"} for one in imported for name in one.names)


def test_no_pickle_is_read_or_written() -> None:
    package = ROOT / "src" / "telegrad"
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    found = {name: list(readers_of_pickles(source)) for name, source in sources.items()}
    assert {name: readers for name, readers in found.items() if readers} == {}
    assert {name for name, source in sources.items() if imports_pickle(source)} == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "from pickle import dump",
        "import pickle\nclass A(pickle.Unpickler): ...",
        "import shelve",
        "torch.load(f)",
        "numpy.load(f, allow_pickle=True)",
        "eval('1')",
    ],
)
def test_the_reader_of_sources(source: str) -> None:
    assert list(readers_of_pickles(source))
    assert not list(readers_of_pickles("import pickle\npickle.dump(1, f)\njson.load(f)"))


def imports_of(text: str) -> list[str]:
    """The statements of a page's Python examples that import something of telegrad."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        try:
            tree = ast.parse(block)
        except SyntaxError:  # a part of a program
            continue
        for node in ast.walk(tree):
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in getattr(node, "names", [])]
            )
            if isinstance(node, (ast.Import, ast.ImportFrom)) and any(str(one).startswith("telegrad") for one in names):
                found.append(ast.unparse(node))
    return found


STATEMENTS = sorted({one for page in PAGES for one in imports_of(page.read_text())})


@pytest.mark.parametrize("statement", STATEMENTS)
def test_examples_import_what_is_there(statement: str) -> None:
    assert len(STATEMENTS) > 10
    exec(statement, {})
