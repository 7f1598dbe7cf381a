#!/usr/bin/env bash
# onnxruntime 1.32.0 and onnx 1.23.2 (its reference evaluator), CPU, Python 3.11: Cast of float32 to 8, 4 and 2 bits.
#
# Behaviour: one operator rounds by the width of its target. onnxruntime truncates to INT8 and UINT8 (1.5 becomes 1), but
# to INT4, UINT4, INT2 and UINT2 it rounds to the nearest, halves away from zero (1.5 becomes 2, 2.5 becomes 3), and wraps
# afterwards: 7.5 becomes -8 in INT4. The reference truncates to all of them. To FLOAT8E8M0, the scale of MX formats,
# onnxruntime makes 2^-127 of a negative number and 2^127 of infinity; the reference makes the power of two of the
# magnitude, and NaN. So weights quantized by one and checked by the other differ by a step.
#
# Seen (target, values, and what comes back as float32):
#   INT8, [1.5, 2.5, -0.5, 7.5]: onnxruntime [1.0, 2.0, 0.0, 7.0], reference [1.0, 2.0, 0.0, 7.0]
#   INT4, [1.5, 2.5, -0.5, 7.5]: onnxruntime [2.0, 3.0, -1.0, -8.0], reference [1.0, 2.0, 0.0, 7.0]
#   INT2, [1.5, -0.5]: onnxruntime [-2.0, -1.0], reference [1.0, 0.0]
#   UINT8, [1.5, 2.5, 7.5]: onnxruntime [1.0, 2.0, 7.0], reference [1.0, 2.0, 7.0]
#   UINT4, [1.5, 2.5, 7.5]: onnxruntime [2.0, 3.0, 8.0], reference [1.0, 2.0, 7.0]
#   UINT2, [1.5, 2.5]: onnxruntime [2.0, 3.0], reference [1.0, 2.0]
#   FLOAT8E8M0, [-1.5, inf]: onnxruntime [5.88e-39, 1.7e+38], reference [2.0, nan]
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def there_and_back(values, kind):
    nodes = [
        helper.make_node("Cast", ["values"], ["narrow"], to=getattr(TensorProto, kind)),
        helper.make_node("Cast", ["narrow"], ["back"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in ("values", "back")]
    graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    model.ir_version = 11
    given = {"values": np.array(values, np.float32)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0], ReferenceEvaluator(model).run(None, given)[0]


CASES = {
    "INT8": [1.5, 2.5, -0.5, 7.5],
    "INT4": [1.5, 2.5, -0.5, 7.5],
    "INT2": [1.5, -0.5],
    "UINT8": [1.5, 2.5, 7.5],
    "UINT4": [1.5, 2.5, 7.5],
    "UINT2": [1.5, 2.5],
    "FLOAT8E8M0": [-1.5, np.inf],
}
for kind, values in CASES.items():
    with np.errstate(all="ignore"):
        ours, reference = there_and_back(values, kind)
    print(f"{kind}, {values}: onnxruntime {[float(f'{one:.3g}') for one in ours]}, reference {[float(one) for one in reference]}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
