"""Hugging Face's Trainer with telegrad's hook: ``exchange_gradients(trainer)`` before its ``train()``.

Needs transformers. Trainers that derive from its Trainer do as well.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from telegrad.communicator import Communicator
from telegrad.ddp import DDPState, GatheredState, ddp_hook
from telegrad.ddp.bucket import GradBucket
from telegrad.ddp.checkpoint import packed, unpacked
from telegrad.ddp.choices import tell_of_resuming
from telegrad.integrations.trainers import (
    close_for_next,
    divided_options,
    go_on,
    may_wait,
    warn_of_clipping,
    warn_of_loss,
    with_found,
)

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError as missing:
    if missing.name not in ("safetensors", "transformers"):
        raise
    raise ImportError(
        "telegrad.integrations.transformers needs transformers: pip install 'telegrad[transformers]'"
    ) from missing

FILE = "telegrad.safetensors"
"""Of a checkpoint's folder: what all ranks had not sent."""


def exchange_gradients(trainer: Trainer, **options: Any) -> ExchangeCallback:
    """Lets ``trainer`` average gradients with ``ddp_hook`` in every ``trainer.train()`` from now on, and keep what has
    not been sent in its checkpoints.

    ``options``: those of DDPState, and those of ``Communicator.from_torch`` but for its ``group``.
    ``TopK(feedback="steps")`` and ``momentum`` find the trainer's optimizer by themselves; the scaler of ``fp16`` is
    found too, with ``nonfinite="skip"``, unless these are given.

    Each checkpoint with an optimizer's state has the residuals of all ranks in ``telegrad.safetensors``, which rank 0
    writes (``GatheredState``); ``train(resume_from_checkpoint=…)`` restores them on any number of ranks. What waits
    after a ``train`` goes on in the next one of the same model. What cannot go on, as another model has come, a
    parameter was frozen, a checkpoint without it was read or ``load_best_model_at_end`` has brought other weights, is a
    ``RuntimeWarning`` that says how much it is; in a search of hyperparameters each trial begins without a word. An
    exception in ``train`` ends the other ranks' sums at once.

    The Trainer clips averages to a norm of 1 unless told otherwise, and sparse ones must not be (``RuntimeWarning``):
    give it ``TrainingArguments(max_grad_norm=0)``.

    In a job of one process nothing is exchanged (``RuntimeWarning``). Raises ``TypeError`` for an option that does not
    exist or what is no Trainer, and ``ValueError`` for a trainer that has an exchange. ``train`` raises ``ValueError``
    where the model is not wrapped in DistributedDataParallel, as with ``fsdp`` and ``deepspeed``, where a checkpoint's
    ``telegrad.safetensors`` is damaged, does not fit or is not found by all ranks, and where the callback was removed
    after a ``train``; ``TypeError`` and ``ValueError`` as DDPState does.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer is a {type(trainer).__name__}: it must be a transformers.Trainer")
    if isinstance(getattr(trainer.train, "__self__", None), ExchangeCallback):
        raise ValueError(
            "trainer exchanges its gradients already: call exchange_gradients() once, and make a new Trainer for other "
            "options"
        )
    exchange = ExchangeCallback(trainer, options)
    # The first one, so that callbacks that upload checkpoints, as those of report_to do, find its file there.
    trainer.callback_handler.callbacks.insert(0, exchange)
    vars(trainer)["train"] = exchange.train
    return exchange


class ExchangeCallback(TrainerCallback):
    """What ``exchange_gradients`` has added to a trainer's callbacks."""

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self._joining, self._options = divided_options("exchange_gradients()", options)
        self._trainer = trainer
        self._train = trainer.train
        self._hooked: _Hooked | None = None
        self._module: torch.nn.Module | None = None  # whose gradients these are
        self._moved = False  # what waits is of other weights than the model has
        self._resumed: Any = None  # what train() was told to resume from, until that has been read
        self._trial: Any = None  # of a search of hyperparameters

    @property
    def state(self) -> DDPState | None:
        """Of the last ``train``; ``None`` before the first, and in a job of one process."""
        return None if self._hooked is None else self._hooked.state

    def train(self, *arguments: Any, **named: Any) -> Any:
        """In the place of ``trainer.train``, whose arguments it takes: no event of the Trainer tells which checkpoint
        it resumes from, nor of an exception. A method, so that a copy of the trainer trains the copy.

        Raises ``ValueError`` where this callback was removed after a ``train``: the model would go on with its hook.
        """
        if self._hooked is not None and self not in self._trainer.callback_handler.callbacks:
            raise ValueError(
                "the callback of exchange_gradients() was removed from the trainer, but its model keeps the hook: make "
                "a new Trainer to train without it"
            )
        given = dict(zip(("resume_from_checkpoint", "trial"), arguments, strict=False)) | named
        self._resumed, self._trial = given.get("resume_from_checkpoint"), given.get("trial")
        try:
            _forget_evaluation(self._trainer)
            return self._train(*arguments, **named)
        except BaseException as error:
            if self.state is not None:
                self.state.comm.abort(f"{type(error).__name__}: {error}")
            raise

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer calls it when the model is wrapped, and has the weights of the checkpoint it resumes from; twice
        in a ``train`` that begins anew with another batch size."""
        ddp = self._wrapped()
        if ddp is None:
            warnings.warn(
                "the trainer runs in one process, so no gradients are exchanged: start it with torchrun, as "
                f"torchrun --nproc-per-node 2 {Path(sys.argv[0]).name}",
                RuntimeWarning,
                2,
            )
            return
        checkpoint = self._checkpoint(args)
        optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)  # of Accelerate's around it
        options = with_found(self._options, [optimizer], self._trainer.accelerator.scaler)
        warn_of_clipping(options, args.max_grad_norm, "TrainingArguments(max_grad_norm=0)")
        waiting = None if self._hooked is None else close_for_next(self._hooked.state)
        exchanging = DDPState(Communicator.from_torch(**self._joining), ddp, **options)
        if self._hooked is None or self._hooked.ddp is not ddp:
            self._hooked = _Hooked(ddp, exchanging)
            ddp.register_comm_hook(self._hooked, ddp_hook)
        self._hooked.state = exchanging
        loaded = None if checkpoint is None else _read(exchanging.comm, checkpoint / FILE)
        if checkpoint is not None and loaded is not None:
            try:
                GatheredState(exchanging).load_state_dict(loaded)
            except ValueError as error:
                raise ValueError(
                    f"{checkpoint / FILE} does not fit: {error}; or remove the file, to go on without what was not sent"
                ) from error
        elif checkpoint is not None:
            why = f"the checkpoint {checkpoint} has no {FILE}"
            if waiting is not None:
                warn_of_loss(waiting, why)
            if may_wait(options):
                remedy = "resume from one that was written with exchange_gradients()"
                tell_of_resuming(why, remedy, rank=exchanging.comm.rank)
        elif waiting is not None and self._module is not ddp.module:
            if self._trial is None:  # a search has a model for each trial
                warn_of_loss(waiting, "the training before was of another model")
        elif waiting is not None and self._moved:
            warn_of_loss(waiting, "load_best_model_at_end has brought other weights")
        elif waiting is not None:
            go_on(exchanging, waiting)
        self._module, self._moved = ddp.module, False
        self._resumed = None  # in this train() the weights are read once, however often it begins

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer calls it when it has read the best weights."""
        best = state.best_model_checkpoint is not None and state.best_global_step != state.global_step
        self._moved = args.load_best_model_at_end and best

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The Trainer calls it on all ranks, when the other files of a checkpoint are written."""
        if self.state is None or args.save_only_model:
            return
        gathered = GatheredState(self.state).state_dict()
        if self.state.comm.rank != 0:
            return
        run = Path(self._trainer._get_output_dir(self._trial))  # of a search of hyperparameters each trial has its own
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not folder.is_dir():
            warnings.warn(
                f"the checkpoint of step {state.global_step} is not in {folder}, as the Trainer's are: it lacks the "
                "gradients that were not sent yet",
                RuntimeWarning,
                2,
            )
            return
        _write(gathered, folder / FILE)

    def _wrapped(self) -> DistributedDataParallel | None:
        """The model, as ``train`` has wrapped it; nothing in a job of one process. Raises ``ValueError`` where there
        are several, and it is wrapped otherwise."""
        model = self._trainer.model_wrapped
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if self._trainer.args.world_size == 1:  # torchrun has DDP made of one process too, where it would only compress
            return None
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"the trainer trains a {type(model).__name__}, which is not wrapped in DistributedDataParallel: leave "
                "fsdp and deepspeed out of its TrainingArguments"
            )
        return model

    def _checkpoint(self, args: TrainingArguments) -> Path | None:
        folder = self._resumed
        if folder is True:
            folder = get_last_checkpoint(args.output_dir)  # type: ignore[no-untyped-call]
        return Path(folder) if folder else None


def _forget_evaluation(trainer: Trainer) -> None:
    """Lets ``train`` wrap a model that ``evaluate`` or ``predict`` has used before the first training: Accelerate 1.15
    takes it for prepared, and without DistributedDataParallel each rank would train a model of its own."""
    model = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)  # of torch.compile
    if trainer.args.world_size == 1 or not isinstance(model, torch.nn.Module) or model is not trainer.model:
        return
    if vars(model).pop("_is_accelerate_prepared", False):
        forward = vars(model).pop("_original_forward", None)  # without the autocast that is wrapped around it again
        if forward is not None:
            model.forward = forward
        trainer.model_wrapped = model


class _Hooked:
    """A DistributedDataParallel takes one hook for life, but may be trained more than once."""

    def __init__(self, ddp: DistributedDataParallel, state: DDPState) -> None:
        self.ddp = ddp
        self.state = state

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What ``ddp_hook`` asks a DDPState for."""
        return self.state.reduce(bucket)


def _read(comm: Communicator, path: Path) -> dict[str, Any] | None:
    """What is in the file, or nothing where no rank finds it."""
    found = comm.all_gather(np.array([path.is_file()], np.int32))
    if not found.any():
        return None
    if not found.all():
        raise ValueError(
            f"rank {int(found.argmin())} does not find {path}, which rank {int(found.argmax())} has: a checkpoint must "
            "be in a folder that all ranks share, or be copied to all nodes"
        )
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            ranks = [f"rank{rank}" for rank in range(len(texts))]
            return {"ranks": [unpacked(texts[rank], file.get_tensor(rank)) for rank in ranks]}
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: remove it to go on without what was not sent ({error!r})") from error


def _write(gathered: dict[str, Any], path: Path) -> None:
    """All of it or nothing. Of each rank a tensor, and the rest as text in the file's metadata."""
    states = {f"rank{rank}": packed(state) for rank, state in enumerate(gathered["ranks"])}
    part = path.with_name(f"{path.name}.part")
    save_file(
        {rank: flat for rank, (_, flat) in states.items()}, part, {rank: text for rank, (text, _) in states.items()}
    )
    os.replace(part, path)
