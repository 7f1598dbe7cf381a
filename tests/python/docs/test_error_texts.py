"""Errors that how-to pages quote are those of the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
KINDS = (
    "ValueError|TypeError|RuntimeError|RuntimeWarning|ChoiceWarning|RendezvousError|NonFiniteGradient|TransportError"
)
# What a text has from its occasion: names in quotes, numbers, arguments' values, and classes.
VARIES = re.compile(r"…|'[^']*'|\b\d[\d.,]*\b|=\w+|\b(?:AdamW|DDPState|Synchronizer|residual|torch\.\w+)\b")


def sources() -> str:
    """All of Python, with strings over several lines as one."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "telegrad").rglob("*.py")))
    return re.sub(r"\s+", " ", re.sub(r'"\s*[fr]?"', "", text))


def quoted(text: str) -> Iterator[str]:
    for said in re.findall(rf"`(?:{KINDS}): ([^`]+)`", re.sub(r"\s+", " ", text)):
        yield from (piece.strip() for piece in VARIES.split(said) if len(piece.strip()) >= 10)


def test_errors_are_those_of_the_sources() -> None:
    known = sources()
    found = {piece: page.name for page in PAGES for piece in quoted(page.read_text())}
    assert len(found) > 15
    assert {piece: page for piece, page in found.items() if piece not in known} == {}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("`ValueError: density=0.1 is not used with\npolicy=, …`", ["is not used with policy=,"]),
        ("a `ValueError` that lists", []),
    ],
)
def test_what_is_quoted(text: str, pieces: list[str]) -> None:
    assert list(quoted(text)) == pieces
