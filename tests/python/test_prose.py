"""Sentences of README, docs, docstrings and error texts: what the check counts, and that nothing has become worse."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from check_prose import (
    LIMITS,
    ROOT,
    Kind,
    above,
    all_faults,
    exported,
    faults_of,
    inherited,
    kind_of,
    lowered,
    sentences_of_page,
    sentences_of_source,
)


def texts_of(page: str) -> list[str]:
    return [one.text for one in sentences_of_page(page)]


OTHER = Kind(30)


def faults_in(page: str, kind: Kind = OTHER) -> list[str]:
    return [fault for _, fault in faults_of(sentences_of_page(page), kind)]


def test_nothing_has_become_worse() -> None:
    limits = tomllib.loads(LIMITS.read_text())
    found = all_faults(ROOT)
    more = above({name: len(faults) for name, faults in found.items()}, limits)
    assert {name: found[name] for name in more} == {}, "python tests/check_prose.py FILE names the faults"


def test_files_with_limits_exist() -> None:
    gone = [name for name in tomllib.loads(LIMITS.read_text()) if not (ROOT / name).is_file()]
    assert gone == [], "python tests/check_prose.py --update takes them out"


def test_paragraphs_and_items_are_cut_into_sentences() -> None:
    page = "# A heading. Not one\n\nOne is\nhere. Two `a. B` is. See Li et al. Three!\n\n"
    page += "- four\n- five\n  goes on\n1. six\n"
    assert texts_of(page) == ["One is here.", "Two `code` is.", "See Li et al. Three!", "four", "five goes on", "six"]
    assert [one.line for one in sentences_of_page(page)] == [3, 4, 4, 6, 7, 9]


def test_code_tables_and_comments_are_no_sentences() -> None:
    page = "```\nWhat waits.\n```\n| What | waits |\n<!-- What waits -->\n![What](x.png)\n::: telegrad.What\n"
    assert texts_of(page) == []


def test_code_counts_as_one_word_and_addresses_as_none() -> None:
    (one,) = sentences_of_page(
        "Use [the hook](../how-to/ddp.md#options) with `TopK(density=0.01, select='topk')` – now."
    )
    assert one.words == 6


def test_long_sentences_are_faults() -> None:
    assert faults_in("word " * 30) == []
    assert faults_in("word " * 31) == ["31 words, 30 at most: " + ("word " * 12) + "…"]


def test_the_mean_of_a_page_counts_once() -> None:
    kind = Kind(30, mean=3)
    assert faults_in("One two three. One two three four. One two.", kind) == []
    assert faults_in("One two three. One two three four.", kind) == ["3.5 words a sentence on average, 3 at most"]
    assert faults_in("", kind) == []


@pytest.mark.parametrize("opening", ["What", "Who", "Where", "Of"])
def test_openings_without_a_subject_are_faults(opening: str) -> None:
    assert faults_in(f"{opening} a rank has, is sent.") == [f"begins with {opening!r}: {opening} a rank has, is sent.…"]
    assert faults_in(f"{opening} a rank has, is sent?") == []
    assert faults_in(f"**{opening} to do.**") == []


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        ("The culprit is named.", "culprit"),
        ("It adds what waits.", "what waits"),
        ("A sparse stream is added.", "sparse stream"),
        ("Values that are not finite raise.", "are not finite"),
        ("The time-out is long.", "time-out"),
        ("An optimiser steps.", "optimiser"),
    ],
)
def test_words_for_which_there_is_a_better_one_are_faults(sentence: str, word: str) -> None:
    (fault,) = faults_in(sentence)
    assert fault.startswith(f"{word!r}: ")
    assert faults_in(f"The call `{word}` is code.") == []


def test_public_docstrings_and_error_texts_are_looked_at() -> None:
    source = '''
class Public:
    """First."""

    def method(self):
        """Second."""
        raise ValueError(f"third {self} is")

    def _hidden(self):
        """Not this."""


class Private:
    """Nor this."""


raise error
'''
    found = sentences_of_source(source, {"Public"})
    assert sorted((one.line, one.text) for one in found) == [(3, "First."), (6, "Second."), (7, "third X is")]


def test_methods_that_public_classes_inherit_are_looked_at() -> None:
    assert {"Communicator", "Reductions", "CommunicatorBase"} <= exported()
    assert inherited({"A"}, {"A": ["B"], "B": ["C", "Protocol"], "C": [], "D": ["A"]}) == {"B", "C"}


def test_kinds_of_pages() -> None:
    assert kind_of("README.md").mean == 18
    assert kind_of("docs/how-to/ddp.md") == Kind(28, 16)
    assert kind_of("docs/explanation/design.md").mean == 20
    assert kind_of("src/telegrad/errors.py") == Kind(30)


def test_limits_fall_and_never_rise() -> None:
    limits = {"a.md": 3, "b.md": 2}
    assert tomllib.loads(lowered({"a.md": 1}, limits)) == {"a.md": 1}
    assert above({"a.md": 3, "b.md": 1}, limits) == []
    with pytest.raises(ValueError, match="^a.md, new.md: more faults"):
        lowered({"a.md": 4, "new.md": 1}, limits)
