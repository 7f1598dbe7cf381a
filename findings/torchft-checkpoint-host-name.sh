#!/usr/bin/env bash
# torchft 0.2.0 with torch 2.13.0, CPU, Python 3.11: DiLoCo on hosts whose names others cannot resolve.
#
# Behaviour: Manager(hostname=...) says under which name a replica is reached, but the address from which another replica
# fetches its first weights has the host's own name all the same. If that name does not resolve, the fetch fails after
# connecting, each round is discarded, and DiLoCo puts the weights of before the round back. Nothing is raised: the script
# trains to its end, and has learnt nothing. (If quorum_timeout is shorter than the vain fetch, TimeoutError is raised.)
# With init_sync=False, for replicas that begin alike, rounds count.
#
# Seen:
#   init_sync=True: learnt 0 of 2 rounds, exit status 0
#   init_sync=False: learnt 2 of 2 rounds, exit status 0
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchft==0.2.0
cat >"$folder/program.py" <<'PYTHON'
import logging
import socket
import subprocess
import sys
from datetime import timedelta

socket.gethostname = lambda: "a-host.invalid"  # as on a host that is in no name service
logging.disable(logging.CRITICAL)

import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def replica(rank, server, init_sync):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=lambda state: None, state_dict=dict,
        min_replica_size=2, use_async_quorum=False, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=server, replica_id=f"replica{rank}", hostname="127.0.0.1", init_sync=init_sync,
        timeout=timedelta(seconds=10),
    )
    learnt = 0
    with DiLoCo(manager, [model], inner, outer, sync_every=2):
        for _ in range(2):
            before = model.weight.detach().clone()
            for _ in range(2):
                inner.zero_grad()
                (model(torch.ones(4, 8)) - 1).square().mean().backward()
                inner.step()
            learnt += not torch.equal(before, model.weight)
    manager.shutdown()
    print(learnt)


def main():
    for init_sync in (True, False):
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10000)
        server = "http://127.0.0.1:" + lighthouse.address().rpartition(":")[2]
        replicas = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), server, str(int(init_sync))],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank in range(2)
        ]
        learnt = [one.communicate()[0].split()[-1] for one in replicas]
        assert len(set(learnt)) == 1, learnt
        status = {one.returncode for one in replicas}
        print(f"init_sync={init_sync}: learnt {learnt[0]} of 2 rounds, exit status {', '.join(map(str, status))}")
        lighthouse.shutdown()


if len(sys.argv) > 1:
    replica(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
else:
    main()
PYTHON
seen=$(RUST_LOG=error OMP_NUM_THREADS=1 timeout 300 "$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" || tail -5 "$folder/errors")
echo "$seen"
[ "$seen" = "init_sync=True: learnt 0 of 2 rounds, exit status 0
init_sync=False: learnt 2 of 2 rounds, exit status 0" ]
