#!/usr/bin/env bash
# mlx 0.32.4 (mlx[cpu] from PyPI), Linux, Python 3.11, two processes with the ring backend: mx.vmap of collectives.
#
# Behaviour: vmap(all_gather) of a batch gives other values and another shape than all_gather of each of its rows. It
# joins the ranks' batches, and takes the result for a longer batch: three rows become six. Nothing is raised. A mean of
# all_gather under vmap has six entries too, and each is half as large, as its two values are divided by the four that a
# row should have. vmap(all_sum) is right. Further, jvp and vjp of all_sum do not belong together: jvp adds all ranks' tangents, vjp leaves
# each rank's gradient as it is.
#
# Seen (rank 0 has [[0, 1], [2, 3], [4, 5]], rank 1 the same plus 100; what rank 0 gets):
#   all_gather of each row: [[0, 1, 100, 101], [2, 3, 102, 103], [4, 5, 104, 105]]
#   vmap(all_gather): [[0, 1], [2, 3], [4, 5], [100, 101], [102, 103], [104, 105]]
#   mean of all_gather of each row: [50.5, 52.5, 54.5]
#   vmap of the mean of all_gather: [0.25, 1.25, 2.25, 50.25, 51.25, 52.25]
#   vmap(all_sum): [[100, 102], [104, 106], [108, 110]]
#   all_sum, jvp of 1 on rank 0 and 2 on rank 1: 3, vjp of them: 1
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check "mlx[cpu]==0.32.4"
cat >"$folder/program.py" <<'PYTHON'
import json
import os
import socket
import subprocess
import sys

import mlx.core as mx


def main():
    world = mx.distributed.init(strict=True, backend="ring")
    mx.set_default_device(mx.cpu)
    gather, add = mx.distributed.all_gather, mx.distributed.all_sum
    rows = mx.arange(6).reshape(3, 2) + 100 * world.rank()
    one, own = mx.array([1.0]), mx.array([1.0 + world.rank()])
    found = {
        "all_gather of each row": mx.stack([gather(row) for row in rows]),
        "vmap(all_gather)": mx.vmap(gather)(rows),
        "mean of all_gather of each row": mx.stack([gather(row).mean() for row in rows]),
        "vmap of the mean of all_gather": mx.vmap(lambda row: gather(row).mean())(rows),
        "vmap(all_sum)": mx.vmap(add)(rows),
    }
    forward, backward = mx.jvp(add, [one], [own])[1][0], mx.vjp(add, [one], [own])[1][0]
    mx.eval(found, forward, backward)
    if world.rank() == 0:
        for name, values in found.items():
            print(f"{name}: {values.tolist()}")
        said = f"{forward.item():g}, vjp of them: {backward.item():g}"
        print(f"all_sum, jvp of 1 on rank 0 and 2 on rank 1: {said}", flush=True)


if "MLX_RANK" in os.environ:
    main()
else:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    for one in sockets:
        one.close()
    with open(f"{sys.argv[1]}/hosts.json", "w") as file:
        json.dump(hosts, file)
    names = {"MLX_HOSTFILE": f"{sys.argv[1]}/hosts.json"}
    variables = [{**os.environ, **names, "MLX_RANK": f"{rank}"} for rank in range(2)]
    for rank in [subprocess.Popen([sys.executable, __file__], env=one) for one in variables]:
        assert rank.wait(60) == 0
PYTHON
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
