"""Training that goes on when processes are killed, and takes in others, without a checkpoint or torchrun.

Run: python examples/lose_ranks.py serve 29500 &      # the store, which must outlive the ranks
     for i in 1 2 3 4; do python examples/lose_ranks.py localhost 29500 4 & done
Kill some of them, and start others by the same line.
"""

import signal
import sys

import torch
from torch.distributed import TCPStore

import telegrad

ALL_RANKS_BATCH = 60  # the same with any number of ranks, so that learning rate and loss curve are too


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part; random numbers belong to a step, not to a rank."""
    inputs = torch.randn(ALL_RANKS_BATCH, 64, generator=torch.Generator().manual_seed(step))[rank::ranks]
    return inputs, inputs[:, :10].argmax(dim=1)


def main(host: str, port: int, ranks: int, steps: int = 2000) -> float:
    """Trains until so many steps are done; returns this rank's last loss."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    comm = telegrad.join(store, ranks)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = 0.0
    with telegrad.Elastic(model, optimizer, comm) as elastic:

        def loss_of() -> torch.Tensor:
            inputs, targets = batch(elastic.steps, elastic.rank, elastic.world_size)
            return torch.nn.functional.cross_entropy(model(inputs), targets)

        while elastic.steps < steps:
            loss = elastic.step(loss_of).item()
            if elastic.rank == 0 and elastic.steps % 100 == 0:
                print(f"step {elastic.steps}, {elastic.world_size} ranks: loss {loss:.3f}", flush=True)
    comm.close()
    return loss


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        server = TCPStore("0.0.0.0", int(sys.argv[2]), is_master=True, wait_for_workers=False)
        signal.pause()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
