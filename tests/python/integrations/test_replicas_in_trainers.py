"""DiLoCo by one line in Lightning's, Hugging Face's and Accelerate's loops: the same bits as in a loop by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch.distributed import TCPStore  # noqa: E402

TRAINERS = [name for name in ("accelerate", "pytorch_lightning", "transformers") if find_spec(name)]


@pytest.mark.timeout(400)
@pytest.mark.skipif(not TRAINERS, reason="no trainer is installed")
def test_replicas_train_as_by_hand() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = Path(__file__).with_name("replicas_program.py")
    started = [
        subprocess.Popen(
            [sys.executable, program, str(store.port), str(replica), *TRAINERS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for replica in range(2)
    ]
    try:
        said = [one.communicate(timeout=350)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    results = [dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE)) for text in said]
    assert results[0] == results[1], said
    assert results[0]["by_hand"].startswith("3 rounds")
    for name in TRAINERS:
        assert results[0].get(name) == results[0]["by_hand"], said
