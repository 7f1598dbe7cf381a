"""What a process has of its own, and a copy of the model must not take along."""

from __future__ import annotations

from typing import Any, NoReturn


class Uncopied:
    """Pickling and copying it is a ``TypeError``. DDP holds its hook's state, so who copies or saves the wrapped model
    meets this."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process and cannot be pickled or copied, nor can a "
            "DistributedDataParallel that has it: copy or save ddp.module, as AveragedModel(ddp.module); what waits to "
            "be sent is in state.state_dict(), of each rank"
        )
