"""What the ranks of test_trainers.py do with Hugging Face's Trainer, on two ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers_ddp as example
from lightning_program import comm_text
from safetensors import safe_open
from transformers import Trainer, TrainerCallback, integrations
from transformers.trainer_utils import HPSearchBackend
from varied_options import objects_of

import telegrad
from telegrad import Communicator
from telegrad.ddp import choices
from telegrad.integrations.transformers import FILE, ExchangeCallback, exchange_gradients

SPARSE = {"density": 0.05, "small_elements": 64, "momentum": 0.5}


class Training:
    """As the example, in silence. ``exchange``: its options; none: DDP alone."""

    def __init__(self, folder: Path, exchange: dict[str, Any] | None, epochs: int, **options: Any) -> None:
        settings = {"logging_steps": 1, "num_train_epochs": epochs, "ddp_bucket_cap_mb": 1, "disable_tqdm": True}
        arguments = example.settings(str(folder), **{**settings, **options})
        samples = example.samples()
        self.trainer = Trainer(example.Network(), arguments, train_dataset=samples, eval_dataset=samples[:64])
        self.exchange = None if exchange is None else exchange_gradients(self.trainer, **objects_of(**exchange))

    def run(self, resumed: Path | bool | None = None) -> list[float]:
        """The losses of a training, each of one batch on all ranks."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer.train(resume_from_checkpoint=str(resumed) if isinstance(resumed, Path) else resumed)
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def compressor(self) -> dict[str, Any]:
        assert self.exchange is not None
        assert self.exchange.state is not None
        return self.exchange.state.state_dict()["compressor"]


