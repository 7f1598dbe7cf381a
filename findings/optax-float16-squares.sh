#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2, CPU, Python 3.11: gradient transformations of float16 gradients.
#
# Behaviour: a gradient entry of 256 or more (or a norm of that size) turns all updates to zero, and an entry of 0 becomes
# NaN. Squares are taken and summed in the gradients' own type. Above 65,504 they are infinite, and whoever divides by the
# root of infinity has 0: clip_by_global_norm, adaptive_grad_clip, normalize_by_update_norm and the family of Adam. There
# eps=1e-8 is 0 in float16, so that 0 / (sqrt(0) + eps) is NaN for each entry without a gradient, as rows of an embedding.
# Neither is reported, and apply_if_finite sees a zero as finite. bfloat16 and float32 are right.
#
# Seen (gradients 0, 1 and 300; what each transformation makes of them):
#   float16 clip_by_global_norm: 0, 0, 0
#   float16 adaptive_grad_clip: 0, 0, 0
#   float16 normalize_by_update_norm: 0, 0, 0
#   float16 scale_by_trust_ratio: 0, 0, 0
#   float16 scale_by_adam: nan, 1, 0
#   float16 scale_by_amsgrad: nan, 1, 0
#   float16 scale_by_rms: nan, 3.16, 0
#   float16 scale_by_belief: nan, 1.11, 0
#   float16 scale_by_sm3: 0, 0.1, 0
#   float16 scale_by_lion: 0, 1, 1
#   float16 apply_if_finite of clip_by_global_norm: 0, 0, 0, counted as not finite: 0
#   bfloat16 clip_by_global_norm: 0, 0.00333, 1
#   bfloat16 adaptive_grad_clip: 0, 0.00058, 0.174
#   bfloat16 normalize_by_update_norm: 0, 0.00333, 1
#   bfloat16 scale_by_trust_ratio: 0, 0.00577, 1.73
#   bfloat16 scale_by_adam: 0, 1, 1
#   bfloat16 scale_by_amsgrad: 0, 1, 1
#   bfloat16 scale_by_rms: 0, 3.16, 3.16
#   bfloat16 scale_by_belief: 0, 1.11, 1.11
#   bfloat16 scale_by_sm3: 0, 0.1, 0.0996
#   bfloat16 scale_by_lion: 0, 1, 1
#   bfloat16 apply_if_finite of clip_by_global_norm: 0, 0.00333, 1, counted as not finite: 0
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check optax==0.2.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import jax.numpy as jnp
import optax

MAKERS = {
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_amsgrad": optax.scale_by_amsgrad(),
    "scale_by_rms": optax.scale_by_rms(),
    "scale_by_belief": optax.scale_by_belief(),
    "scale_by_sm3": optax.scale_by_sm3(),
    "scale_by_lion": optax.scale_by_lion(),
    "apply_if_finite of clip_by_global_norm": optax.apply_if_finite(optax.clip_by_global_norm(1.0), 5),
}
for dtype in ("float16", "bfloat16"):
    parameters, gradients = (jnp.array(values, dtype) for values in ([1, 1, 1], [0, 1, 300]))
    for name, transformation in MAKERS.items():
        updates, state = transformation.update(gradients, transformation.init(parameters), parameters)
        text = ", ".join(f"{float(value):.3g}" for value in updates)
        if hasattr(state, "total_notfinite"):
            text += f", counted as not finite: {int(state.total_notfinite)}"
        print(f"{dtype} {name}: {text}")
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
