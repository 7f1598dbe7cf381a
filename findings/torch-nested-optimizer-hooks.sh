#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11: hooks of register_optimizer_step_pre_hook and register_optimizer_step_post_hook.
#
# Behaviour: how often the global hooks run for one call of step() depends on what was made earlier in the process. An
# optimizer that extends torch.optim.SGD and calls super().step() gets one pre-hook and one post-hook. Once any plain
# SGD was made, the same call gets two of each, nested: the inner post-hook runs before the rest of the outer step().
# A hook that counts steps counts twice then, and one that takes the time takes the inner one's.
#
# Seen:
#   Own, no SGD made before: pre own post
#   SGD: pre post
#   Own, an SGD made before: pre pre post own post
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

told = []
register_optimizer_step_pre_hook(lambda optimizer, *_: told.append("pre"))
register_optimizer_step_post_hook(lambda optimizer, *_: told.append("post"))


class Own(torch.optim.SGD):
    def step(self, closure=None):
        found = super().step(closure)
        told.append("own")
        return found


def hooks_of(kind):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(1)
    told.clear()
    optimizer.step()
    return " ".join(told)


print("Own, no SGD made before:", hooks_of(Own))
print("SGD:", hooks_of(torch.optim.SGD))
print("Own, an SGD made before:", hooks_of(Own))
PYTHON
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen:/,/^# Exits/{s/^#   //p}' "$0")
