"""Lightning's Trainer with telegrad's hook: ``Trainer(strategy="ddp", callbacks=[GradientExchange(density=0.01)])``.

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

from telegrad.comm import Communicator
from telegrad.errors import TransportError
from telegrad.train import DDPState, GatheredState, ddp_hook

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
            raise ImportError("telegrad.lightning needs Lightning: pip install 'telegrad[lightning]'") from error


class GradientExchange(Callback):
    """A callback of Lightning that averages the gradients of a model with ``ddp_hook`` when ``fit`` has wrapped it in
    DistributedDataParallel, and keeps what has not been sent in Lightning's checkpoints.

    ``options``: those of DDPState. ``feedback="steps"`` and ``momentum`` find the optimiser of ``configure_optimizers``
    by themselves. Checkpoints hold the residuals of all ranks (``GatheredState``), and are restored on any number of
    them; they are to be written on all ranks together, as ModelCheckpoint and ``trainer.save_checkpoint`` do.

    ``fit`` raises ``ValueError`` where the strategy is not DDP, ``TypeError`` and ``ValueError`` as DDPState does.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loaded: Mapping[str, Any] | None = None
        self._state: DDPState | None = None

    @property
    def state(self) -> DDPState | None:
        """Of the last ``fit``; ``None`` before the first."""
        return self._state

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning calls it when the model is wrapped and the optimisers are made."""
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(
                f"the strategy is {type(trainer.strategy).__name__}, which does not wrap the model in "
                "DistributedDataParallel: use Trainer(strategy='ddp', accelerator='cpu')"
            )
        self._close()
        options = self._options
        if options.get("feedback") == "steps" or options.get("momentum"):
            if len(trainer.optimizers) != 1:
                raise ValueError(
                    f"the model has {len(trainer.optimizers)} optimizers: feedback='steps' and momentum are for one"
                )
            options = {"optimizer": trainer.optimizers[0], **options}
        comm = Communicator.from_torch()
        self._state = DDPState(comm, ddp.named_parameters(), **options)
        if self._loaded is not None:
            GatheredState(self._state).load_state_dict(self._loaded)
            self._loaded = None
        ddp.register_comm_hook(self._state, ddp_hook)

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls it before there is a state."""
        self._loaded = state_dict or None

    def _close(self) -> None:
        if self._state is not None:
            self._state.comm.close()
            self._state = None
