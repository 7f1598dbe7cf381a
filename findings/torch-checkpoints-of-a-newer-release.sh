#!/usr/bin/env bash
# torch 2.13.0 and 2.15.0, CPU, Python 3.11, one process: torch.distributed.checkpoint across releases.
#
# Behaviour: what 2.15 has saved, 2.13 cannot load, though the files hold one float32 tensor. 2.15 pickles one field more
# of each tensor's properties than 2.13 unpacks. The error speaks of missing metadata, and it is no Exception, so that
# "except Exception" lets it pass. The other direction works, and so does torch.save with torch.load in both. So machines
# that share checkpoints need one release of torch, or files of torch.save.
#
# Seen:
#   saved by 2.13.0, loaded by 2.15.0: torch.distributed.checkpoint: the values
#   saved by 2.13.0, loaded by 2.15.0: torch.load: the values
#   saved by 2.15.0, loaded by 2.13.0: torch.distributed.checkpoint: CheckpointException, no Exception: too many values to unpack (expected 5)
#   saved by 2.15.0, loaded by 2.13.0: torch.load: the values
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 2.13.0 2.15.0; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/python" -m pip install -qq --disable-pip-version-check "torch==$release" numpy==2.4.6
done
cat >"$folder/program.py" <<'PYTHON'
import re
import sys

import torch
import torch.distributed.checkpoint as checkpoint

what, folder = sys.argv[1:]
wanted = torch.arange(5.0)
if what == "save":
    checkpoint.save({"values": wanted}, checkpoint_id=f"{folder}/checkpoint")
    torch.save({"values": wanted}, f"{folder}/values.pt")
    sys.exit()


def shown(load):
    try:
        return "the values" if torch.equal(load(), wanted) else "other values"
    except BaseException as error:
        said = re.search(r"too many values to unpack \(expected \d+\)", str(error))
        kind = "" if isinstance(error, Exception) else ", no Exception"
        return f"{type(error).__name__}{kind}: {said.group() if said else error}"


def by_checkpoint():
    state = {"values": torch.zeros(5)}
    checkpoint.load(state, checkpoint_id=f"{folder}/checkpoint")
    return state["values"]


print("torch.distributed.checkpoint:", shown(by_checkpoint))
print("torch.load:", shown(lambda: torch.load(f"{folder}/values.pt", weights_only=True)["values"]))
PYTHON
seen=$(
    for pair in "2.13.0 2.15.0" "2.15.0 2.13.0"; do
        read -r writer reader <<<"$pair"
        mkdir "$folder/of-$writer"
        "$folder/$writer/bin/python" "$folder/program.py" save "$folder/of-$writer" 2>/dev/null
        "$folder/$reader/bin/python" "$folder/program.py" load "$folder/of-$writer" 2>/dev/null |
            sed "s/^/saved by $writer, loaded by $reader: /"
    done
)
echo "$seen"
[ "$seen" = "saved by 2.13.0, loaded by 2.15.0: torch.distributed.checkpoint: the values
saved by 2.13.0, loaded by 2.15.0: torch.load: the values
saved by 2.15.0, loaded by 2.13.0: torch.distributed.checkpoint: CheckpointException, no Exception: too many values to unpack (expected 5)
saved by 2.15.0, loaded by 2.13.0: torch.load: the values" ]
