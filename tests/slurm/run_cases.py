"""Runs examples/slurm on a real Slurm cluster in namespaces of this machine, and takes nodes away.

    python tests/slurm/run_cases.py                    every case, about a quarter of an hour
    python tests/slurm/run_cases.py --match killed     those whose name contains "killed"
    python tests/slurm/run_cases.py --slurm PREFIX     with a Slurm installed under PREFIX, not the system's

Needs root, iproute2, Slurm and Munge (Debian: apt-get install --no-install-recommends slurm-wlm munge iproute2), and
telegrad with torch in this Python. Daemons, namespaces and files are removed at the end, also after Ctrl-C. Ends with 0
if every case passes, 1 if one fails, 2 if no cluster can be built.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, Case
from cluster import Cluster, SlurmError, why_unavailable
from jobs import CaseFailed


def passes(case: Case, slurm: Path | None) -> bool:
    """Runs a case on a cluster of its own; says how it ends."""
    began_s = time.monotonic()
    print(f"{case.name}: …", flush=True)
    try:
        with Cluster(case.nodes, slurmd_timeout_s=case.slurmd_timeout_s, slurm=slurm) as cluster:
            case.check(cluster)
    except (CaseFailed, SlurmError) as error:
        print(f"{case.name}: FAILED after {time.monotonic() - began_s:.0f} s: {error}", flush=True)
        return False
    print(f"{case.name}: passed, {time.monotonic() - began_s:.0f} s", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--slurm", type=Path, help="prefix of another installation of Slurm")
    parser.add_argument("--list", action="store_true", help="print the cases' names and end")
    options = parser.parse_args()
    cases = [case for case in CASES if options.match in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        parser.error(f"no case's name contains {options.match!r}: see --list")
    reason = why_unavailable(options.slurm)
    if reason is not None:
        print(f"no cluster can be built here: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is removed
    failed = [case.name for case in cases if not passes(case, options.slurm)]
    print(f"{len(cases) - len(failed)} of {len(cases)} cases passed", *(f"failed: {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
