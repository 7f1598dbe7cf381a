"""torch's own analyser reads what we write, and names the same culprit."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch.distributed.flight_recorder.fr_trace")

from hang_jobs import Call, Job

from telegrad.tools.report import flight_recorder
from telegrad.tools.report.hang import verdict

X = Call(count=4096)


Analyse = Callable[..., str]


@pytest.fixture
def analysed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Analyse]:
    """``analysed(job, missing, option…)``: what torch's command says of our dumps, run inside this process."""
    from torch.distributed.flight_recorder import fr_trace

    def analyse(job: Job, missing: set[int] | None = None, *options: str) -> str:
        folder = tmp_path / f"dumps{len(list(tmp_path.iterdir()))}"
        _, notes = flight_recorder.write(verdict(job.reports(missing)), folder)
        assert notes == []
        caplog.clear()
        fr_trace.main([str(folder), "--prefix", "rank_", *options])
        return "\n".join(record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.INFO, logger="Flight Recorder"):
        yield analyse
    gc.enable()  # the analyser switches it off


def test_the_analyser_names_who_has_not_called(analysed: Analyse) -> None:
    job = Job(4, 16)
    job.wait_round_the_ring(X, {2})
    text = analysed(job)
    assert "missing ranks: {2}" in text
    assert "collective: gloo:all_reduce" in text
    assert "sequence number: 16" in text


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"count": 7}, "SIZE_OR_SYNTAX_MISMATCH"),
        ({"dtype": "bf16"}, "COLLECTIVE_DTYPE_MISMATCH"),
        ({"reduction": "avg"}, "COLLECTIVE_DTYPE_MISMATCH"),
        ({"operation": "broadcast", "root": 1}, "COLLECTIVE_TYPE_MISMATCH"),
        ({"operation": "sparse allreduce"}, "COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_the_analyser_names_a_mismatch(analysed: Analyse, change: dict[str, Any], kind: str) -> None:
    """Of two ranks, since the analyser takes the first that it reads for right."""
    job = Job(2, 3)
    job.call(0, X)
    job.call(1, dataclasses.replace(X, **change))
    text = analysed(job)
    assert kind in text
    assert "Collective sequence number: 3 has errors" in text
    assert "Culprit rank" in text


def test_the_analyser_reads_every_operation_and_missing_ranks(analysed: Analyse) -> None:
    job = Job(3, 1)
    for operation in ("barrier", "allgather", "sparse allreduce"):
        for rank in range(3):
            job.call(rank, Call(operation, 0 if operation == "barrier" else 12), state="completed")
    for rank in range(3):
        job.call(rank, Call("broadcast", 12, root=1), state="completed")
    text = analysed(job)
    assert "mismatch" not in text.lower()
    assert "error" not in text.lower()
    analysed(job, {1}, "--allow-incomplete-ranks")


def test_a_dump_is_of_plain_types_only(tmp_path: Path) -> None:
    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name}")

    job = Job(2, 3)
    (first, _), _ = flight_recorder.write(verdict(job.reports()), tmp_path / "dumps")
    dump = Plain(io.BytesIO(first.read_bytes())).load()
    assert [entry["record_id"] for entry in dump["entries"]] == [0, 1, 2]
    assert first.name == "rank_0"


def test_an_operation_that_the_form_does_not_know_is_said(tmp_path: Path) -> None:
    job = Job(2, 1)
    for rank in range(2):
        job.call(rank, Call("teleport"))
    _, notes = flight_recorder.write(verdict(job.reports()), tmp_path / "dumps")
    assert notes == ["the flight recorder's form has no operation 'teleport': left out"]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(FileExistsError, match="not empty"):
        flight_recorder.write(verdict(Job(2, 1).reports()), tmp_path)
