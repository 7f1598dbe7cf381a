"""Lightning's Trainer with telegrad's hook: ``Trainer(strategy="ddp", callbacks=[GradientExchange(density=0.01)])``.

Needs Lightning, as the package ``lightning`` or ``pytorch_lightning``. ``DDPStrategy(ddp_comm_state=…,
ddp_comm_hook=…)`` does not do: Lightning registers those for GPUs only, and wants the state before there is a process
group.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from telegrad.comm import Communicator
from telegrad.errors import NonFiniteGradient, TransportError
from telegrad.train import DDPState, GatheredState, ddp_hook
from telegrad.train.resharding import GROUPS

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

    ``options``: those of DDPState, and those of ``Communicator.from_torch`` but for its ``group``.
    ``feedback="steps"`` and ``momentum`` find the optimiser of ``configure_optimizers`` by themselves; the scaler of
    ``precision="16-mixed"`` is found too, with ``nonfinite="skip"``, unless these are given. Checkpoints hold
    the residuals of all ranks (``GatheredState``), and are restored on any number of them; they are to be written on
    all ranks together, as ModelCheckpoint and ``trainer.save_checkpoint`` do.

    What waits after a ``fit`` goes on in the next one of the same model with the same GradientExchange, with the
    velocities; a checkpoint that is read for that model takes its place. With ``strategy="ddp_spawn"`` and others whose
    processes end with ``fit``, what waits ends too (``RuntimeWarning``): only checkpoints written inside ``fit`` have
    it. What cannot go on, as another model has come or a
    parameter was frozen, is a ``RuntimeWarning`` that says how much it is.

    Raises ``TypeError`` for an option that does not exist. ``fit`` raises ``ValueError`` where the strategy is not DDP,
    ``TypeError`` and ``ValueError`` as DDPState does.
    """

    def __init__(self, **options: Any) -> None:
        of_state, of_comm = _keywords_of(DDPState), _keywords_of(Communicator.from_torch)
        for name in options:
            if name not in of_state | of_comm:
                raise TypeError(
                    f"GradientExchange has no argument {name!r}: its options are those of DDPState and of "
                    "Communicator.from_torch"
                )
        self._joining = {name: value for name, value in options.items() if name in of_comm}
        self._options = {name: value for name, value in options.items() if name in of_state}
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
        """Lightning calls it when the model is wrapped and the optimisers are made."""
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel):
            raise ValueError(
                f"the strategy is {type(trainer.strategy).__name__}, which does not wrap the model in "
                "DistributedDataParallel: use Trainer(strategy='ddp', accelerator='cpu')"
            )
        options = self._options
        if options.get("feedback") == "steps" or options.get("momentum"):
            if len(trainer.optimizers) != 1:
                raise ValueError(
                    f"the model has {len(trainer.optimizers)} optimizers: feedback='steps' and momentum are for one"
                )
            options = {"optimizer": trainer.optimizers[0], **options}
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and "scaler" not in options:
            options = {"nonfinite": "skip", **options, "scaler": scaler}
        if _ends_with_fit(trainer) and (options.get("mode") != "dense" or options.get("momentum")):
            warnings.warn(
                "the processes of this strategy end with fit, and with them what they have not sent: later fits begin "
                "without it, and only checkpoints that are written inside fit have it; use strategy='ddp'",
                RuntimeWarning,
                2,
            )
        self._close()
        comm = Communicator.from_torch(**self._joining)
        self._state = state = DDPState(comm, ddp.named_parameters(), **options)
        waiting, self._waiting = self._waiting, None
        if self._loaded is not None and (self._loaded_for is None or self._loaded_for is pl_module):
            if waiting is not None and self._module is not pl_module:
                _warn_of_loss(waiting, "the fit before was of another model")
            GatheredState(state).load_state_dict(self._loaded)
            self._loaded = self._loaded_for = None
        elif waiting is not None and self._module is not pl_module:
            _warn_of_loss(waiting, "the fit before was of another model")
        elif waiting is not None and trainer.ckpt_path is not None:
            _warn_of_loss(waiting, "the checkpoint has other weights, and nothing that waits")
        elif waiting is not None:
            _go_on(state, waiting)
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
        try:
            self._waiting = state.state_dict()
        except (TransportError, NonFiniteGradient) as error:  # of sums on a device
            warnings.warn(f"the gradients that the fit before had not sent are lost ({error})", RuntimeWarning, 2)
        finally:
            state.comm.close()


def _keywords_of(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def _ends_with_fit(trainer: Trainer) -> bool:
    """Whether this is the first rank of processes that Lightning has started for this ``fit`` alone."""
    launcher = getattr(trainer.strategy, "launcher", None)
    # By name: it is private, and may be of either package.
    return any(one.__name__ == "_MultiProcessingLauncher" for one in type(launcher).__mro__) and trainer.is_global_zero


def _go_on(state: DDPState, waiting: dict[str, Any]) -> None:
    """``state``, which is new, takes over what is ``waiting`` for parameters that it has."""
    here = state.state_dict()["compressor"]
    held = waiting["compressor"]
    fitting, left = {**held}, {**held}
    for group in GROUPS:
        ours, theirs = here.get(group, {}), held.get(group, {})
        if ours:
            fitting[group] = {name: theirs.get(name, entry) for name, entry in ours.items()}
        left[group] = {name: entry for name, entry in theirs.items() if name not in ours}
    _warn_of_loss({**waiting, "compressor": left}, "these parameters are frozen now, or not in the model")
    state.load_state_dict({**waiting, "compressor": fitting})


def _warn_of_loss(waiting: dict[str, Any], why: str) -> None:
    """Says how much it was, if it was anything."""
    for group, kind in GROUPS.items():
        norms = {
            name: float(entry[kind].double().norm()) * entry["unit"]
            for name, entry in waiting["compressor"].get(group, {}).items()
        }
        if any(norms.values()):
            warnings.warn(
                f"a {kind} of norm {math.hypot(*norms.values()):.3g}, of {len(norms)} parameters, such as "
                f"{next(iter(norms))!r}, does not go on in this fit: {why}",
                RuntimeWarning,
                2,
            )
