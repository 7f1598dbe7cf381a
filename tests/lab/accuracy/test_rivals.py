"""torch's hooks as one process plays them: beside torch's own, and that nothing is lost."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lab.accuracy.rivals import TorchHook

RANKS, STEPS = 4, 6


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16))


def gradients(step: int, rank: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(one.shape, generator=drawn) for one in model().parameters()]


def averages(hook: TorchHook, trained: nn.Module, step: int) -> list[Tensor]:
    for rank in range(RANKS):
        for one, given in zip(trained.parameters(), gradients(step, rank), strict=True):
            one.grad = given.clone()
        hook.take(rank)
    hook.average()
    return [one.grad.clone() for one in trained.parameters() if one.grad is not None]


def means(step: int) -> list[Tensor]:
    given = [gradients(step, rank) for rank in range(RANKS)]
    return [torch.stack(own).mean(0) for own in zip(*given, strict=True)]


def test_powersgd_gives_all_but_its_residual() -> None:
    trained = model()
    hook = TorchHook(trained, RANKS, rank=2)
    names = [name for name, _ in trained.named_parameters()]
    given, got = ([torch.zeros_like(one) for one in trained.parameters()] for _ in range(2))
    for step in range(STEPS):
        for total, one in zip(given, means(step), strict=True):
            total += one
        found = averages(hook, trained, step)
        for total, one in zip(got, found, strict=True):
            total += one
        for name, one in zip(names, found, strict=True):
            if name in hook.residuals:
                assert torch.linalg.matrix_rank(one) == (2 if step >= 2 else min(one.shape))
    assert sorted(hook.residuals) == ["0.weight", "2.weight"]
    for name, whole, part in zip(names, given, got, strict=True):
        kept = hook.residuals.get(name, torch.zeros_like(whole))
        torch.testing.assert_close(part + kept, whole)
        assert (kept != 0).any() == (name in hook.residuals)
    factors = 2 * (24 + 32 + 32 + 16)
    numbers = 2 * (24 * 32 + 32 * 16 + 48) + (STEPS - 2) * (factors + 48)
    assert hook.sent_bytes() == [pytest.approx(2 * 3 / 4 * 4 * numbers)] * RANKS


def test_half_precision_rounds_each_share() -> None:
    trained = model()
    hook = TorchHook(trained, RANKS, rank=None)
    for found, mean in zip(averages(hook, trained, 0), means(0), strict=True):
        assert torch.equal(found, found.half().float())
        torch.testing.assert_close(found, mean, rtol=0, atol=4e-3)
    assert hook.sent_bytes()[0] == 2 * 3 / 4 * 2 * sum(one.numel() for one in trained.parameters())
    assert not hook.residuals


def test_a_loaded_hook_goes_on() -> None:
    first, second = model(), model()
    one, other = TorchHook(first, RANKS, rank=1), TorchHook(second, RANKS, rank=1)
    for step in range(4):
        averages(one, first, step)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for found, expected in zip(averages(other, second, 4), averages(one, first, 4), strict=True):
        assert torch.equal(found, expected)
    assert other.sent_bytes() == one.sent_bytes()


@pytest.mark.parametrize("rank", [None, 2])
def test_training_is_like_torchs_own_hook(rank: int | None, tmp_path: Path) -> None:
    """One rank of torch's; its first basis is drawn otherwise, so PowerSGD is compared by what it keeps."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        theirs, ours = DistributedDataParallel(model()), model()
        if rank is None:
            theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
            theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        hook = TorchHook(ours, 1, rank)
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
        for step in range(30):
            for trained in (theirs, ours):
                trained.zero_grad()
                (trained(inputs) - inputs[:, :16]).square().mean().backward()
            hook.take(0)
            hook.average()
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert mine.grad is not None
                assert other.grad is not None
                if rank is None or step < 2:
                    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-7)
                with torch.no_grad():
                    mine -= 0.1 * mine.grad
                    other -= 0.1 * other.grad
        left, right = ((trained(inputs) - inputs[:, :16]).square().mean().item() for trained in (ours, theirs))
        assert left == pytest.approx(right, rel=1e-6 if rank is None else 0.02)
    finally:
        torch.distributed.destroy_process_group()
