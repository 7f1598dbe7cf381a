"""How long Python keeps what torch's C++ waits for."""

from __future__ import annotations

import pytest
import torch

from telegrad.torch_backend import group_work


def test_works_are_kept_until_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's C++ does not keep them: DistributedDataParallel of torch 2.6 waited for ever."""
    monkeypatch.setattr(group_work, "_LOSES_WORKS", True)
    monkeypatch.setattr(group_work, "_MOST_KEPT", 3)
    kept: dict[int, group_work.GroupWork] = {}
    monkeypatch.setattr(group_work, "_kept", kept)
    works = [group_work.GroupWork([], [torch.ones(1)], None) for _ in range(3)]
    assert [*kept.values()] == works
    works.pop(0).wait()
    assert [*kept.values()] == works
    for _ in range(4):
        group_work.GroupWork([], [], None)  # nobody waits for it, and it is over
    assert len(kept) == 3
    for work in [*kept.values()]:
        work.wait()
    assert not kept
