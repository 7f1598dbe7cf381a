"""DistributedDataParallel on GPUs, one for each rank, with checkpoints; without GPUs it trains on the CPU.

Run: pip install 'telegrad[gpu]'; CUDA_DEVICE_MAX_CONNECTIONS=32 torchrun --nproc-per-node 2 examples/ddp_gpu.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telegrad


def device_of_this_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main(folder: str = "ddp_gpu") -> None:
    device = device_of_this_rank()
    # With NCCL what is not compressed goes by it, where each rank has a GPU of its own.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    comm = telegrad.Communicator.from_torch()
    state = telegrad.DDPState(comm, model)
    model.register_comm_hook(state, telegrad.ddp_hook)

    path = Path(folder, f"rank{comm.rank}.pt")  # each rank's own: what it has not sent yet is part of the training
    if path.exists():
        kept = torch.load(path, map_location="cpu", weights_only=True)
        network.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        state.load_state_dict(kept["telegrad"])
    generator = torch.Generator().manual_seed(1000 * state.step + comm.rank)
    for _ in range(100):
        inputs = torch.randn(32, 256, generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state.synchronize()  # waits for the GPU, and raises what has gone wrong by now
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "telegrad": state.state_dict()}
    torch.save(kept, path)
    if comm.rank == 0:
        sent = comm.stats()["bytes_sent"]
        print(f"step {state.step} on {device.type}: loss {loss.item():.3f}, {sent / 1e6:.2f} MB sent, kept in {folder}")
    comm.close()
    dist.barrier()  # else Gloo may hang as it is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
