"""What torch.compile calls, and does not look into."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._compile import _disable_dynamo  # compiler.disable() takes a second or two for Dynamo, which few need

Group = TypeVar("Group", bound=type)

_WHEN_MADE = {"__init__", "getBackendName", "_set_group_name", "_set_group_desc", "_get_backend"}
"""What torch calls of every group, also where nothing is compiled; these need no communicator."""


def uncompiled(group: Group) -> Group:
    """Compiled programs call the methods of this class as they are: Dynamo takes a process group for one of torch's
    own, which has no attributes but those it knows. It is imported when one of them is first called."""
    for name, method in list(vars(group).items()):
        if isinstance(method, FunctionType) and name not in _WHEN_MADE:
            setattr(group, name, _disable_dynamo(method))
    return group
