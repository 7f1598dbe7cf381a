"""Methods that cost more in Python than what they do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from telegrad import _core

Method = TypeVar("Method", bound=Callable[..., Any])


def with_short_way(method: Method) -> Method:
    """``all_reduce`` or ``wait``, whose plainest calls the core takes itself."""
    return cast(Method, functools.update_wrapper(_core.ShortWay(method), method))
