"""Accelerate over telegrad: the three lines that are added.

Run: pip install 'telegrad[accelerate]'; torchrun --nproc-per-node 2 examples/accelerate_ddp.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import telegrad


def batches() -> DataLoader:
    """Accelerate gives each rank its part of them."""
    inputs = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=32)


def main(folder: str = "accelerate_ddp") -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model, optimizer, loader = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), batches())

    state = telegrad.DDPState(telegrad.Communicator.from_torch(), model, compress=telegrad.TopK(0.05))  # these
    model.register_comm_hook(state, telegrad.ddp_hook)
    accelerator.register_for_checkpointing(telegrad.ddp.GatheredState(state))  # checkpoints have its residuals

    losses = []
    for _ in range(5):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(folder)
    accelerator.print(f"loss {sum(losses[:8]) / 8:.3f} at first, {sum(losses[-8:]) / 8:.3f} at last")

    state.comm.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
