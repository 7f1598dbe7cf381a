"""DistributedDataParallel over telegrad: the one line that changes.

Run: torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telegrad

dist.init_process_group("gloo")
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
model = DistributedDataParallel(network)

comm = telegrad.Communicator.from_torch()
model.register_comm_hook(telegrad.DDPState(comm, model), telegrad.ddp_hook)  # this one

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(200):
    inputs = torch.randn(32, 256, generator=generator)
    targets = inputs[:, :10].argmax(dim=1)
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 50 == 49:
        sent = comm.stats()["bytes_sent"]
        print(f"step {step + 1}: loss {loss.item():.3f}, {sent / 1e6:.2f} MB sent so far")

comm.close()
dist.barrier()  # else Gloo may hang as it is destroyed
dist.destroy_process_group()
