"""``python -m telegrad.launch.rank_main TARGET ARGUMENT…``: what each process of the launcher runs.

TARGET is ``module:function`` (called with the arguments, as strings) or the path of a script (which finds them in
``sys.argv``).
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import runpy
import signal
import sys

from telegrad.launch.joining import LAUNCHER

_PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_the_launcher()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # how the launcher asks where a rank hangs
    target, arguments = sys.argv[1], sys.argv[2:]
    sys.argv[:] = [target, *arguments]
    if target.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")
        return
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*arguments)


def _die_with_the_launcher() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]):  # it was gone before we asked
        os._exit(1)


if __name__ == "__main__":
    main()
