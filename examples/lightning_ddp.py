"""Lightning's Trainer over telegrad: the one argument that changes.

Run: pip install 'telegrad[lightning]'; torchrun --nproc-per-node 2 examples/lightning_ddp.py
"""

import pytorch_lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from telegrad import TopK
from telegrad.integrations.lightning import GradientExchange


class Network(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> DataLoader:
    """Lightning gives each rank its part of them."""
    inputs = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), batch_size=32)


def main(folder: str = "lightning_ddp") -> None:
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[GradientExchange(compress=TopK(density=0.05))],  # this one; checkpoints have its residuals
        max_epochs=5,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    network = Network()
    trainer.fit(network, batches())
    if trainer.is_global_zero:
        print(f"loss {sum(network.losses[:8]) / 8:.3f} at first, {sum(network.losses[-8:]) / 8:.3f} at last")


if __name__ == "__main__":
    main()
