"""What test_named_backend.py starts: trainers that are given the name of the backend, and nothing else.

Nothing here imports telegrad; torch does when it makes the group. ``named_backend_program.py plain`` is a rank of
torchrun's. ``named_backend_program.py each TRAINER …`` imports the trainers' packages and forks two ranks for each:
these imports take longer than all that the ranks do.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

NAME = "telegrad"
INPUTS = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), labels)}


def batches() -> DataLoader:
    return DataLoader(TensorDataset(INPUTS, INPUTS[:, :1].abs()), batch_size=8)


def check(model: torch.nn.Module) -> None:
    """The group is telegrad's, DDP trained over it, and both ranks have the same weights, which are not the first."""
    assert dist.get_backend() == NAME
    assert type(dist.group.WORLD).__module__ == "telegrad.torch_backend.process_group"
    assert isinstance(model, DistributedDataParallel), type(model)
    weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights)
    assert torch.equal(gathered[0], gathered[1])
    assert not torch.equal(weights, torch.cat([parameter.detach().view(-1) for parameter in Network().parameters()]))


def plain() -> None:
    dist.init_process_group(NAME)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches():
        optimizer.zero_grad()
        model(inputs + dist.get_rank(), labels)["loss"].backward()
        optimizer.step()
    check(model)


def like_a_gpu() -> None:
    """Accelerate takes the way of machines with GPUs, for tensors of the CPU."""
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    torch.cuda.is_available = lambda: True


def accelerate() -> None:
    import accelerate.accelerator
    from accelerate.utils import InitProcessGroupKwargs

    like_a_gpu()
    accelerator = accelerate.Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=NAME)])
    train_with(accelerator)


def accelerate_on_cpu() -> None:
    """Accelerate refuses the name with ``cpu=True``, and takes a group that is there already."""
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import InitProcessGroupKwargs

    with pytest.raises(ValueError, match="backend telegrad is not .*, please use gloo"):
        accelerate.Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=NAME)])
    AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group(NAME)
    train_with(accelerate.Accelerator(cpu=True))


def train_with(accelerator: object) -> None:
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(network, optimizer, batches())
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(model(inputs, labels)["loss"])
        optimizer.step()
    check(model)


def lightning() -> None:
    import pytorch_lightning
    from pytorch_lightning.strategies import DDPStrategy

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.network(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self) -> None:
            check(self.trainer.strategy.model)

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=NAME),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), batches())


def transformers() -> None:
    import accelerate.accelerator  # noqa: F401  (it asks for CUDA's kernels while it is loaded)

    like_a_gpu()
    train_by_transformers(ddp_backend=NAME, use_cpu=False, dataloader_pin_memory=False)


def transformers_on_cpu() -> None:
    dist.init_process_group(NAME)
    train_by_transformers(use_cpu=True)


def train_by_transformers(**options: object) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "unused",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        learning_rate=0.1,
        optim="sgd",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    samples = [{"inputs": one, "labels": one[:1].abs()} for one in INPUTS]
    trainer = Trainer(Network(), arguments, train_dataset=samples)
    trainer.train()
    check(trainer.model_wrapped)


TRAINERS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (plain, accelerate, accelerate_on_cpu, lightning, transformers, transformers_on_cpu)
}

PACKAGES = ("accelerate.accelerator", "pytorch_lightning", "transformers")
RANKS = 2


def run(trainer: str) -> None:
    assert "telegrad" not in sys.modules
    TRAINERS[trainer]()
    print(f"{trainer}: trained over telegrad", flush=True)
    dist.destroy_process_group()


def forked(trainer: str, rank: int, port: int) -> int:
    """A process of its own, with the environment that torchrun gives a rank."""
    if child := os.fork():
        return child
    status = 1
    try:
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
        os.environ |= {name: str(value) for name, value in given.items()}
        run(trainer)
        status = 0
    except BaseException:
        print(f"{trainer}:", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def run_each(trainers: list[str]) -> None:
    for package in PACKAGES:
        if find_spec(package.partition(".")[0]):
            importlib.import_module(package)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the imports started {threads - 1} threads, which a forked rank would not have"
    for trainer in trainers:
        with socket.socket() as held:  # without listening, so that nobody else gets the port
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
            for child in [forked(trainer, rank, held.getsockname()[1]) for rank in range(RANKS)]:
                os.waitpid(child, 0)


if __name__ == "__main__":
    if sys.argv[1] == "each":
        run_each(sys.argv[2:])
    else:
        run(sys.argv[1])