def assert_equal(one: Training, other: Training) -> None:
    for a, b in zip(one.trainer.model.parameters(), other.trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """What telegrad warns of in between."""
    said: list[str] = []
    choices._told.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += sorted(str(one.message) for one in caught if one.category in (RuntimeWarning, telegrad.ChoiceWarning))


def transformers_trains_and_resumes(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    plain, dense = Training(root / "plain", None, 2), Training(root / "dense", {"compress": None}, 2)
    assert plain.run() == dense.run()  # bitwise: two ranks, and halving is exact
    assert_equal(plain, dense)

    sparse = Training(root / "sparse", SPARSE, 3)
    losses = sparse.run()
    assert sparse.exchange is not None
    assert sparse.exchange.state is not None
    assert sparse.exchange.state.step == len(losses) == 96
    held = sparse.compressor
    assert set(held["parameters"]) == {"module.layers.0.weight", "module.layers.0.bias", "module.layers.2.weight"}
    assert held["velocities"], "momentum= must have found the optimizer"
    with safe_open(root / "sparse" / "checkpoint-96" / FILE, framework="pt") as file:
        states = {rank: json.loads(text) for rank, text in file.metadata().items()}
        assert {rank: state["step"] for rank, state in states.items()} == {"rank0": 96, "rank1": 96}
        assert not torch.equal(file.get_tensor("rank0"), file.get_tensor("rank1"))

    again = Training(root / "again", SPARSE, 3)
    assert again.run(root / "sparse" / "checkpoint-32") == losses  # the log is part of a checkpoint
    assert_equal(sparse, again)
    for name, one in again.compressor["parameters"].items():
        assert one["residual"].any()
        assert torch.equal(one["residual"], held["parameters"][name]["residual"])

    last = Training(root / "sparse", SPARSE, 4, save_only_model=True)
    assert len(last.run(True)) == 128  # from the last one in the folder
    assert last.exchange is not None
    assert last.exchange.state is not None
    assert last.exchange.state.step == 128
    assert not (root / "sparse" / "checkpoint-128" / FILE).exists()


def transformers_accumulates_and_evaluates(comm: Communicator) -> None:
    """A step of several batches is one sum, and evaluations between steps are none."""
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "save_strategy": "no"}
    plain, dense = (Training(root, exchange, 1, **options) for exchange in (None, {"compress": None}))
    assert plain.run() == dense.run()
    assert_equal(plain, dense)
    assert dense.exchange is not None
    assert dense.exchange.state is not None
    assert dense.exchange.state.step == 16


def transformers_goes_on_in_the_next_training(comm: Communicator) -> None:
    """Of the same model, with the wrapped model of the first; what cannot go on is told."""
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    training = Training(root / "twice", {**SPARSE, "timeout_s": 100.0}, 1)
    with warned() as said:
        training.run()
        assert training.exchange is not None
        first = training.exchange.state
        assert first is not None
        before = {name: one["residual"].clone() for name, one in training.compressor["parameters"].items()}
        begun: list[dict[str, torch.Tensor]] = []

        class Look(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                parameters = training.compressor["parameters"]
                begun.append({name: one["residual"].clone() for name, one in parameters.items()})

        training.trainer.add_callback(Look())
        training.run()
    assert said == []
    assert training.exchange.state is not first
    assert training.exchange.state is not None
    assert training.exchange.state.step == 64
    for name, residual in before.items():
        assert residual.any()
        assert torch.equal(residual, begun[0][name])

    plain = Training(root / "plain", None, 1)
    plain.run()
    with warned() as said:
        training.run(root / "plain" / "checkpoint-32")
    assert len(said) == 2 + (comm.rank == 0)
    assert re.search(r"a residual of norm .* the checkpoint .*checkpoint-32 has no telegrad.safetensors", said[0])
    lost = r"checkpoint-32 has no telegrad.safetensors, so gradients that were not sent yet are lost: resume from one"
    assert comm.rank != 0 or re.search(lost, said[-1])

    training.trainer.model_init = example.Network
    training.trainer.args.num_train_epochs = 1
    training.run()
    with warned() as said:
        training.run()
    assert len(said) == 2
    assert "the training before was of another model" in said[0]


def transformers_best_model(comm: Communicator) -> None:
    """What waits belongs to the last weights, not to the best ones that are read at the end."""
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    for greater, count in ((True, 2), (False, 0)):  # of losses that fall the greatest is the first one
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": greater}
        training = Training(root, SPARSE, 2, eval_strategy="epoch", **best)
        training.run()
        arguments = training.trainer.args
        arguments.load_best_model_at_end, arguments.max_steps = False, 1
        with warned() as said:
            training.run()
        assert len(said) == count  # residual and velocity
        assert all("load_best_model_at_end has brought other weights" in one for one in said)


def transformers_evaluates_first(comm: Communicator) -> None:
    """Accelerate would not wrap a model that it has prepared for evaluation."""
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    plain = Training(root, None, 1, bf16=True, max_steps=4)
    dense = Training(root, {"compress": None}, 1, bf16=True, max_steps=4)
    with contextlib.redirect_stdout(io.StringIO()):
        dense.trainer.evaluate()
    assert plain.run() == dense.run()
    assert_equal(plain, dense)


def transformers_copies_and_searches(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    training = Training(root, SPARSE, 1, max_steps=4)
    trainer = copy.deepcopy(training.trainer)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    assert (trainer.state.global_step, training.trainer.state.global_step) == (4, 0)

    trainer = training.trainer
    trainer.model_init, trainer.hp_search_backend = example.Network, HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: trial.params
    found: list[bool] = []

    class Uploads(TrainerCallback):
        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            found.append((root / f"run-{number}" / f"checkpoint-{state.global_step}" / FILE).exists())

    trainer.callback_handler.callbacks.insert(1, Uploads())  # as those that the trainer was made with
    with warned() as said, contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrations, "hp_params", lambda trial: trial.params)  # it asks optuna, which need not be here
        for number in range(2):
            trainer.train(trial=SimpleNamespace(number=number, params={}))
    assert said == []
    assert found == [True, True] or comm.rank != 0

    assert training.exchange is not None
    trainer.remove_callback(training.exchange)
    with pytest.raises(ValueError, match="was removed from the trainer, but its model keeps the hook: make a new"):
        trainer.train()
    with pytest.raises(ValueError, match="once, and make a new Trainer for other options"):
        exchange_gradients(trainer)


def transformers_resumes_other_options(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    for folder, exchange in (("sparse", SPARSE), ("plain", None)):
        Training(root / folder, exchange, 1, max_steps=2, save_strategy="steps", save_steps=2).run()
    with pytest.raises(ValueError, match=rf"checkpoint-2.{FILE} does not fit: state has .*; or remove the file"):
        Training(root / "sparse", {"compress": None}, 1, max_steps=4).run(True)
    with warned() as said:
        Training(root / "plain", {"compress": None}, 1, max_steps=4, save_strategy="no").run(True)
    assert said == []  # nothing waits in dense training
    with pytest.raises(ValueError, match="optimizer is AdamW: momentum= is for SGD"):
        Training(root, SPARSE, 1, optim="adamw_torch").run()


def transformers_example_learns_as_plain_ddp(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    losses = Training(root / "plain", None, 5).run()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        example.main(str(root / "sparse"))
    if comm.rank == 0:
        ((first, last),) = re.findall(r"loss ([\d.]+) at first, ([\d.]+) at last", said.getvalue())
        of_plain = sum(losses[-16:]) / 16
        assert abs(float(last) - of_plain) < 0.1, (last, of_plain)
        assert float(last) < float(first) / 2


def transformers_refusals(comm: Communicator) -> None:
    root = Path(comm_text(comm, tempfile.mkdtemp()))
    for option in ("densty", "comm"):
        with pytest.raises(TypeError, match=rf"exchange_gradients\(\) has no argument '{option}'"):
            Training(root, {option: 0.1}, 1)
    with pytest.raises(TypeError, match=r"trainer is a Network: it must be a transformers\.Trainer"):
        exchange_gradients(example.Network())  # type: ignore[arg-type]
    training = Training(root, {}, 1)
    with pytest.raises(ValueError, match="exchanges its gradients already"):
        exchange_gradients(training.trainer)
    with pytest.raises(ValueError, match="timeout_s=-1"):
        Training(root, {"timeout_s": -1}, 1).run()

    def begin(world_size: int, model: torch.nn.Module) -> None:
        arguments = SimpleNamespace(world_size=world_size)
        trainer: Any = SimpleNamespace(model_wrapped=model, args=arguments)
        trainer.train = None
        ExchangeCallback(trainer, {}).on_train_begin(arguments, None, None)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"trains a Linear.*leave fsdp and deepspeed out"):
        begin(2, torch.nn.Linear(4, 4))
    with pytest.warns(RuntimeWarning, match=r"runs in one process.*torchrun --nproc-per-node 2 "):
        begin(1, torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)))  # torchrun --nproc-per-node 1
    for exchange, count in ((SPARSE, 1), ({"compress": None}, 0)):
        with warned() as said:
            Training(root, exchange, 1, max_grad_norm=1.0, max_steps=1).run()
        assert len(said) == (count if comm.rank == 0 else 0)
        assert all(re.search(r"clips averaged gradients to a norm of 1, .*max_grad_norm=0", one) for one in said)
    _damaged_checkpoints(comm, root)
    _ends_on_all_ranks(comm, root)


def _damaged_checkpoints(comm: Communicator, root: Path) -> None:
    training = Training(root / "damaged", SPARSE, 1)
    training.run()
    file = root / "damaged" / "checkpoint-32" / FILE
    comm.barrier()
    if comm.rank == 0:
        file.write_bytes(file.read_bytes()[:100])
    comm.barrier()
    with pytest.raises((ValueError, telegrad.TransportError), match=r"telegrad.safetensors is damaged: remove it"):
        Training(root / "damaged", SPARSE, 2).run(True)
    comm.barrier()
    own = Path(tempfile.mkdtemp()) / "checkpoint-32"  # each rank has a folder of its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExchangeCallback, "_checkpoint", lambda *_: own)
        if comm.rank == 1:
            own.mkdir()
            (own / FILE).touch()
        with pytest.raises((ValueError, telegrad.TransportError), match=r"rank 0 does not find .*, which rank 1 has"):
            Training(root / "apart", SPARSE, 1).run()


def _ends_on_all_ranks(comm: Communicator, root: Path) -> None:
    """What fails on one rank."""

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if comm.rank == 1 and state.global_step == 3:
                raise KeyError("a cause")

    training = Training(root / "fails", {"compress": None}, 1, logging_steps=1000)  # losses would be gathered by Gloo
    training.trainer.add_callback(Fails())
    # DDP makes a RuntimeError of what its hook raises.
    kind, says = (RuntimeError, "PeerFailed.*KeyError: .a cause.") if comm.rank == 0 else (KeyError, "a cause")
    with pytest.raises(kind, match=says):
        training.run()


SCENARIOS = [
    transformers_trains_and_resumes,
    transformers_accumulates_and_evaluates,
    transformers_goes_on_in_the_next_training,
    transformers_best_model,
    transformers_evaluates_first,
    transformers_copies_and_searches,
    transformers_resumes_other_options,
    transformers_example_learns_as_plain_ddp,
    transformers_refusals,
]
