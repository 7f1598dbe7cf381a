#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint.state_dict, one process without torch.distributed.
#
# Behaviour: get_optimizer_state_dict of an optimizer that has taken no step takes one, with a learning rate and gradients
# of zero. The parameters stay as they are, but the step hooks of the optimizer run, and the step is not taken back: Adam
# counts it. Who saves a checkpoint before the first step trains differently afterwards: the first real step of Adam is
# corrected as the second one, and is 0.744 of what it would have been.
#
# Seen:
#   hooks that ran: before, after
#   Adam's step: 1.0
#   first move: 0.0744 instead of 0.1000
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy
cat >"$folder/program.py" <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_move(reads):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ran = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    if reads:
        get_optimizer_state_dict(model, optimizer)
        assert model.weight.item() == 1
        print("hooks that ran:", ", ".join(ran) or "none")
        print("Adam's step:", *(float(one["step"]) for one in optimizer.state.values()))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return 1 - model.weight.item()


usual, other = first_move(False), first_move(True)
print(f"first move: {other:.4f} instead of {usual:.4f}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/said"
diff "$folder/said" - <<'EXPECTED'
hooks that ran: before, after
Adam's step: 1.0
first move: 0.0744 instead of 0.1000
EXPECTED
