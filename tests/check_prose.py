"""Checks the sentences of README, docs, changes, public docstrings and error texts. ``make lint`` calls it.

``python tests/check_prose.py`` prints the faults of each file that has more than ``prose_limits.toml`` allows; with
names of files it prints all of theirs. ``--update`` lowers the limits to what is left. No limit may rise, and a file
without a limit may have no fault: rewrite a page when you touch it.

A fault is a sentence that is longer than its kind of page allows, that begins as no sentence should, or that has a word
for which the glossary (docs/reference/glossary.md) or the field has another; and a page whose sentences are too long on
average.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Path(__file__).with_name("prose_limits.toml")


@dataclass(frozen=True)
class Kind:
    """``longest``: words of a sentence. ``mean``: of all sentences of a page; ``None``: any."""

    longest: int
    mean: float | None = None


KINDS = {
    "README.md": Kind(30, 18),
    "docs/index.md": Kind(28, 16),
    "docs/tutorial/": Kind(28, 16),
    "docs/how-to/": Kind(28, 16),
    "docs/explanation/": Kind(30, 20),
    "": Kind(30),  # reference, results, changes, docstrings, error texts
}
OPENINGS = ("What", "Who", "Where", "Of")
"""They begin clauses without a subject, as "What waits is sent later". A question or a label may begin so."""
_LABEL = 3  # words, as "What to do."
WORDS = {
    r"baton|goodbye|culprits?|verdicts?|mend(s|ed|ing)?|crumbs?": "no metaphors",
    r"(what|who|which) (still )?waits to be sent|what waits|waits in a residual": "residual, unsent gradient",
    r"what is (summed|sent|kept|lost)": "name it: the gradient, the entries, the rounding error",
    r"sparse streams?|streams? of entries|sums? of streams": "sparse vector; a stream is a CUDA stream",
    r"(is|are) not finite": "NaN or Inf",
    r"time-outs?": "timeout",
    r"page-locked": "pinned",
    r"bitwise as if": "the same bits as if",
    r"optimiser(s|'s)?": "optimizer, as torch writes it",
    r"sums? by NCCL|summed by NCCL": "NCCL allreduce",
}
_PACKAGES = ("", "communicator", "compress", "cost", "ddp", "launch", "linear", "sparse_vector", "tuning")
_END = re.compile(r"(?<!et al)(?<!e\.g)(?<!i\.e)(?<! vs)(?<! cf)[.!?][)\"'*_]*\s+(?=[\"'(*_`\[]*[A-Z0-9`])")


@dataclass(frozen=True)
class Sentence:
    line: int
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"\S*\w\S*", self.text))


def sentences_of_page(text: str) -> list[Sentence]:
    """Of paragraphs and items of lists. Code, tables, headings and quotations of others are no sentences."""
    found: list[Sentence] = []
    paragraph: list[str] = []
    start, fenced = 0, False

    def end() -> None:
        found.extend(_split("\n".join(paragraph), start))
        paragraph.clear()

    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced = not fenced
            end()
        elif fenced or not stripped or stripped.startswith(("#", "|", "<!--", "![", ":::")):
            end()
        else:
            item = re.match(r"([-*+]|\d+\.)\s+", stripped)
            if item:
                end()
            if not paragraph:
                start = number
            paragraph.append(stripped[item.end() :] if item else stripped)
    end()
    return found


def _split(paragraph: str, line: int) -> Iterator[Sentence]:
    """Code and addresses of links count as one word and none."""
    text = re.sub(r"(`+)(?:(?!\1).)+\1", lambda code: "`code`" + "\n" * code[0].count("\n"), paragraph, flags=re.DOTALL)
    text = re.sub(r"\]\([^)\s]+\)", "]", text)
    begin = 0
    for end in [*(match.end() for match in _END.finditer(text)), len(text)]:
        sentence = text[begin:end].strip()
        if sentence:
            yield Sentence(line + text.count("\n", 0, begin), " ".join(sentence.split()))
        begin = end


def exported() -> set[str]:
    """The public names of the package, from the sources, and those of the classes that public classes inherit from."""
    names: set[str] = set()
    for package in _PACKAGES:
        for node in ast.parse((ROOT / "src" / "telegrad" / package / "__init__.py").read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names |= set(ast.literal_eval(node.value))
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))]
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return names | inherited(names, bases)


def inherited(names: set[str], bases: Mapping[str, Sequence[str]]) -> set[str]:
    """The classes from which ``names`` inherit, directly or not; ``bases``: of each class."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        new = {base for base in bases.get(waiting.pop(), ()) if base in bases} - found
        found |= new
        waiting += new
    return found


