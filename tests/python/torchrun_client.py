"""Asks the process of torchrun_server.py. As ``torchrun_client.py SOCKET torchrun --nproc-per-node 2 a.py`` it is a
torchrun, as ``torchrun_client.py SOCKET telegrad doctor`` the command of ours."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from ports import free_port


def ask(path: str, request: dict[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as answer:
            return json.loads(answer.readline())


def launch(path: str, program: str, *options: str) -> int:
    """What the program does. Of torchrun's options it takes ``--standalone`` and ``--nproc-per-node``."""
    request: dict[str, Any] = {"folder": os.getcwd(), "environment": dict(os.environ), "port": free_port()}
    if program == "telegrad":
        request |= {"command": [program, *options], "ranks": 1}
    else:
        while options[0] == "--standalone":
            options = options[1:]
        option, ranks, *script = options
        assert option == "--nproc-per-node", option
        request |= {"script": script, "ranks": int(ranks)}
    statuses, said = ask(path, request)
    sys.stdout.write(said)
    if program == "telegrad":
        return int(statuses[0])
    if any(statuses):
        sys.stderr.write(f"exit statuses of the ranks: {statuses}\n")
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(launch(*sys.argv[1:]))
