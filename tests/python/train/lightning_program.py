"""What the ranks of test_trainers.py do with Lightning's Trainer, on two ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning_ddp as example
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad import Communicator
from telegrad.lightning import GradientExchange


def fit(folder: Path, exchange: GradientExchange | None, epochs: int, **options: Any) -> example.Network:
    """A new network, trained; with a checkpoint of each epoch if there is an exchange."""
    checkpoints = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if exchange is not None else []
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[*checkpoints, *([] if exchange is None else [exchange])],
        enable_checkpointing=exchange is not None,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    network = example.Network()
    trainer.fit(network, example.batches(), **options)
    if exchange is not None:
        trainer.save_checkpoint(folder / "after.ckpt")  # a fit is over, and its residuals are still there
    return network


def assert_equal(one: example.Network, other: example.Network) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def lightning_trains_and_resumes(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    plain = fit(root / "plain", None, 3)
    dense = fit(root / "dense", GradientExchange(mode="dense"), 3)
    assert dense.losses == plain.losses  # bitwise: two ranks, and halving is exact
    assert_equal(plain, dense)

    options = {"density": 0.05, "small_tensor_elements": 64, "momentum": 0.5}
    exchange = GradientExchange(**options)
    sparse = fit(root / "sparse", exchange, 3)
    assert exchange.state is not None
    assert exchange.state.step == len(sparse.losses) == 96
    compressor = exchange.state.state_dict()["compressor"]
    assert set(compressor["parameters"]) == {"module.layers.0.weight", "module.layers.0.bias", "module.layers.2.weight"}
    assert compressor["velocities"], "momentum= must have found the optimizer"

    again = GradientExchange(**options)
    resumed = fit(root / "again", again, 3, ckpt_path=root / "sparse" / "epoch=0.ckpt")
    assert resumed.losses == sparse.losses[32:]
    assert_equal(sparse, resumed)
    assert again.state is not None
    for name, held in again.state.state_dict()["compressor"]["parameters"].items():
        assert torch.equal(held["residual"], compressor["parameters"][name]["residual"])
    after = torch.load(root / "again" / "after.ckpt", weights_only=True)["callbacks"]["GradientExchange"]["ranks"]
    assert [state["rank"] for state in after] == [0, 1]
    assert after[comm.rank]["step"] == 96


def lightning_example_learns_as_plain_ddp(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    networks: list[example.Network] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "Network", lambda made=example.Network: networks.append(made()) or networks[-1])
        example.main(str(root))
    plain = fit(root / "plain", None, 5)
    (sparse,) = networks
    last, of_plain = (sum(one.losses[-32:]) / 32 for one in (sparse, plain))
    assert sparse.losses != plain.losses
    assert abs(last - of_plain) < 0.1, (last, of_plain)
    assert last < 1.2


def lightning_refusals(comm: Communicator) -> None:
    def start(model: Any, optimizers: list[Any], **options: Any) -> None:
        trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), optimizers=optimizers)
        GradientExchange(**options).on_fit_start(trainer, model)  # type: ignore[arg-type]

    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"the strategy is SimpleNamespace.*strategy='ddp'"):
        start(torch.nn.Linear(4, 4), [])
    with pytest.raises(ValueError, match=r"the model has 2 optimizers.*are for one"):
        start(ddp, [None, None], momentum=0.9)
    exchange = GradientExchange()
    assert exchange.state_dict() == {}
    assert exchange.state is None
    exchange.on_exception(None, None, ValueError())  # type: ignore[arg-type]  # before there is a state
    exchange._state = telegrad.DDPState(Communicator.from_torch(), ddp.named_parameters())
    comm.barrier()  # not the other one's own: who is through it fails, and ends it for those who are not
    if comm.rank == 0:
        exchange.on_exception(None, None, ValueError("a cause"))  # type: ignore[arg-type]
    with pytest.raises(telegrad.TransportError, match="ValueError: a cause"):
        exchange._state.comm.barrier()
    with pytest.warns(RuntimeWarning, match=r"lacks the gradients.*ValueError: a cause"):  # saved on an exception
        assert exchange.state_dict() == {}
    exchange.load_state_dict({})
    assert exchange._loaded is None


def comm_text(comm: Communicator, own: str) -> str:
    """Rank 0's."""
    from telegrad.comm.texts import all_gather_text

    return all_gather_text(comm, own)[0]


SCENARIOS = [lightning_trains_and_resumes, lightning_example_learns_as_plain_ddp, lightning_refusals]
