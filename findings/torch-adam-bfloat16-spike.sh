#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, one process: Adam and its kin with bfloat16 parameters, at their default betas.
#
# Behaviour: the mean of the squared gradients rises and never falls. Moments have the parameter's type. beta2 of 0.999
# takes a thousandth off in each step, less than half a step of bfloat16, and rounding puts it back. So a weight that got one
# large gradient trains slowly for ever: after a gradient of 100 and 10,000 of 1, Adam moves it by a third of its rate, and
# Adamax by a hundredth. Where all gradients become ten times smaller, as they do in training, Adam's steps become that
# too, though it is made not to heed it. float32 forgets in both cases. foreach and fused are alike. Nothing is raised.
# float32 parameters (with autocast) help, or a beta2 of 0.95.
#
# Seen (move of the step after the spike, by a gradient of 1, relative to the learning rate):
#   Adam, float32: 1.00
#   Adam, bfloat16: 0.33
#   Adam, bfloat16, foreach: 0.33
#   Adam, bfloat16, fused: 0.33
#   Adam, bfloat16, beta2 0.95: 1.01
#   AdamW, bfloat16: 0.33
#   NAdam, bfloat16: 0.32
#   RAdam, bfloat16: 0.33
#   Adamax, float32: 1.00
#   Adamax, bfloat16: 0.01
# and of random gradients around 1, later 0.1 (mean of the squares that AdamW keeps of 10,000 weights):
#   float32: 1.0, later 0.01
#   bfloat16: 2.2, later 2.2
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch

torch.set_num_threads(1)


def make(name, dtype, size, **options):
    parameter = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    return parameter, getattr(torch.optim, name)([parameter], lr=1e-3, **options)


def step(parameter, optimizer, gradient):
    parameter.grad = gradient.to(parameter.dtype).expand_as(parameter)
    optimizer.step()


CASES = (
    ("Adam", "float32", {}),
    ("Adam", "bfloat16", {}),
    ("Adam", "bfloat16, foreach", {"foreach": True}),
    ("Adam", "bfloat16, fused", {"fused": True}),
    ("Adam", "bfloat16, beta2 0.95", {"betas": (0.9, 0.95)}),
    *((name, "bfloat16", {}) for name in ("AdamW", "NAdam", "RAdam")),
    *(("Adamax", dtype, {}) for dtype in ("float32", "bfloat16")),
)
for name, text, options in CASES:
    parameter, optimizer = make(name, getattr(torch, text.split(",")[0]), 1, **options)
    step(parameter, optimizer, torch.tensor(100.0))
    for _ in range(10000):
        step(parameter, optimizer, torch.tensor(1.0))
    with torch.no_grad():
        parameter.zero_()
    step(parameter, optimizer, torch.tensor(1.0))
    print(f"{name}, {text}: {-parameter.item() / 1e-3:.2f}")
for dtype in (torch.float32, torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    parameter, optimizer = make("AdamW", dtype, 10000)
    found = []
    for size in (1.0, 0.1):
        for _ in range(6000):
            step(parameter, optimizer, torch.randn(10000, generator=generator) * size)
        found.append(optimizer.state[parameter]["exp_avg_sq"].float().mean().item())
    print(f"{str(dtype)[6:]}: {found[0]:.1f}, later {found[1]:.{2 if found[1] < 1 else 1}f}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
