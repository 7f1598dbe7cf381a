"""What the ranks of test_trainers.py do with Lightning's Trainer, on two ranks."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning_ddp as example
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from torch.nn.parallel import DistributedDataParallel
from varied_options import objects_of

import telegrad
from telegrad import Communicator
from telegrad.ddp import choices
from telegrad.integrations.lightning import GradientExchange

CLIPS = "clips averaged gradients to a norm of 0.5, .*gradient_clip_val=None.*clip_norm=0.5"
LOST = r"plain.ckpt has no state of GradientExchange, so gradients that were not sent yet are lost: resume from one"


def fit(
    folder: Path, exchange: GradientExchange | None, epochs: int, *, saves: Path | None = None, **options: Any
) -> example.Network:
    """A new network, trained; with a checkpoint of each epoch if there is an exchange. ``saves``: one at the end."""
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
    if saves is not None:
        trainer.save_checkpoint(saves)
    return network


def assert_equal(one: example.Network, other: example.Network) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def lightning_trains_and_resumes(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    plain = fit(root / "plain", None, 3)
    dense = fit(root / "dense", GradientExchange(compress=None), 3)
    assert dense.losses == plain.losses  # bitwise: two ranks, and halving is exact
    assert_equal(plain, dense)

    options = {"density": 0.05, "small_elements": 64, "momentum": 0.5}
    exchange = GradientExchange(**objects_of(**options))
    sparse = fit(root / "sparse", exchange, 3)
    assert exchange.state is not None
    assert exchange.state.step == len(sparse.losses) == 96
    compressor = exchange.state.state_dict()["compressor"]
    assert set(compressor["parameters"]) == {"module.layers.0.weight", "module.layers.0.bias", "module.layers.2.weight"}
    assert compressor["velocities"], "momentum= must have found the optimizer"

    again = GradientExchange(**objects_of(**options))
    resumed = fit(root / "again", again, 3, ckpt_path=root / "sparse" / "epoch=0.ckpt")
    assert resumed.losses == sparse.losses[32:]
    assert_equal(sparse, resumed)
    assert again.state is not None
    for name, held in again.state.state_dict()["compressor"]["parameters"].items():
        assert torch.equal(held["residual"], compressor["parameters"][name]["residual"])
    after = torch.load(root / "again" / "after.ckpt", weights_only=True)["callbacks"]["GradientExchange"]["ranks"]
    assert [state["rank"] for state in after] == [0, 1]
    assert after[comm.rank]["step"] == 96


def lightning_goes_on_in_the_next_fit(comm: Communicator) -> None:
    """With the same model and GradientExchange; what cannot go on is told."""
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    options = {"density": 0.05, "small_elements": 64, "momentum": 0.5}
    whole = fit(root / "whole", GradientExchange(**objects_of(**options)), 2)
    exchange = GradientExchange(**objects_of(timeout_s=100.0, **options))

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[exchange],
        enable_checkpointing=False,
        max_epochs=0,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def go_on(network: example.Network, **more: Any) -> list[str]:
        """What was warned of in another epoch; one trainer makes all, as samplers draw by the number of the epoch."""
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 1
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(network, example.batches(), **more)
        return sorted(str(one.message) for one in said if "does not go on" in str(one.message))

    network = example.Network()
    assert go_on(network) == []
    assert go_on(network) == []
    assert network.losses == whole.losses
    assert_equal(network, whole)
    assert exchange.state is not None
    assert exchange.state.step == 64

    network.layers[0].weight.requires_grad_(False)
    lost = go_on(network)
    assert len(lost) == 2  # residual and velocity
    assert "a residual of norm " in lost[0]
    assert "of 1 parameters, such as 'module.layers.0.weight'" in lost[0]
    assert exchange.state.step == 96
    lost = go_on(example.Network())
    assert len(lost) == 2
    assert "the fit before was of another model" in lost[0]

    network, other = example.Network(), example.Network()
    go_on(network)
    read = [exchange.state_dict()]  # of all ranks on rank 0, which writes the file that all read
    torch.distributed.broadcast_object_list(read)
    for _ in range(2):  # as trainer.validate(other, ckpt_path=…) does
        exchange.on_load_checkpoint(trainer, other, {})
        exchange.load_state_dict(read[0])
    assert go_on(network) == []
    assert exchange.state.step == 64
    lost = go_on(other)  # with what was read for it, of step 32
    assert len(lost) == 2
    assert "the fit before was of another model" in lost[0]
    assert exchange.state.step == 64

    network = example.Network()
    plain = root / "plain.ckpt"
    fit(root / "plain", None, 1, saves=plain)
    go_on(network)
    lost = go_on(network, ckpt_path=plain)
    assert len(lost) == 2
    assert "the checkpoint has other weights, and nothing that waits" in lost[0]

    choices._told.clear()
    with contextlib.nullcontext() if comm.rank else pytest.warns(telegrad.ChoiceWarning, match=LOST):
        fit(root / "without", GradientExchange(compress=telegrad.TopK(0.05)), 2, ckpt_path=plain)


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
        GradientExchange(**objects_of(**options)).on_fit_start(trainer, model)  # type: ignore[arg-type]

    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"the strategy is SimpleNamespace.*strategy='ddp'"):
        start(torch.nn.Linear(4, 4), [])
    with pytest.raises(ValueError, match=r"the model has 2 optimizers.*are for one"):
        start(ddp, [None, None], momentum=0.9)
    with pytest.raises(ValueError, match="timeout_s=-1"):
        start(ddp, [], timeout_s=-1)
    for option in ("densty", "comm"):
        with pytest.raises(TypeError, match=f"GradientExchange has no argument '{option}'"):
            GradientExchange(**objects_of(**{option: 0.1}))
    _what_trainers_say(comm)
    exchange = GradientExchange()
    assert exchange.state_dict() == {}
    assert exchange.state is None
    exchange.on_exception(None, None, ValueError())  # type: ignore[arg-type]  # before there is a state
    exchange._state = telegrad.DDPState(Communicator.from_torch(), ddp)
    comm.barrier()  # not the other one's own: who is through it fails, and ends it for those who are not
    if comm.rank == 0:
        exchange.on_exception(None, None, ValueError("a cause"))  # type: ignore[arg-type]
    with pytest.raises(telegrad.TransportError, match="ValueError: a cause"):
        exchange._state.comm.barrier()
    with pytest.warns(RuntimeWarning, match=r"lacks the gradients.*ValueError: a cause"):  # saved on an exception
        assert exchange.state_dict() == {}
    exchange.load_state_dict({})
    assert exchange._loaded is None


def _what_trainers_say(comm: Communicator) -> None:
    """Of the scaler and of the processes; and options of from_torch() reach it."""

    def start(
        options: dict[str, Any], launcher: Any = None, scaler: Any = None, clips: float | None = None
    ) -> telegrad.DDPState:
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        trainer = SimpleNamespace(
            strategy=SimpleNamespace(model=ddp, launcher=launcher),
            optimizers=[],
            gradient_clip_val=clips,
            precision_plugin=SimpleNamespace(scaler=scaler),
            is_global_zero=True,
        )
        exchange = GradientExchange(**objects_of(**options))
        exchange.on_fit_start(trainer, ddp)  # type: ignore[arg-type]
        assert exchange.state is not None
        exchange.state.comm.barrier()
        exchange.state.comm.close()
        return exchange.state

    scaler = torch.amp.GradScaler("cpu")
    state = start({"liveness_timeout_s": 9.0, "join_timeout_s": 100.0, "tuning": None}, scaler=scaler)
    assert (state._averaging.nonfinite, state._scales._scaler) == ("skip", scaler)
    assert state.comm._options.liveness_timeout_s == 9.0
    assert start({}, scaler=torch.amp.GradScaler("cpu", enabled=False))._averaging.nonfinite == "raise"
    assert start({"nonfinite": "send"}, scaler=scaler)._averaging.nonfinite == "send"
    assert start({"scaler": None}, scaler=scaler)._scales._scaler is None
    launcher = object.__new__(_MultiProcessingLauncher)
    with pytest.warns(RuntimeWarning, match="end with fit, and with them what they have not sent.*strategy='ddp'"):
        start({}, launcher=launcher)
    choices._told.clear()
    with contextlib.nullcontext() if comm.rank else pytest.warns(telegrad.ChoiceWarning, match=CLIPS):
        start({}, clips=0.5)
    choices._told.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("error", telegrad.ChoiceWarning)
        start({"compress": None}, launcher=launcher, clips=0.5)


def comm_text(comm: Communicator, own: str) -> str:
    """Rank 0's."""
    from telegrad.communicator.texts import all_gather_text

    return all_gather_text(comm, own)[0]


SCENARIOS = [
    lightning_trains_and_resumes,
    lightning_example_learns_as_plain_ddp,
    lightning_goes_on_in_the_next_fit,
    lightning_refusals,
]
