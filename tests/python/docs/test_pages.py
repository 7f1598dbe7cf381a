"""Every block of Python and shell in the tutorial and the how-to pages runs, or says why it does not.

A block that a comment ``<!-- not run: REASON -->`` precedes is not run, and stands in ``NOT_RUN``. A block with
``title="FILE"`` is written to that file, for the blocks of shell behind it. A block of text after one of shell is what
that prints: … stands for anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from ports import free_port
from torchrun_client import ask

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(path for part in ("tutorial", "how-to") for path in (ROOT / "docs" / part).glob("*.md"))
FENCE = re.compile(r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S)
RUN = ("python", "sh")

NOT_RUN = {
    "tutorial/1-two-processes.md": {"installs the package": 1},
    "how-to/calibrate.md": {"needs a GPU": 1},
    "how-to/cpp.md": {"compiles for minutes": 1},
    "how-to/diloco.md": {"needs two machines": 1},
    "how-to/gpu.md": {"needs a GPU": 4},
    "how-to/hangs.md": {"needs a job that hangs": 2},
    "how-to/linear.md": {"needs several hosts": 1},
    "how-to/kubernetes.md": {"builds wheels for minutes": 1, "needs Kubernetes": 1},
    "how-to/mpi.md": {"compiles for minutes": 2},
    "how-to/other-ranks.md": {"needs a store in another process": 1},
    "how-to/ray.md": {"needs Ray": 5},
    "how-to/slurm.md": {"needs Slurm": 3},
    "how-to/two-machines.md": {"needs two machines": 10},
}
"""By page: the reasons of its blocks that are not run, and how many have each."""

PRELUDES = {
    "how-to/other-ranks.md": "resuming",
    "how-to/trainers.md": "trainers",
    "how-to/torch-backend.md": "nothing",
    "how-to/sparse-vectors.md": "nothing",
    "how-to/linear.md": "nothing",
    "how-to/mpi.md": "nothing",
}
"""By page: what its blocks begin with, of ``torchrun_server.PRELUDES``, if not ``"training"``."""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str | None
    why_not: str | None
    code: str


def blocks_of(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(line, language, title[1] if title else None, match["why"], match["code"]))
    return found


def says(text: str, line: str) -> bool:
    """Whether a line of the text is like ``line``, in which … stands for anything; however either is wrapped."""
    pattern = r"\s+".join(".*?".join(map(re.escape, word.split("…"))) for word in line.split())
    return re.search(pattern, text, re.DOTALL) is not None


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


def test_there_are_pages() -> None:
    assert len(PAGES) > 25
    assert {block.language for page in PAGES for block in blocks_of(page.read_text())} >= {"python", "sh"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_runs(page: Path, torchrun_server: str, tmp_path: Path) -> None:
    blocks = [one for one in blocks_of(page.read_text()) if one.language == "python" and one.why_not is None]
    code = [(one.line, one.code) for one in blocks if one.title is None]
    if not code:
        pytest.skip("the page has no such block")
    (tmp_path / "shared").mkdir()
    request = {"page": name_of(page), "blocks": code, "folder": str(tmp_path), "port": free_port(), "ranks": 2}
    statuses, said = ask(torchrun_server, request | {"prelude": PRELUDES.get(name_of(page), "training")})
    assert statuses == [0, 0], said


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_runs(page: Path, torchrun_server: str, tmp_path: Path) -> None:
    blocks = [one for one in blocks_of(page.read_text()) if one.why_not is None]
    if not any(one.language == "sh" for one in blocks):
        pytest.skip("the page has no such block")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    stand_ins = Path(torchrun_server).parent  # of torchrun and telegrad (torchrun_stand_ins.py)
    path = os.pathsep.join([str(stand_ins), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TELEGRAD_CACHE": str(tmp_path / "cache")}
    said = ""
    for block in blocks:
        if block.title is not None:
            (tmp_path / block.title).write_text(block.code)
        elif block.language == "text":
            for line in block.code.splitlines() if said else ():
                assert says(said, line), f"{name_of(page)}:{block.line}: {line!r} is not in\n{said}"
            said = ""
        elif block.language != "sh":
            said = ""
        else:
            done = subprocess.run(
                ["bash", "-euc", block.code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
            )
            said = done.stdout + done.stderr
            assert done.returncode == 0, f"{name_of(page)}:{block.line}\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_that_are_not_run_are_listed(page: Path) -> None:
    text = page.read_text()
    blocks = blocks_of(text)
    assert text.count("<!-- not run: ") == sum(one.why_not is not None for one in blocks)
    assert Counter(one.why_not for one in blocks if one.why_not) == NOT_RUN.get(name_of(page), {})
    for block in blocks:
        assert block.language in (*RUN, "text", "cpp", "cmake", "yaml"), f"{block.line}: {block.language!r}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 150


def test_what_a_block_is() -> None:
    text = 'a\n<!-- not run: needs Slurm -->\n```sh\nsrun x\n```\n```python title="a.py"\nb\n```\n```text\nc\n```\n'
    first, second, third = blocks_of(text)
    assert first == Block(3, "sh", None, "needs Slurm", "srun x\n")
    assert second == Block(6, "python", "a.py", None, "b\n")
    assert (third.language, third.code) == ("text", "c\n")


def test_what_a_program_says() -> None:
    assert says("a\nrank 1 (pid 7)\nhas not called", "rank 1 (pid …) has not")
    assert not says("rank 1 (pid 7) has called", "rank 1 (pid …) has not")
