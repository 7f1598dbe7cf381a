"""Lightning's Trainer with telegrad's hook: ``Trainer(strategy="ddp", callbacks=[GradientExchange()])``.

Needs Lightning, as the package ``lightning`` or ``pytorch_lightning``. ``DDPStrategy(ddp_comm_state=…,
ddp_comm_hook=…)`` does not do: Lightning registers those for GPUs only, and wants the state before there is a process
group.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from telegrad.communicator import Communicator
from telegrad.ddp import DDPState, GatheredState, ddp_hook
from telegrad.ddp.choices import tell_of_resuming
from telegrad.errors import TransportError
from telegrad.integrations.trainers import (
    close_for_next,
    divided_options,
    go_on,
    may_wait,
    warn_of_clipping,
    warn_of_loss,
    with_found,
)

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
elif "lightning.pytorch" in sys.modules:  # who has both imports the one that is used before this
    from lightning.pytorch import Callback
else:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        if error.name != "pytorch_lightning":
            raise
        try:
            from lightning.pytorch import Callback
        except ModuleNotFoundError:
            raise ImportError(
                "telegrad.integrations.lightning needs Lightning: pip install 'telegrad[lightning]'"
            ) from error


class GradientExchange(Callback):
    """A callback of Lightning that averages the gradients of a model with ``ddp_hook`` when ``fit`` has wrapped it in
    DistributedDataParallel, and keeps what has not been sent in Lightning's checkpoints.

    ``options``: those of DDPState, and those of ``Communicator.from_torch`` but for its ``group``.
    ``TopK(feedback="steps")`` and ``momentum`` find the optimizer of ``configure_optimizers`` by themselves; the scaler
    of ``precision="16-mixed"`` is found too, with ``nonfinite="skip"``, unless these are given. Checkpoints hold the
    residuals of all ranks (``GatheredState``), and are restored on any number of them; they are to be written on all
    ranks together, as ModelCheckpoint and ``trainer.save_checkpoint`` do.

    What waits after a ``fit`` goes on in the next one of the same model with the same GradientExchange, with the
    velocities; a checkpoint that is read for that model takes its place. With ``strategy="ddp_spawn"`` and others whose
    processes end with ``fit``, what waits ends too (``RuntimeWarning``): only checkpoints written inside ``fit`` have
    it. What cannot go on, as another model has come or a
    parameter was frozen, is a ``RuntimeWarning`` that says how much it is.

    Raises ``TypeError`` for an option that does not exist. ``fit`` raises ``ValueError`` where the strategy is not DDP,
    ``TypeError`` and ``ValueError`` as DDPState does.
    """

    def __init__(self, **options: Any) -> None:
        self._joining, self._options = divided_options("GradientExchange", options)
        self._loaded: Mapping[str, Any] | None = None
        self._loaded_for: LightningModule | None = None  # whose weights came with it; None: nobody said
        self._reading: LightningModule | None = None  # whose checkpoint Lightning reads just now
        self._state: DDPState | None = None
        self._waiting: dict[str, Any] | None = None  # of the fit before, until a state has taken it over
        self._module: LightningModule | None = None  # whose gradients these are

    @property
    def state(self) -> DDPState | None:
        """Of the last ``fit``; ``None`` before the first, and where its processes were others, as with
        ``strategy="ddp_spawn"``."""
        return self._state

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning calls it when the model is wrapped and the optimizers are made."""
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(
                f"the strategy is {type(trainer.strategy).__name__}, which does not wrap the model in "
                "DistributedDataParallel: use Trainer(strategy='ddp', accelerator='cpu')"
            )
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        options = with_found(self._options, trainer.optimizers, scaler)
        warn_of_clipping(options, getattr(trainer, "gradient_clip_val", None), "Trainer(gradient_clip_val=None)")
        if _ends_with_fit(trainer) and may_wait(options):
            warnings.warn(
                "the processes of this strategy end with fit, and with them what they have not sent: later fits begin "
                "without it, and only checkpoints that are written inside fit have it; use strategy='ddp'",
                RuntimeWarning,
                2,
            )
        self._close()
        comm = Communicator.from_torch(**self._joining)
        self._state = state = DDPState(comm, ddp, **options)
        waiting, self._waiting = self._waiting, None
        if self._loaded is not None and (self._loaded_for is None or self._loaded_for is pl_module):
            if waiting is not None and self._module is not pl_module:
                warn_of_loss(waiting, "the fit before was of another model")
            GatheredState(state).load_state_dict(self._loaded)
            self._loaded = self._loaded_for = None
        elif waiting is not None and self._module is not pl_module:
            warn_of_loss(waiting, "the fit before was of another model")
        elif waiting is not None and trainer.ckpt_path is not None:
            warn_of_loss(waiting, "the checkpoint has other weights, and nothing that waits")
        elif waiting is not None:
            go_on(state, waiting)
        elif getattr(trainer, "ckpt_path", None) is not None and may_wait(options):
            what = f"the checkpoint {trainer.ckpt_path} has no state of GradientExchange"
            tell_of_resuming(what, "resume from one that was written with it", rank=comm.rank)
        self._module = pl_module
        ddp.register_comm_hook(state, ddp_hook)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The other ranks hear of it at once."""
        if self._state is not None:
            self._state.comm.abort(f"{type(exception).__name__}: {exception}")

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoint; empty, with a ``RuntimeWarning``, where ranks cannot be gathered any more: a
        checkpoint that is written because of an exception has the weights all the same."""
        if self._state is None:
            return {}
        try:
            return GatheredState(self._state).state_dict()
        except TransportError as error:
            warnings.warn(f"this checkpoint lacks the gradients that were not sent yet ({error})", RuntimeWarning, 2)
            return {}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lightning calls it before ``load_state_dict``, also for ``validate``, ``test`` and ``predict``, whose model
        may be another one than is trained."""
        self._reading = pl_module
        if self._loaded_for is pl_module:  # it has other weights now
            self._loaded = self._loaded_for = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls it before there is a state of the fit; what it holds is for the model that is read."""
        self._loaded = state_dict or None
        self._loaded_for, self._reading = self._reading, None

    def _close(self) -> None:
        """Lets go of the state of the fit before, but for what was not sent there."""
        if self._state is None:
            return
        state, self._state = self._state, None
        self._waiting = close_for_next(state)


def _ends_with_fit(trainer: Trainer) -> bool:
    """Whether this is the first rank of processes that Lightning has started for this ``fit`` alone."""
    launcher = getattr(trainer.strategy, "launcher", None)
    # By name: it is private, and may be of either package.
    return any(one.__name__ == "_MultiProcessingLauncher" for one in type(launcher).__mro__) and trainer.is_global_zero
