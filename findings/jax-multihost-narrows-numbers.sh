#!/usr/bin/env bash
# jax 0.10.2, CPU, Python 3.11, two processes with Gloo: jax.experimental.multihost_utils on NumPy arrays.
#
# Behaviour: process_allgather and broadcast_one_to_all take NumPy arrays and give NumPy arrays, but in between they are
# jax arrays, of 32 bits. So a step counter or a seed of 2**32 + 5 arrives as 5, without a warning. assert_equal compares
# what went through that with what did not: it fails on both processes for 0.1 and for 2**31, which both have, with the
# text "Expected: [0.1 0.1]; got: [0.1]". Where they do differ, 7 and 7 + 2**32, the first process passes, and goes on
# alone. NaN is never equal. A broadcast is a sum with zeros: -0.0 arrives as 0.0. JAX_ENABLE_X64=1 mends the numbers.
#
# Seen:
#   32 bits: allgather of 2**32 + 5: 5, of 2**31: -2147483648; broadcast of 2**32 + 5: 5, of -0.0: 0.0
#   32 bits: assert_equal of 0.1 fails on both, of 2**31 fails on both, of NaN fails on both
#   32 bits: assert_equal of 7 and 7 + 2**32 fails on the second
#   64 bits: allgather of 2**32 + 5: 4294967301, of 2**31: 2147483648; broadcast of 2**32 + 5: 4294967301, of -0.0: 0.0
#   64 bits: assert_equal of 0.1 passes, of 2**31 passes, of NaN fails on both
#   64 bits: assert_equal of 7 and 7 + 2**32 fails on both
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import socket
import subprocess
import sys
import warnings


def main(rank, address):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    warnings.simplefilter("error")  # none is given
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, rank)

    def fails(value):
        try:
            multihost_utils.assert_equal(np.array([value]))
        except AssertionError:
            failed = True
        else:
            failed = False
        on = multihost_utils.process_allgather(np.array([failed])).ravel().tolist()
        return {(False, False): "passes", (True, True): "fails on both", (False, True): "fails on the second"}[tuple(on)]

    def gathered(value):
        return multihost_utils.process_allgather(np.array([value])).ravel()[1].item()

    def sent(value):
        return multihost_utils.broadcast_one_to_all(np.array([value])).ravel()[0].item()

    bits = "64 bits" if os.environ.get("JAX_ENABLE_X64") else "32 bits"
    lines = [
        f"allgather of 2**32 + 5: {gathered(2**32 + 5)}, of 2**31: {gathered(2**31)}; "
        f"broadcast of 2**32 + 5: {sent(2**32 + 5)}, of -0.0: {sent(-0.0)}",
        f"assert_equal of 0.1 {fails(0.1)}, of 2**31 {fails(2**31)}, of NaN {fails(float('nan'))}",
        f"assert_equal of 7 and 7 + 2**32 {fails(7 + 2**32 * rank)}",
    ]
    if rank == 0:
        for line in lines:
            print(f"{bits}: {line}", flush=True)
    jax.distributed.shutdown()


if len(sys.argv) > 1:
    main(int(sys.argv[1]), sys.argv[2])
else:
    for wide in ({}, {"JAX_ENABLE_X64": "1"}):
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", **wide}
        command = [sys.executable, __file__]
        ranks = [subprocess.Popen([*command, str(rank), address], env=variables) for rank in range(2)]
        for rank in ranks:
            assert rank.wait(120) == 0
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | sed '/^\[Gloo\]/d; /^$/d' | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
