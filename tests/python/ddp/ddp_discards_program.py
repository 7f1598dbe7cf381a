"""What the ranks of test_ddp.py do with gradients that they throw away: as in ddp_program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ddp_program import Training, assert_equal

from telegrad import Communicator


def discarded_passes(comm: Communicator) -> None:
    """Gradients of another loss that are thrown away, as in training a GAN, leave nothing behind."""
    bf16, view = torch.bfloat16, {"gradient_as_bucket_view": True}
    cases: list[dict[str, Any]] = [
        {"density": 0.05},
        {"density": 0.05, "dtype": bf16, "select": "topk", "ddp": view},
        {"density": 0.05, "nonfinite": "skip", "ddp": view},
        {"density": 0.05, "clip_norm": 0.1},
        {"density": 0.05, "combine": "gtopk", "ddp": {"static_graph": True}},
    ]
    for case in cases:
        discarding, reference = Training(comm, "sparse", **case), Training(comm, "sparse", **case)
        assert discarding.state is not None
        assert reference.state is not None
        for training in (reference, discarding):
            training.run(0, 3)  # DDP makes its buckets anew meanwhile
        for step in range(3, 7):
            discarding.optimizer.zero_grad()
            discarding.backward(100 + step)
            if step == 4:
                discarding.backward(200 + step)
            discarding.optimizer.zero_grad(set_to_none=step != 5)
            assert discarding.step(step) == reference.step(step)
            assert_equal(discarding.flat(), reference.flat())
        assert discarding.state.stats.discarded_passes == 4
        assert reference.state.stats.discarded_passes == 0
        for name, entry in discarding.memory().items():
            expected = reference.memory()[name]
            assert_equal(entry["residual"], expected["residual"])
            assert (entry["threshold"], entry["calls"]) == (expected["threshold"], expected["calls"])


class SharpnessAware(torch.optim.Optimizer):
    """SAM's shape: a first gradient says where to look, a second one steps."""

    def __init__(self, parameters: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        moved = []
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    moved.append((one, 0.01 * one.grad))
                    one.add_(moved[-1][1])
                    one.grad = None
        with torch.enable_grad():
            closure()
        for one, by in moved:
            one.sub_(by)
        self.base.step()
        self.base.zero_grad()


def sharpness_aware(comm: Communicator) -> None:
    """What waits is of the second gradients: with what was sent, it is all of them."""
    training = Training(comm, "sparse", density=0.05, select="topk")
    assert training.state is not None
    sam = SharpnessAware(training.ddp.parameters(), training.optimizer)
    weight = training.model.middle.weight
    given, sent = torch.zeros_like(weight), torch.zeros_like(weight)
    own: list[torch.Tensor] = []
    weight.register_hook(lambda gradient: own.append(gradient.clone()))
    training.step(0)  # the optimizer is known from here on
    waited = training.memory()["module.middle.weight"]["residual"].clone()
    training.optimizer.zero_grad()
    for step in range(1, 5):

        def second(step: int = step) -> None:
            own.clear()
            training.backward(step)
            given.add_(own[0])
            sent.add_(weight.grad)

        training.backward(step)
        sam.step(second)
    waits = (training.memory()["module.middle.weight"]["residual"] - waited).view_as(weight)
    parts = [sum(comm.all_gather(one.contiguous())) for one in (given, waits)]
    torch.testing.assert_close(parts[0], comm.world_size * sent + parts[1], rtol=1e-4, atol=1e-6)


SCENARIOS: list[Callable[[Communicator], None]] = [discarded_passes, sharpness_aware]
