"""``python -m lab linear --data FILE``: what is said of files that ranks cannot train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.common.experiments import app

GOOD = "1 1:1\n-1 2:1\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "data.svm",
            GOOD * 4 + "1 3:x\n",
            "data.svm, line 9: '3:x' has no value: it must be a finite decimal number; remove the line from the file "
            "that --data names",
        ),
        (
            "data.svm",
            "# Column indices are one-based\n" + "1 0:1\n" * 8,
            "'0:1': indices begin with 1, as a comment above the rows says: correct that line, or this one; remove the "
            "line from the file that --data names",
        ),
        ("data.svm", GOOD * 4 + "3 1:1\n", "data.svm: labels are not two classes: they must be -1 and 1 or 0 and 1"),
        ("data.svm", "1 1:1\n", "data.svm has too few rows for 2 ranks: 1"),
        ("data.svm.gz", GOOD, "data.svm.gz is damaged: Not a gzipped file"),
    ],
    ids=["damaged", "index 0", "classes", "few rows", "archive"],
)
def test_a_file_that_ranks_cannot_train_on(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    asked = ["linear", "--ranks", "2", "--data", str(path), "--schemes", "telegrad-sparse", "--no-calibrate"]
    done = CliRunner().invoke(app(["linear"]), asked, env={"COLUMNS": "400"})
    output = " ".join(done.output.split())
    assert done.exit_code == 1, output
    assert said in output
    for other in ("Traceback", "strict=", "zero_based=", "--skip-damaged", "--zero-based"):
        assert other not in output
