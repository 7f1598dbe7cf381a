"""Training that goes on with another number of ranks, and loses none of the gradient that waits.

Run: torchrun --nproc-per-node 4 examples/elastic.py elastic 40
     torchrun --nproc-per-node 3 examples/elastic.py elastic 80   # goes on from the last checkpoint
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad.ddp import RankState, load_resharded

ALL_RANKS_BATCH = 60  # the same with any number of ranks, so that learning rate and loss curve are too
EVERY = 20


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part; random numbers belong to a step, not to a rank."""
    inputs = torch.randn(ALL_RANKS_BATCH, 64, generator=torch.Generator().manual_seed(step))
    inputs = inputs[dist.get_rank() :: dist.get_world_size()]
    return inputs, inputs[:, :10].argmax(dim=1)


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is whole: its metadata is written last."""
    whole = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(whole, default=None, key=lambda path: int(path.name.removeprefix("step-")))


def main(folder: Path, steps: int) -> list[float]:
    """Trains until so many steps are done, also by others before; returns the mean loss of all ranks, by step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = telegrad.Communicator.from_torch()
    state = telegrad.DDPState(comm, model, compress=telegrad.TopK(0.05))
    model.register_comm_hook(state, telegrad.ddp_hook)

    checkpoint = newest(folder)
    if checkpoint is not None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        load_resharded(state, checkpoint)  # what all ranks of then have not sent, in equal shares
        if comm.rank == 0:
            print(f"goes on from {checkpoint} on {comm.world_size} ranks", flush=True)

    losses = []
    while state.step < steps:
        inputs, targets = batch(state.step)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        comm.all_reduce(mean, "avg")
        losses.append(mean.item())
        if state.step % EVERY == 0:
            if comm.rank == 0:
                print(f"step {state.step}: loss {sum(losses[-EVERY:]) / len(losses[-EVERY:]):.3f}", flush=True)
            weights, moments = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": moments, "telegrad": RankState(state)}
            dcp.save(saved, checkpoint_id=folder / f"step-{state.step}")
    comm.close()
    dist.barrier()  # else Gloo may hang as it is destroyed
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "elastic"), int(sys.argv[2]) if len(sys.argv) > 2 else 120)
