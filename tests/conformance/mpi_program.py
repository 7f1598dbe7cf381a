"""One rank that mpiexec has started runs the cases. It writes to a file of its own: mpiexec mixes what ranks print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import program
from mpi4py import MPI

from telegrad import Communicator

with (
    Communicator.from_mpi(MPI.COMM_WORLD, timeout_s=60.0) as communicator,
    (Path(sys.argv[1]) / f"rank{communicator.rank}").open("w") as file,
):
    for outcome in program.run([communicator], one_in=int(sys.argv[2])):
        file.write(json.dumps(outcome) + "\n")
