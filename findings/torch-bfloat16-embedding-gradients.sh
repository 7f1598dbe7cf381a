#!/usr/bin/env bash
# torch 2.13.0, CPU, Python 3.11, one process and one thread: gradients of parameters in 16 bits that many rows of a batch share.
#
# Behaviour: the gradient of an embedding counts a token at most 256 times in bfloat16, and 2,048 times in float16. Each
# addition is rounded to 16 bits, so that the sum stands still there. The same holds for EmbeddingBag, w[ids], index_add,
# LayerNorm's bias (per thread, so that it depends on their number), and the sparse gradients of sparse=True, in coalesce()
# and to_dense(). index_select, gather, scatter_add, RMSNorm and Linear add in float32 and are right. So a frequent token, as
# padding without padding_idx, blanks or the first of a Zipf distribution, is trained too little, and nothing says so.
#
# Seen (4,000 gradients of 1 for one row):
#   float32: Embedding 4000, sparse coalesced 4000, sparse to_dense 4000, EmbeddingBag 4000, w[ids] 4000, index_add 4000, LayerNorm 4000, index_select 4000, gather 4000, scatter_add 4000, Linear 4000
#   bfloat16: Embedding 256, sparse coalesced 256, sparse to_dense 256, EmbeddingBag 256, w[ids] 256, index_add 256, LayerNorm 256, index_select 4000, gather 4000, scatter_add 4000, Linear 4000
#   float16: Embedding 2048, sparse coalesced 2048, sparse to_dense 2048, EmbeddingBag 2048, w[ids] 2048, index_add 2048, LayerNorm 2048, index_select 4000, gather 4000, scatter_add 4000, Linear 4000
# Exits with 0 if that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/program.py" <<'PYTHON'
import torch
from torch import nn

COUNT = 4000
IDS = torch.zeros(COUNT, dtype=torch.long)
torch.set_num_threads(1)


def gradient(parameter, output):
    (found,) = torch.autograd.grad(output.sum(), parameter)
    return found


def through(function, dtype):
    weight = torch.zeros(4, 3, dtype=dtype, requires_grad=True)
    return gradient(weight, function(weight))[0, 0]


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    embedding, sparse = (nn.Embedding(4, 3, dtype=dtype, sparse=sparse) for sparse in (False, True))
    bag = nn.EmbeddingBag(4, 3, dtype=dtype, mode="sum")
    norm = nn.LayerNorm(3, dtype=dtype)
    linear = nn.Linear(3, 2, dtype=dtype)
    many = gradient(sparse.weight, sparse(IDS))
    ones = torch.ones(COUNT, dtype=dtype)
    found = {
        "Embedding": gradient(embedding.weight, embedding(IDS))[0, 0],
        "sparse coalesced": many.coalesce().values()[0, 0],
        "sparse to_dense": many.to_dense()[0, 0],
        "EmbeddingBag": gradient(bag.weight, bag(IDS.view(1, -1)))[0, 0],
        "w[ids]": through(lambda weight: weight[IDS], dtype),
        "index_add": torch.zeros(4, dtype=dtype).index_add(0, IDS, ones)[0],
        "LayerNorm": gradient(norm.bias, norm(torch.randn(COUNT, 3, dtype=dtype)))[0],
        "index_select": through(lambda weight: weight.index_select(0, IDS), dtype),
        "gather": through(lambda weight: weight.gather(0, IDS[:, None].expand(-1, 3)), dtype),
        "scatter_add": torch.zeros(4, dtype=dtype).scatter_add(0, IDS, ones)[0],
        "Linear": gradient(linear.bias, linear(torch.ones(COUNT, 3, dtype=dtype)))[0],
    }
    print(f"{str(dtype)[6:]}: {', '.join(f'{name} {float(value):g}' for name, value in found.items())}")
PYTHON
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/seen"
diff "$folder/seen" <(sed -n '/^# Seen/,/^# Exits/{s/^#   //p}' "$0")
