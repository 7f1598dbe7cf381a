"""Hooks of telegrad stay with their model: what is copied or saved of it has none, and needs no telegrad."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import Communicator, Synchronizer
from telegrad.synchronizer import StepProfile
from telegrad.synchronizer.forward_hooks import ForwardHooks

X = torch.ones(2, 4)
Local = Callable[..., list[Communicator]]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Net(nn.Sequential):
    """No other test has hooks on this class."""


def layers() -> Net:
    return Net(nn.Linear(4, 4), nn.Linear(4, 2))


def loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle 0": lambda model: pickle.loads(pickle.dumps(model, protocol=0)),
    "torch.save": loaded,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("waits", [False, True], ids=["", "wait_in"])
@pytest.mark.parametrize("plan", ["auto", "single"])
def test_a_copy_has_none(local: Local, plan: str, waits: bool, copied: Callable[[nn.Module], Any]) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    waiting: Any = {"wait_in": "step", "optimizer": optimizer} if waits else {}
    sync = Synchronizer(model, local(1)[0], plan=plan, **waiting)
    for _ in range(3):
        model(X).sum().backward()
        whole = nn.Sequential(model)  # as a part of another one too
        assert b"telegrad" not in pickle.dumps(whole)
        for other in (copied(model), copied(whole)[0] if copied is not copy.copy else copied(model)):
            assert type(other) is Net
            assert not other._forward_pre_hooks
            assert not other._forward_hooks
            assert all(map(torch.equal, other.parameters(), model.parameters()))
            torch.jit.script(other)
            if copied is not copy.copy:
                other.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
                other(X).sum().backward()
        optimizer.step()
    sync.close()
    assert Net not in copyreg.dispatch_table


def test_hooks_of_others_are_copied() -> None:
    model = layers()
    handle = model.register_forward_pre_hook(_others)
    hooks = ForwardHooks(model, before=lambda: None, after=lambda _: None)
    other = copy.deepcopy(model)
    assert [*other._forward_pre_hooks.values()] == [_others]
    assert not other._forward_hooks
    assert len(model._forward_pre_hooks) == 2
    hooks.close()
    hooks.close()
    handle.remove()
    assert not model._forward_pre_hooks


def _others(*_: object) -> None:
    pass


def test_what_is_called() -> None:
    model, called = layers(), []
    first = ForwardHooks(model, before=lambda: called.append("before"), after=lambda _: called.append("after"))
    second = ForwardHooks(model, after=lambda outputs: called.append(tuple(outputs.shape)))
    model(X)
    first.close()
    assert pickle.loads(pickle.dumps(model))._forward_hooks == {}
    model(X)
    second.close()
    model(X)
    assert called == ["before", "after", (2, 2), (2, 2)]


class Copied(nn.Linear):
    """Copies itself, hooks included."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        new = Copied.__new__(Copied)
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


class Slow(nn.Linear):
    """Has a reducer in copyreg."""


def _slow(_: Slow) -> tuple[Any, ...]:
    return Slow, (4, 1)


def test_models_with_ways_of_their_own_to_be_copied(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Copied(4, 2)
    sync = Synchronizer(model, local(1)[0])
    other = copy.deepcopy(model)
    assert b"telegrad" not in pickle.dumps({**vars(other)})
    other.weight = nn.Parameter(torch.ones(2, 4))
    other(X).sum().backward()
    sync.close()
    monkeypatch.setitem(copyreg.dispatch_table, Slow, _slow)
    slow = Slow(4, 2)
    hooks = ForwardHooks(slow, before=lambda: None)
    assert copy.deepcopy(slow).weight.shape == (1, 4)
    hooks.close()
    assert copyreg.dispatch_table[Slow] is _slow


def test_torchscript_takes_a_copy(local: Local) -> None:
    model = layers()
    sync = Synchronizer(model, local(1)[0], plan="single")
    with pytest.raises(AttributeError, match=r"script copy.deepcopy\(model\), or close\(\) what watches it before"):
        torch.jit.script(model)
    assert torch.jit.script(copy.deepcopy(model))(X).shape == (2, 2)
    assert torch.jit.trace(model, X)(X).shape == (2, 2)
    sync.close()
    torch.jit.script(model)


def test_a_profiled_model_can_be_pickled() -> None:
    model = layers()
    with StepProfile(model):
        model(X).sum().backward()
        assert b"telegrad" not in pickle.dumps(model)
