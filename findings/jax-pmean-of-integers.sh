#!/usr/bin/env bash
# jax 0.10.2, CPU, Python 3.11: jax.lax.pmean over four devices, beside jnp.mean of the same four entries.
#
# Behaviour: pmean of integers gives float32, but adds in the integers' own type before. So it wraps: the mean of four times
# 100 in int8 is -28, and of 2^30 in int32 it is 0. The mean of float16 is infinite where the sum is above 65,504. jnp.mean,
# also of an array that is sharded over the devices, adds in float32 and is right. No error, no warning. pmean under vmap
# is alike. Means of 8-bit codes, of token counts or of float16 gradients need x.astype(jnp.float32) before.
#
# Seen (the same entry on all four devices; pmean and its type, then jnp.mean of the sharded array):
#   int4 5: pmean 1 float32, jnp.mean 5
#   int8 100: pmean -28 float32, jnp.mean 100
#   uint8 200: pmean 8 float32, jnp.mean 200
#   int16 20000: pmean 3616 float32, jnp.mean 20000
#   int32 1073741824: pmean 0 float32, jnp.mean 1.07374e+09
#   bool 1: pmean 1 float32, jnp.mean 1
#   float16 40000: pmean inf float16, jnp.mean 40000
#   bfloat16 40000: pmean 39936 bfloat16, jnp.mean 39936
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH = Mesh(jax.devices(), ("ranks",))
ROWS = PartitionSpec("ranks")
mean = jax.jit(jax.shard_map(lambda x: jax.lax.pmean(x, "ranks"), mesh=MESH, in_specs=ROWS, out_specs=PartitionSpec()))
CASES = {"int4": 5, "int8": 100, "uint8": 200, "int16": 20000, "int32": 2**30, "bool": 1, "float16": 40000, "bfloat16": 40000}
for dtype, value in CASES.items():
    values = jax.device_put(jnp.full(4, value, dtype), NamedSharding(MESH, ROWS))
    found = mean(values)
    vmapped = jax.vmap(lambda x: jax.lax.pmean(x, "ranks"), axis_name="ranks")(values)
    assert float(vmapped[0]) == float(found[0]) and vmapped.dtype == found.dtype
    print(f"{dtype} {value}: pmean {float(found[0]):g} {found.dtype}, jnp.mean {float(jnp.mean(values)):g}")
PYTHON
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
