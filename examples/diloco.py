"""Replicas on slow links: each trains by itself, and all exchange what they have learnt every 30 steps.

Run: torchrun --nproc-per-node 2 examples/diloco.py [--sparse]
"""

import sys

import torch

import telegrad

comm = telegrad.Communicator.from_torch()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
make = telegrad.DiLoCo.sparse if "--sparse" in sys.argv else telegrad.DiLoCo
diloco = make(model, comm, optimizer, every=30)  # the training loop below is that of one machine
before = comm.stats()["bytes_sent"]  # rank 0 has sent its parameters

generator = torch.Generator().manual_seed(comm.rank)  # each replica has its own data
for _ in range(200):
    inputs = torch.randn(32, 256, generator=generator)
    targets = inputs[:, :10].argmax(dim=1)
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
diloco.exchange()  # the steps since the last round

with torch.no_grad():
    inputs = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1000))
    loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
if comm.rank == 0:
    sent = comm.stats()["bytes_sent"] - before
    print(f"{diloco.rounds} rounds: held-out loss {loss:.3f}, {sent / 1e6:.2f} MB sent")
comm.close()
