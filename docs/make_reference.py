"""Writes docs/reference.md, every public name of the Python package with its first sentence, from the docstrings.

    .venv/bin/python docs/make_reference.py

A test holds the page against what this makes.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MODULES = {
    "telegrad": "What most programs need.",
    "telegrad.ddp": "Training: hooks, synchronizers, what they report and save ([options.md](reference/options.md)).",
    "telegrad.compress": "Which entries are sent, and what waits ([selection.md](selection.md)).",
    "telegrad.communicator": "What sums of the largest entries report ([topk-allreduce.md](topk-allreduce.md)).",
    "telegrad.sparse_vector": "Sparse vectors ([algorithms.md](algorithms.md)).",
    "telegrad.launch": "Ranks of this machine as processes.",
    "telegrad.cost": "What algorithms cost, and which is chosen ([tuning.md](tuning.md)).",
    "telegrad.tuning": "Measuring a network ([tuning.md](tuning.md)).",
    "telegrad.tools.sim": "Ranks in virtual time ([simulation.md](simulation.md)).",
    "telegrad.linear": "Linear models on sparse rows ([linear.md](linear.md)).",
    "telegrad.torch_backend": "A backend of `torch.distributed` ([torch-backend.md](reference/torch-backend.md)).",
    "telegrad.integrations.lightning": "PyTorch Lightning ([options.md](reference/options.md)).",
    "telegrad.integrations.transformers": "Hugging Face's Trainer ([options.md](reference/options.md)).",
}
PAGE = Path(__file__).with_name("reference.md")
_HEAD = """# Reference

Every public name of the Python package, with the first sentence of its docstring; the whole of one, with shapes,
dtypes, units and errors, is what `help(telegrad.Communicator.all_reduce)` shows. Errors have a page of their own
([errors.md](errors.md)), and so has C++ ([cpp.md](how-to/cpp.md)). Made by `python docs/make_reference.py`.
"""
_LONGEST = 90  # of a default's text, in characters


def page() -> str:
    seen: set[int] = set()
    return "\n".join([_HEAD, *(section for name, what in MODULES.items() for section in _module(name, what, seen))])


def _module(name: str, what: str, seen: set[int]) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n\n{what}\n"
    rows, classes = [], []
    for public in _public(module):
        value = getattr(module, public)
        if inspect.ismodule(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.isclass(value) and not issubclass(value, BaseException) and [*_methods(value)]:
            classes.append(f"### {name}.{public}\n\n`{public}{_signature(value)}`: {_sentence(value)}\n")
            table = [f"| `{method}{_signature(one)}` | {_sentence(one)} |" for method, one in _methods(value)]
            classes.append("\n".join(["| | |", "|---|---|", *table]) + "\n")
        else:
            said = "The installed package's version." if public == "__version__" else _sentence(value)
            rows.append(f"| `{public}{_signature(value)}` | {said} |")
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n"
    yield from classes


def _public(module: Any) -> list[str]:
    named = getattr(module, "__all__", None)
    if named is not None:
        return sorted([*named, *getattr(module, "_ESTIMATORS", ())])
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return sorted(name for name in own if not name.startswith("_"))


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Those that telegrad has documented, its bases' too."""
    for name in sorted(dir(cls)):
        value = inspect.getattr_static(cls, name)
        function = getattr(value, "__func__", getattr(value, "fget", value))
        of_telegrad = (getattr(function, "__module__", None) or "").startswith("telegrad")
        if not name.startswith("_") and of_telegrad and getattr(function, "__doc__", None):
            yield name, value


def _signature(value: Any) -> str:
    """Names and defaults; types are the docstring's. Of a property and of what cannot be called: none."""
    function = getattr(value, "__func__", value)
    if isinstance(value, property) or not callable(function):
        return ""
    try:
        given = [*inspect.signature(function).parameters.values()]
    except ValueError:
        return "(…)"
    is_method = not inspect.isclass(value) and given and given[0].name in ("self", "cls")
    shown = [one.replace(annotation=inspect.Parameter.empty) for one in (given[1:] if is_method else given)]
    told = [one if not _is_opaque(one.default) else one.replace(default=...) for one in shown]
    return str(inspect.Signature(told)).replace("Ellipsis", "…").replace("|", "\\|")


def _is_opaque(value: Any) -> bool:
    """Whether its text says nothing to a reader."""
    return value is not inspect.Parameter.empty and (
        callable(value) or " at 0x" in repr(value) or len(repr(value)) > _LONGEST
    )


def _plain(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, Mapping):
        return ", ".join(f"`{key!r}`" for key in value)
    return f"`{value!r}`".replace("|", "\\|")


def _sentence(value: Any) -> str:
    documented = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    is_plain = not (callable(documented) or inspect.isclass(documented))
    text = "" if is_plain else inspect.getdoc(documented) or ""
    if not text:
        return _plain(value) if is_plain else ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    first = re.match(r"(.+?\.)(?= [A-Z`]|$)", paragraph)
    return (first[1] if first else paragraph).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
