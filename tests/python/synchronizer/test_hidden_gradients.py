"""What stands in for gradients until their averages are there."""

from __future__ import annotations

import torch
from torch import nn

from telegrad.synchronizer.optimizer_step import HiddenGradients


def parameters() -> list[nn.Parameter]:
    """With gradients 1, 2, 3, 4; one of no dimension, one without elements, one without a gradient."""
    shapes = [(3,), (), (2, 2), (0,), (2,)]
    found = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, one in enumerate(found[:-1], 1):
        one.grad = torch.full_like(one, float(number))
    return found


def test_each_is_nan_and_comes_back() -> None:
    given = parameters()
    before = [one.grad for one in given]
    hidden = HiddenGradients(given)
    assert all(one.grad is not None and one.grad.isnan().all() and one.grad.shape == one.shape for one in given)
    hidden.put_back()()
    assert all(one.grad is was for one, was in zip(given, before, strict=True))


def test_what_was_written_to_one_is_written_to_that_one_only() -> None:
    given = parameters()
    hidden = HiddenGradients(given)
    assert given[0].grad is not None
    given[0].grad.zero_()
    assert given[1].grad is not None
    given[1].grad.fill_(7.0)
    restore = hidden.put_back()
    given[2].grad = torch.full((2, 2), 9.0)  # an average
    restore()
    assert [one.grad.tolist() for one in given[:4] if one.grad is not None] == [[0.0] * 3, 7.0, [[9.0] * 2] * 2, []]
    assert given[4].grad is None


def test_one_of_two_optimisers_zeroes_its_own() -> None:
    given = parameters()
    hidden = HiddenGradients(given)
    torch.optim.SGD(given[:2], lr=0.1).zero_grad(set_to_none=False)
    torch.optim.SGD(given[2:3], lr=0.1).zero_grad()
    hidden.put_back()()
    assert given[0].grad is not None
    assert given[0].grad.tolist() == [0.0] * 3
    assert given[2].grad is None
