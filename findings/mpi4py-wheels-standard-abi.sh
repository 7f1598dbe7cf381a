#!/usr/bin/env bash
# mpi4py 4.1.2 from PyPI beside MPICH 5.0.2 from PyPI (Python 3.11, x86-64).
#
# Behaviour: mpi4py's import code detects MPI's standard ABI (MPI_Abi_get_version) and chooses the extension module "mpiabi",
# but the wheel carries only MPI.mpich.*.so and MPI.openmpi.*.so. With MPI4PY_LIBMPI=…/libmpi_abi.so.1 the import fails with
#   ImportError: cannot import name 'MPI' from 'mpi4py'
# which names neither the library nor the ABI. With libmpi.so.12 of the same MPICH it works. So a program whose MPI has the
# standard ABI alone needs an mpi4py built from source (MPI4PY_BUILD_MPICC=mpicc_abi pip install --no-binary mpi4py mpi4py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check mpi4py==4.1.2 mpich==5.0.2
ls "$folder"/lib/python*/site-packages/mpi4py/ | grep '\.so'

works=$(MPI4PY_LIBMPI="$folder/lib/libmpi.so.12" "$folder/bin/python" -c 'from mpi4py import MPI; print(MPI.Get_abi_version())')
echo "libmpi.so.12: MPI.Get_abi_version() = $works"
[ "$works" = "(-1, -1)" ]

said=$(MPI4PY_LIBMPI="$folder/lib/libmpi_abi.so.1" "$folder/bin/python" -c 'from mpi4py import MPI' 2>&1 | tail -1 || true)
echo "libmpi_abi.so.1: $said"
[[ $said == "ImportError: cannot import name 'MPI' from 'mpi4py'"* ]]
chosen=$(MPI4PY_LIBMPI="$folder/lib/libmpi_abi.so.1" "$folder/bin/python" -c 'from mpi4py import _mpiabi; print(_mpiabi._get_mpiabi())')
echo "libmpi_abi.so.1: mpi4py looks for its module for '$chosen'"
[ "$chosen" = mpiabi ]
