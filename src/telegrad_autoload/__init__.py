"""Registers the backend ``telegrad`` of torch.distributed; ``import torch`` calls ``autoload`` (entry point
``torch.backends``).

It is a package beside ``telegrad``, because importing a part of ``telegrad`` loads numpy and the compiled core. Every
process that imports torch would pay for these. This package imports nothing of its own before a group is made.
"""

from __future__ import annotations

from typing import Any

NAME = "telegrad"


def autoload() -> None:
    """Called at the end of ``import torch``, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``. Registers the backend.

    It never raises: an exception here would fail ``import torch`` in every program of this environment.
    """
    try:
        register()
    except Exception as error:
        import warnings

        warnings.warn(
            f"torch.distributed does not know the backend {NAME!r} in this process: {type(error).__name__}: {error}. "
            "Report it with the output of `telegrad env`; TORCH_DEVICE_BACKEND_AUTOLOAD=0 silences this.",
            RuntimeWarning,
            stacklevel=2,
        )


def register() -> None:
    """Makes ``telegrad`` a backend of torch.distributed. A second call does nothing, and so does a torch that was
    built without distributed."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        # From 2.15 on torch attaches its flight recorder to every group that says for which devices it is, unless the
        # backend's name is in this set. A group in Python raises then.
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(NAME)


def _create(options: Any, backend_options: Any) -> Any:
    """torch calls it for each group of which this process is a member."""
    from telegrad.torch_backend.process_group import create

    return create(options, backend_options)
