"""``python -m telegrad.launch.rank_main TARGET ARGUMENT…``: what each process of the launcher runs.

TARGET is ``module:function`` (called with the arguments, as strings) or the path of a script (which finds them in
``sys.argv``).
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import signal
import sys

from telegrad.launch.joining import LAUNCHER, die_with


def main() -> None:
    die_with(int(os.environ[LAUNCHER]))
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


if __name__ == "__main__":
    main()