def sentences_of_source(text: str, public: set[str]) -> list[Sentence]:
    """Of docstrings of public names and of their public methods, and of the texts of errors."""
    found: list[Sentence] = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found += [one for given in node.exc.args[:1] for one in _split(_text_of(given), node.lineno)]
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in public:
            found += _of_docstring(node)
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
                    found += _of_docstring(one)
    return found


def _of_docstring(node: ast.ClassDef | ast.FunctionDef) -> list[Sentence]:
    text = ast.get_docstring(node) or ""
    return [Sentence(one.line + node.body[0].lineno - 1, one.text) for one in sentences_of_page(text)]


def _text_of(node: ast.expr) -> str:
    """A string, with ``X`` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else "X" for one in node.values)  # type: ignore[misc]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def kind_of(name: str) -> Kind:
    return next(kind for prefix, kind in KINDS.items() if name.startswith(prefix))


def faults_of(sentences: Sequence[Sentence], kind: Kind) -> list[tuple[int, str]]:
    """Line and fault of each."""
    found = []
    for one in sentences:
        if one.words > kind.longest:
            found.append((one.line, f"{one.words} words, {kind.longest} at most: {one.text[:60]}…"))
        first = one.text.lstrip("*_\"'( ").partition(" ")[0]
        if first in OPENINGS and one.words > _LABEL and not one.text.endswith("?"):
            found.append((one.line, f"begins with {first!r}: {one.text[:60]}…"))
        for pattern, better in WORDS.items():
            if word := re.search(rf"\b({pattern})\b", one.text, re.IGNORECASE):
                found.append((one.line, f"{word[0]!r}: {better}"))
    if kind.mean is not None and sentences:
        mean = sum(one.words for one in sentences) / len(sentences)
        if mean > kind.mean:
            found.append((1, f"{mean:.1f} words a sentence on average, {kind.mean:g} at most"))
    return found


def checked_files(root: Path) -> list[Path]:
    pages = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    return [*pages, *sorted((root / "src").rglob("*.py"))]


def all_faults(root: Path) -> dict[str, list[tuple[int, str]]]:
    """By file, of those that have some."""
    public = exported()
    found = {}
    for path in checked_files(root):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        sentences = sentences_of_page(text) if path.suffix == ".md" else sentences_of_source(text, public)
        if faults := faults_of(sentences, kind_of(name)):
            found[name] = faults
    return found


def above(counts: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Files with more faults than they may have."""
    return [name for name, count in counts.items() if count > limits.get(name, 0)]


def lowered(counts: Mapping[str, int], limits: Mapping[str, int]) -> str:
    """The file with lower limits. Raises ``ValueError`` where a file has more faults than it may have."""
    if more := above(counts, limits):
        raise ValueError(f"{', '.join(more)}: more faults than {LIMITS.name} allows")
    return (
        "\n".join(
            [
                "# How many faults tests/check_prose.py may find in files that have not been rewritten yet. Lowered by",
                "# `python tests/check_prose.py --update`; nothing here may rise.",
                *(f'"{name}" = {count}' for name, count in sorted(counts.items())),
            ]
        )
        + "\n"
    )


def main() -> None:
    """The command."""
    named = [one for one in sys.argv[1:] if one != "--update"]
    found, limits = all_faults(ROOT), tomllib.loads(LIMITS.read_text())
    counts = {name: len(faults) for name, faults in found.items()}
    shown = named or above(counts, limits)
    for name in shown:
        print(*(f"{name}:{line}: {fault}" for line, fault in found.get(name, [])), sep="\n")
    if not named and shown:
        allowed = ", ".join(f"{name}: {counts[name]} faults, {limits.get(name, 0)} allowed" for name in shown)
        sys.exit(f"{allowed} (tests/{LIMITS.name})")
    if "--update" in sys.argv[1:]:
        LIMITS.write_text(lowered(counts, limits))


if __name__ == "__main__":
    main()
