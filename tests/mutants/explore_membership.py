"""The explorer of shrink, grow and join, and of replicas that come and go, with sources of planted bugs: ``--plant
telegrad.module=FILE``. Options and output are those of ``explore_main.cpp``; ``--ranks`` changes nothing. It ends at
the first finding."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SEED_MOST_S = 60.0  # of processor time


class Planted(importlib.abc.MetaPathFinder):
    """Finds modules in other files than theirs."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As of any finder."""
        if name not in self._files:
            return None
        inside = getattr(importlib.machinery.PathFinder.find_spec(name, path), "submodule_search_locations", None)
        return importlib.util.spec_from_file_location(name, self._files[name], submodule_search_locations=inside)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", action="append", default=[], metavar="MODULE=FILE")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--ranks", help="as for explore_main")
    parser.add_argument("--stop", action="store_true", help="as for explore_main")
    options = parser.parse_args()
    sys.meta_path.insert(0, Planted(dict(one.split("=", 1) for one in options.plant)))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from lab.simulated_membership import replicas
    from lab.simulated_membership.world import play, worst_of

    seed = options.first_seed

    def endless(*_: Any) -> None:
        print(json.dumps({"failures": [{"seed": seed, "what": "endless", "detail": ""}]}), flush=True)
        os._exit(1)

    signal.signal(signal.SIGPROF, endless)
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        signal.setitimer(signal.ITIMER_PROF, _SEED_MOST_S)
        if (found := worst_of(play(seed)) or worst_of(replicas.play(seed))) is not None:
            print(json.dumps({"failures": [{"seed": seed, "what": found[0], "detail": found[1]}]}), flush=True)
            os._exit(1)
    print(json.dumps({"failures": []}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
