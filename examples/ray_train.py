"""Ray Train over telegrad: each worker keeps its residuals in the checkpoint, so that training resumes after a failure.

Run: pip install 'telegrad[torch]' 'ray[train]'; python examples/ray_train.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

import telegrad

EVERY = 20  # steps between two checkpoints


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step, the same after a restart."""
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
    return inputs, inputs[:, :10].argmax(dim=1)


def train(config: dict[str, Any]) -> None:
    """Every worker runs it; Ray has made torch's process group before."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    comm = telegrad.Communicator.from_torch()
    state = telegrad.DDPState(comm, model, compress=telegrad.TopK(0.05))
    model.register_comm_hook(state, telegrad.ddp_hook)

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            shared = torch.load(Path(folder, "model.pt"), weights_only=True)
            model.load_state_dict(shared["model"])
            optimizer.load_state_dict(shared["optimizer"])
            state.load_state_dict(torch.load(Path(folder, f"telegrad-{rank}.pt"), weights_only=True))

    while state.step < config["steps"]:
        inputs, targets = batch(state.step, rank)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state.state_dict(), Path(folder, f"telegrad-{rank}.pt"))  # a name of this worker's own
                if rank == 0:
                    torch.save(
                        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "model.pt")
                    )
                metrics = {"step": state.step, "loss": loss.item()}
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
    comm.close()


def run(folder: Path, steps: int, backend: str = "telegrad", loop: Any = train) -> ray.train.Result:
    """Trains on two workers of this machine; after a failure from the last checkpoint, once."""
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"steps": steps},
        torch_config=ray.train.torch.TorchConfig(backend=backend),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(
            name=backend,
            storage_path=str(folder.resolve()),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    ray.init(include_dashboard=False)
    result = run(Path(sys.argv[1] if len(sys.argv) > 1 else "ray_train"), steps=200)
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.3f}, kept in {result.checkpoint.path}")
