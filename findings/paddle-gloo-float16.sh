#!/usr/bin/env bash
# paddlepaddle 3.3.1, CPU, Python 3.11, two processes: paddle.distributed.all_reduce of float16 over Gloo.
#
# Behaviour: float16 values are not added as numbers. A sum or a product of finite values is infinite, unless both are
# zero. MAX takes -2 before -1, and MIN -1 before -2. Nothing is raised, the ranks agree, and reduce() does the same.
# bfloat16, float32 and broadcasts of float16 are right. Data-parallel training on CPUs in float16 so ends at once.
#
# Seen (rank 0 has [0, 1, -1, 0.25], rank 1 twice that; what rank 0 gets):
#   float16 SUM: [0.0, inf, inf, inf]
#   float16 PROD: [0.0, inf, inf, inf]
#   float16 MAX: [0.0, 2.0, -2.0, 0.5]
#   float16 MIN: [0.0, 1.0, -1.0, 0.25]
#   bfloat16 SUM: [0.0, 3.0, -3.0, 0.75]
#   bfloat16 PROD: [0.0, 2.0, 2.0, 0.125]
#   bfloat16 MAX: [0.0, 2.0, -1.0, 0.5]
#   bfloat16 MIN: [0.0, 1.0, -2.0, 0.25]
#   float32 SUM: [0.0, 3.0, -3.0, 0.75]
#   float32 PROD: [0.0, 2.0, 2.0, 0.125]
#   float32 MAX: [0.0, 2.0, -1.0, 0.5]
#   float32 MIN: [0.0, 1.0, -2.0, 0.25]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check paddlepaddle==3.3.1 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import os
import socket
import subprocess
import sys

import numpy as np
import paddle
import paddle.distributed as dist


def main():
    paddle.set_device("cpu")
    dist.init_parallel_env()
    own = np.array([0, 1, -1, 0.25], np.float32) * (1 + dist.get_rank())
    for kind in ("float16", "bfloat16", "float32"):
        for name in ("SUM", "PROD", "MAX", "MIN"):
            values = paddle.to_tensor(own).astype(kind)
            dist.all_reduce(values, getattr(dist.ReduceOp, name))
            if dist.get_rank() == 0:
                print(f"{kind} {name}: {values.astype('float32').numpy().tolist()}", flush=True)


if "PADDLE_TRAINER_ID" in os.environ:
    main()
else:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    names = {
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_MASTER": f"127.0.0.1:{ports[2]}",
        "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **names, "PADDLE_TRAINER_ID": f"{rank}", "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{ports[rank]}"},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.wait(60) == 0
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
