#!/usr/bin/env bash
# jax 0.10.2, CPU, Python 3.11: jnp.max and what is made of it, where one entry is NaN, on one device and on four.
#
# Behaviour: jnp.max of 4,096 float32 entries is not NaN, and may be smaller than most of them. XLA divides the entries into
# parts, and a NaN restarts the maximum of its part. So if the last of 4,096 entries is NaN, the largest is -inf, and the
# infinity norm is 0. Of 1 to 100,000 with NaN last, the largest is 98,304. 1,000 entries give NaN, as NumPy does for all.
# Over several devices a device whose part has a NaN is left out, at any size, by pmax as by jnp.max of a sharded array.
# So a search for NaN by the largest gradient does not find it, and clipping goes by a wrong norm. sum and isnan are right.
# That CPUs lose NaN there is known (XLA's issue 21461); that finite entries are lost with it is not said there.
#
# Seen (entries 1, 2, ... n, one of them NaN):
#   n = 1,000, NaN first: max nan, min nan, infinity norm nan
#   n = 1,000, NaN last: max nan, min nan, infinity norm nan
#   n = 4,096, NaN first: max 4096, min 2, infinity norm 4096
#   n = 4,096, NaN last: max -inf, min inf, infinity norm 0
#   n = 100,000, NaN last: max 98304, min 1, infinity norm 98304
#   three rows of 4,096 ones, NaN last in the second: max of each row 1, -inf, 1
#   n = 8 on 4 devices, NaN last: max 6, min 1, infinity norm 6
#   n = 8 on 4 devices, NaN last: sum nan, pmax 6, bfloat16 6, float16 6
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH = Mesh(jax.devices(), ("ranks",))
ROWS = PartitionSpec("ranks")


def entries(count, place):
    values = np.arange(1, count + 1, dtype=np.float32)
    values[place] = np.nan
    return values


def show(text, values):
    found = (jnp.max(values), jnp.min(values), jnp.linalg.norm(values, jnp.inf))
    print(f"{text}: max {found[0]:g}, min {found[1]:g}, infinity norm {found[2]:g}")


for count, place in ((1000, 0), (1000, -1), (4096, 0), (4096, -1), (100000, -1)):
    show(f"n = {count:,}, NaN {'last' if place else 'first'}", jnp.asarray(entries(count, place)))
rows = np.ones((3, 4096), np.float32)
rows[1, -1] = np.nan
largest = ", ".join(f"{value:g}" for value in jnp.max(jnp.asarray(rows), axis=1))
print(f"three rows of 4,096 ones, NaN last in the second: max of each row {largest}")
sharded = jax.device_put(entries(8, -1), NamedSharding(MESH, ROWS))
show("n = 8 on 4 devices, NaN last", sharded)
local = lambda values: jax.lax.pmax(jnp.max(values, keepdims=True), "ranks")
found = jax.jit(jax.shard_map(local, mesh=MESH, in_specs=ROWS, out_specs=PartitionSpec()))(sharded)
others = ", ".join(f"{dtype} {float(jnp.max(sharded.astype(dtype))):g}" for dtype in ("bfloat16", "float16"))
print(f"n = 8 on 4 devices, NaN last: sum {jnp.sum(sharded):g}, pmax {float(found[0]):g}, {others}")
PYTHON
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
"$folder/venv/bin/python" "$folder/program.py" 2>"$folder/errors" | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
