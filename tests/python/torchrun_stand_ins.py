"""Stand-ins for torchrun and ``telegrad``, which fork from a process that has imported torch: ten times as quick.

Real ones are started by ``test_site.py`` (as the README says), ``test_ddp.py``, ``test_restarts.py`` and
``test_named_backend.py``. ``FORKING_TORCHRUN`` is a real one, too, which forks its ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FORKING_TORCHRUN = HERE / "forking_torchrun.py"


@pytest.fixture(scope="session")
def torchrun_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a process that forks ranks; in its folder lie programs that ask it."""
    folder = tmp_path_factory.mktemp("server")
    path = str(folder / "socket")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "torchrun_server.py"), path]
    for name in ("torchrun", "telegrad"):
        program = folder / name
        program.write_text(
            f"""#!/bin/sh\nexec {sys.executable} -S {HERE / "torchrun_client.py"} {path} {name} "$@"\n"""
        )
        program.chmod(0o755)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield path
        process.kill()
