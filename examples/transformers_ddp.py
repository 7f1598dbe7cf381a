"""Hugging Face's Trainer over telegrad: the one line that is added.

Run: pip install 'telegrad[transformers]'; torchrun --nproc-per-node 2 examples/transformers_ddp.py
"""

from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from telegrad import TopK
from telegrad.integrations.transformers import exchange_gradients


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples() -> list[dict[str, Any]]:
    inputs = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    return [{"inputs": one, "labels": int(one[:10].argmax())} for one in inputs]


def settings(folder: str, **options: Any) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 32,
        "num_train_epochs": 5,
        "logging_steps": 16,
        "save_strategy": "epoch",
        "report_to": "none",
        "max_grad_norm": 0.0,  # what is sent holds gradients of several steps: not to be cut off
    }
    return TrainingArguments(folder, **{**defaults, **options})


def main(folder: str = "transformers_ddp") -> None:
    trainer = Trainer(Network(), settings(folder), train_dataset=samples())
    exchange_gradients(trainer, compress=TopK(density=0.05))  # this one; checkpoints have its residuals
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


if __name__ == "__main__":
    main()
