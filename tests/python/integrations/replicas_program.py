"""A replica of test_replicas_in_trainers.py, in a process of its own: DiLoCo in the loops of trainers, which accumulate
the gradients of two batches in each step."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

import telegrad
from telegrad import DiLoCo
from telegrad.diloco import ReplicaGroup

STEPS, EVERY = 12, 4
Batch = tuple[torch.Tensor, torch.Tensor]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def data(replica: int) -> TensorDataset:
    inputs = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(replica))
    return TensorDataset(inputs, inputs[:, :3].abs())


def by_hand(replica: int, group: ReplicaGroup) -> DiLoCo:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    diloco = DiLoCo(model, group, optimizer, every=EVERY)
    for number, (inputs, targets) in enumerate(DataLoader(data(replica), 4)):
        (torch.nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return diloco


def accelerate(replica: int, group: ReplicaGroup) -> DiLoCo:
    """With the optimizer that Accelerate has wrapped."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 0.01), DataLoader(data(replica), 4)
    )
    diloco = DiLoCo(model, group, optimizer, every=EVERY)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return diloco


def pytorch_lightning(replica: int, group: ReplicaGroup) -> DiLoCo:
    import pytorch_lightning as lightning

    class Network(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.layers.parameters(), 0.01)

        def on_fit_start(self) -> None:
            self.diloco = DiLoCo(self, group, self.optimizers(), every=EVERY)

    module = Network()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(replica), 4))
    return module.diloco


def transformers(replica: int, group: ReplicaGroup) -> DiLoCo:
    from transformers import Trainer, TrainingArguments

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return None

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    diloco = DiLoCo(model, group, optimizer, every=EVERY)
    dataset = [{"inputs": inputs, "labels": targets} for inputs, targets in data(replica)]
    InOrder(model, arguments, train_dataset=dataset, optimizers=(optimizer, None)).train()
    return diloco


def main(port: str, replica: str, *trainers: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    for name in ("by_hand", *trainers):
        train: Callable[[int, ReplicaGroup], DiLoCo] = globals()[name]
        try:
            diloco = train(int(replica), ReplicaGroup(store, 2, name=name))
            print(f"{name}: {diloco.rounds} rounds, {diloco.checksum()}")
            diloco.close()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
            raise


if __name__ == "__main__":
    assert telegrad
    main(*sys.argv[1:])
