"""Data that are made up, and one thread, as each rank has: a sum that two threads share is rounded differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fashion_files import write_fashion, write_sources

from lab.accuracy import problems
from telegrad.tools.demo.job import Corpus


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="session")
def places(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of images and of text."""
    texts = tmp_path_factory.mktemp("texts")
    Corpus.prepare(texts, library)
    return write_fashion(tmp_path_factory.mktemp("fashion")), texts


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _short_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "WINDOWS_ON_THE_WAY", 8)
    monkeypatch.setattr(problems, "WINDOWS_AT_THE_END", 16)
