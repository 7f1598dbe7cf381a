"""What the ranks of test_choices.py train: each scenario is one way to set training up. Each rank prints what it was
told of it."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import telegrad
from telegrad import ChoiceWarning, Communicator, DDPState, LowRank, Momentum, Synchronizer, TopK, Warmup
from telegrad.ddp import BySize, choices, reshard

STEPS = 6
TOPK = TopK(0.02, small_elements=64)
Parameters = Iterable[torch.nn.Parameter]


def with_sgd(parameters: Parameters) -> Optimizer:
    return SGD(parameters, lr=0.01)


def with_momentum(parameters: Parameters) -> Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9)


def with_adamw(parameters: Parameters) -> Optimizer:
    return AdamW(parameters, lr=0.001)


class Adam8bit(Optimizer):
    """As libraries of quantised optimizers have it: known by its name alone."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            one.data.sub_(one.grad, alpha=0.01)


class LambdaOptimizer(Adam8bit):
    """Its base is what it is."""


class Training:
    """Of a network with DDP and the hook, or with ``hook=False`` neither of telegrad's."""

    def __init__(
        self,
        comm: Communicator,
        make: Callable[[Parameters], Optimizer] = with_sgd,
        *,
        hook: bool = True,
        wrapped: dict[str, Any] | None = None,
        corrected: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.comm = comm
        self.net = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 8))
        self.ddp = DistributedDataParallel(self.net, **(wrapped or {}))
        self.optimizer = make(self.net.parameters())
        self.scaler: torch.amp.GradScaler | None = options.get("scaler")
        self.steps = itertools.count()
        if corrected is not None:
            options |= {"momentum": Momentum(corrected), "optimizer": self.optimizer}
        if hook:
            self.state = DDPState(comm, self.ddp, **{"compress": TOPK, **options})
            self.ddp.register_comm_hook(self.state, telegrad.ddp_hook)

    def backward(self) -> None:
        number = next(self.steps)
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(2 * number + self.comm.rank))
        loss = self.ddp(x).square().mean() * (1 + number % 5)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def train(self, change: Callable[[Training, int], object] = lambda training, step: None, steps: int = STEPS) -> Any:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward()
            change(self, step)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return self

    def gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self.net.parameters() if one.grad is not None]

    def saved(self) -> dict[str, Any]:
        """As torch.save writes it, and torch.load reads it."""
        file = io.BytesIO()
        state = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | {"telegrad": self.state.state_dict()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]

    def resume(self, saved: dict[str, Any], *, telegrads: bool) -> Training:
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if telegrads:
            self.state.load_state_dict(saved["telegrad"])
        return self


def clips_norm(training: Training, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1e-3)


def clips_value(training: Training, step: int) -> None:
    torch.nn.utils.clip_grad_value_(training.net.parameters(), 1e-5)


# Wrong choices, by the beginning of what is said.


def adamw_from_the_first_step(comm: Communicator) -> None:
    Training(comm, with_adamw).train()
    Training(comm, with_adamw).train()  # in another training of the same process nothing is said again


def nadam(comm: Communicator) -> None:
    Training(comm, lambda p: NAdam(p, lr=0.001)).train()


def adam_of_another_library(comm: Communicator) -> None:
    Training(comm, LambdaOptimizer).train()


def adam_in_zero(comm: Communicator) -> None:
    Training(comm, lambda p: ZeroRedundancyOptimizer(p, optimizer_class=Adam, lr=0.001)).train()


def adamw_with_a_synchronizer(comm: Communicator) -> None:
    net = Training(comm, hook=False).net
    sync = Synchronizer(net, comm, compress=TOPK, plan="fixed")
    optimizer = with_adamw(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 40)).sum().backward()
        optimizer.step()
    sync.close()


def replicas(comm: Communicator, make: Callable[[Parameters], Optimizer]) -> None:
    """Of a sharded model."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    net = Training(comm, hook=False).net
    fully_shard(net, mesh=mesh["shard"])
    averages = telegrad.ReplicaSynchronizer(net, comm, compress=TOPK)
    optimizer = make(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(4, 40) * (1 + step)).sum().backward()
        averages.average()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)  # as docs/how-to/fsdp2.md says
        optimizer.step()


def adamw_with_replicas(comm: Communicator) -> None:
    replicas(comm, with_adamw)


def momentum_of_sgd(comm: Communicator) -> None:
    Training(comm, with_momentum).train()


def momentum_in_its_second_group(comm: Communicator) -> None:
    def make(parameters: Parameters) -> Optimizer:
        first, *others = parameters
        return SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], lr=0.01)

    Training(comm, make, compress=TopK(0.02, small_elements=64)).train()


def clip_grad_norm(comm: Communicator) -> None:
    Training(comm).train(clips_norm)


def local_clipping_of_low_rank(comm: Communicator) -> None:
    Training(comm, compress=LowRank(rank=1, small_elements=64), clip_norm=1.0).train()


def local_clipping_without_compression(comm: Communicator) -> None:
    Training(comm, compress=None, clip_norm=1.0).train()


def clip_grad_norm_after_dense_steps(comm: Communicator) -> None:
    training = Training(comm, warmup=Warmup(STEPS))
    training.train(clips_norm)
    told = len(choices._told)
    training.train(clips_norm)
    assert comm.rank != 0 or (told, len(choices._told)) == (0, 1)


def clip_grad_norm_with_a_scaler(comm: Communicator) -> None:
    def clip(training: Training, step: int) -> None:
        assert training.scaler is not None
        training.scaler.unscale_(training.optimizer)
        clips_norm(training, step)

    Training(comm, scaler=torch.amp.GradScaler("cpu", init_scale=64.0), nonfinite="skip").train(clip)


def clip_grad_norm_of_bucket_views(comm: Communicator) -> None:
    Training(comm, wrapped={"gradient_as_bucket_view": True}).train(clips_norm)


def clip_grad_norm_of_bfloat16(comm: Communicator) -> None:
    training = Training(comm, hook=False)
    training.net.bfloat16()
    ddp = DistributedDataParallel(training.net)
    ddp.register_comm_hook(DDPState(comm, ddp, compress=TOPK), telegrad.ddp_hook)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        ddp(torch.randn(16, 40, dtype=torch.bfloat16) * (1 + step)).square().mean().backward()
        clips_norm(training, step)
        training.optimizer.step()


def clip_grad_value(comm: Communicator) -> None:
    Training(comm).train(clips_value)


def clip_grad_norm_with_a_synchronizer(comm: Communicator) -> None:
    training = Training(comm, hook=False)
    training.ddp = training.net  # type: ignore[assignment]
    sync = Synchronizer(training.net, comm, compress=TOPK, plan="fixed")
    training.train(clips_norm)
    sync.close()


def resumed_without_its_state(comm: Communicator) -> None:
    saved = Training(comm, with_adamw, warmup=Warmup(2)).train().saved()
    Training(comm, with_adamw, warmup=Warmup(2)).resume(saved, telegrads=False).train()


def resumed_with_momentum_without_its_state(comm: Communicator) -> None:
    saved = Training(comm, with_momentum, compress=TopK(1.0, small_elements=64)).train().saved()
    Training(comm, with_momentum, compress=TopK(1.0, small_elements=64)).resume(saved, telegrads=False).train()


def resumed_with_another_density(comm: Communicator) -> None:
    saved = Training(comm).train().saved()
    Training(comm, compress=TopK(0.05, small_elements=64)).resume(saved, telegrads=True).train()


def resumed_with_another_policy(comm: Communicator) -> None:
    saved = Training(comm, compress=TopK(policy=BySize(0.02, small_elements=64))).train().saved()
    compress = TopK(policy=BySize(0.05, small_elements=64))
    Training(comm, compress=compress).resume(saved, telegrads=True).train()


def a_synchronizer_resumed_with_another_density(comm: Communicator) -> None:
    saved, net = None, Training(comm, hook=False).net
    for density in (0.02, 0.05):
        sync = Synchronizer(net, comm, compress=TopK(density, small_elements=64), plan="fixed")
        if saved is not None:
            sync.load_state_dict(saved)
        net(torch.ones(4, 40)).sum().backward()
        saved = sync.state_dict()
        sync.close()


def wrapped_twice(comm: Communicator) -> None:
    DDPState(comm, DistributedDataParallel(DistributedDataParallel(torch.nn.Linear(60, 60))))


WRONG = {
    adamw_from_the_first_step: "AdamW takes its first steps on sparse averages",
    nadam: "NAdam takes its first steps on sparse averages",
    adam_of_another_library: "LambdaOptimizer takes its first steps on sparse averages",
    adam_in_zero: "Adam takes its first steps on sparse averages",
    adamw_with_a_synchronizer: "AdamW takes its first steps on sparse averages",
    adamw_with_replicas: "AdamW takes its first steps on sparse averages",
    momentum_of_sgd: "SGD has momentum=0.9, which repeats",
    momentum_in_its_second_group: "SGD has momentum=0.9, which repeats",
    clip_grad_norm: "averaged gradients are clipped to a norm of 0.001 before step()",
    local_clipping_of_low_rank: "clip_norm=1 shortens each rank's own gradient, which is for sparse averages",
    local_clipping_without_compression: "clip_norm=1 shortens each rank's own gradient, which is for sparse averages",
    clip_grad_norm_after_dense_steps: "averaged gradients are clipped to a norm of 0.001 before step()",
    clip_grad_norm_with_a_scaler: "averaged gradients are clipped to a norm of 0.001 before step()",
    clip_grad_norm_of_bucket_views: "averaged gradients are clipped to a norm of 0.001 before step()",
    clip_grad_norm_of_bfloat16: "averaged gradients are clipped to a norm of 0.00",
    clip_grad_value: "averaged gradients are clipped to values of at most 1e-05 before step()",
    clip_grad_norm_with_a_synchronizer: "averaged gradients are clipped to a norm of 0.001 before step()",
    resumed_without_its_state: "the optimizer resumes from a checkpoint but the residuals begin at zero",
    resumed_with_momentum_without_its_state: "the optimizer resumes from a checkpoint but the residuals begin at zero",
    resumed_with_another_density: "the checkpoint was saved with density=0.02, and this run sends density=0.05: give "
    "compress=telegrad.TopK(density=0.02)",
    resumed_with_another_policy: "the checkpoint was saved with density=0.02, and this run sends density=0.05: give "
    "the policy= that it was saved with",
    a_synchronizer_resumed_with_another_density: "the checkpoint was saved with density=0.02, and this run sends",
    wrapped_twice: "the model is a DistributedDataParallel around another DistributedDataParallel",
}


# Right choices, and what is only perhaps wrong.


def averages_of_low_rank_that_are_clipped(comm: Communicator) -> None:
    Training(comm, compress=LowRank(rank=1, small_elements=64)).train(clips_norm)


def sgd(comm: Communicator) -> None:
    Training(comm).train(steps=40)


def corrected_momentum(comm: Communicator) -> None:
    Training(comm, corrected=0.9).train()


def momentum_of_dense_averages(comm: Communicator) -> None:
    for options in ({"compress": None}, {"compress": TopK(1.0)}, {"compress": TopK(0.02, small_elements=1 << 20)}):
        Training(comm, with_momentum, **options).train(clips_norm)


def adamw_with_dense_first_steps(comm: Communicator) -> None:
    Training(comm, with_adamw, warmup=Warmup(3)).train()
    Training(comm, with_adamw, warmup=Warmup(3, "falling")).train()


def adamw_after_dense_training_without_a_hook(comm: Communicator) -> None:
    for make in (with_adamw, lambda p: AdamW(p, lr=0.001, fused=True), lambda p: SGD(p, lr=0.01)):
        training = Training(comm, make, hook=False).train()
        training.ddp = DistributedDataParallel(training.net)
        training.ddp.register_comm_hook(DDPState(comm, training.ddp, compress=TOPK), telegrad.ddp_hook)
        training.train()


def other_adaptive_optimizers(comm: Communicator) -> None:
    Training(comm, lambda p: Adagrad(p, lr=0.01)).train()
    Training(comm, lambda p: RMSprop(p, lr=0.001)).train()


def an_optimizer_of_other_parameters(comm: Communicator) -> None:
    other = torch.nn.Linear(3, 3)
    aside = AdamW(other.parameters())

    def step_aside(training: Training, step: int) -> None:
        other(torch.ones(1, 3)).sum().backward()
        aside.step()

    Training(comm).train(step_aside)


def local_clipping(comm: Communicator) -> None:
    Training(comm, clip_norm=0.01).train()


def clipping_that_never_clips(comm: Communicator) -> None:
    Training(comm).train(lambda training, _: torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1e6))


def a_scaler(comm: Communicator) -> None:
    """Whose scale changes in each step, so that unscaling does something else each time."""

    def unscale(training: Training, step: int) -> None:
        assert training.scaler is not None
        training.scaler.unscale_(training.optimizer)

    for changes in ([], [unscale]):
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=1, growth_factor=1.7)
        Training(comm, scaler=scaler, nonfinite="skip").train(*changes)


def an_unknown_scaler(comm: Communicator) -> None:
    training = Training(comm, nonfinite="send")
    training.scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=1, growth_factor=1.7)
    training.train()


def accumulation(comm: Communicator) -> None:
    training = Training(comm)

    def accumulate(training: Training, step: int) -> None:
        for _ in range(2):
            training.backward()  # each is averaged
        with training.ddp.no_sync():
            training.backward()
        training.backward()
        for one in training.gradients():
            one /= 5

    training.train(accumulate)


def scaling_by_the_number_of_tokens(comm: Communicator) -> None:
    def scale(training: Training, step: int) -> None:
        for one in training.gradients():
            one.div_(3 + step)

    Training(comm).train(scale, steps=40)


def gradients_that_the_program_changes(comm: Communicator) -> None:
    def noise(training: Training, step: int) -> None:
        for one in training.gradients():
            one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(step)), alpha=0.1)

    def zeros(training: Training, step: int) -> None:
        for one in training.gradients():
            one.zero_()

    def masks(training: Training, step: int) -> None:
        for one in training.gradients():
            one[::2] = 0

    def replaces(training: Training, step: int) -> None:
        for one in training.net.parameters():
            one.grad = torch.full_like(one, 0.01)

    for change in (noise, zeros, masks, replaces):
        Training(comm).train(change, steps=10)


def skipped_steps_and_discarded_passes(comm: Communicator) -> None:
    def discard(training: Training, step: int) -> None:
        if step % 2:
            training.optimizer.zero_grad()
        training.backward()

    Training(comm).train(discard)


def resumed_with_its_state(comm: Communicator) -> None:
    saved = Training(comm, with_adamw, warmup=Warmup(2)).train().saved()
    Training(comm, with_adamw, warmup=Warmup(2)).resume(saved, telegrads=True).train()
    Training(comm, with_adamw).resume(saved, telegrads=True).train()  # its moments are filled
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, saved["telegrad"])
    saved["telegrad"] = reshard(copy.deepcopy(ranks), 2)[comm.rank]
    Training(comm, with_adamw, warmup=Warmup(2)).resume(saved, telegrads=True).train()


def resumed_within_a_falling_warmup(comm: Communicator) -> None:
    saved = Training(comm, warmup=Warmup(40, "falling")).train().saved()
    Training(comm, warmup=Warmup(10, "falling")).resume(saved, telegrads=True).train()
    Training(comm).resume(saved, telegrads=True).train()


def states_of_a_new_optimizer(comm: Communicator) -> None:
    """To have something to load into, torch.distributed.checkpoint makes steps with gradients of zeros."""
    for make, options in ((with_adamw, {"warmup": Warmup(2)}), (with_momentum, {"compress": TopK(1.0)})):
        training = Training(comm, make, **options)
        get_optimizer_state_dict(training.net, training.optimizer)
        training.train()


def another_step_of_the_same_process(comm: Communicator) -> None:
    """A second DDPState, as a trainer makes one for each fit."""
    training = Training(comm, with_adamw, warmup=Warmup(2)).train()
    training.ddp = DistributedDataParallel(training.net)
    state = DDPState(comm, training.ddp, compress=TOPK, warmup=Warmup(2))
    training.ddp.register_comm_hook(state, telegrad.ddp_hook)
    training.train()


def wrapped_once(comm: Communicator) -> None:
    inner = DistributedDataParallel(torch.nn.Linear(60, 60))
    module = torch.nn.Sequential(inner, torch.nn.Linear(60, 60))
    DDPState(comm, module[1])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, [f"0.{name}" for name, _ in inner.named_parameters()]
    )
    DDPState(comm, DistributedDataParallel(module))


def matrices_of_low_rank(comm: Communicator) -> None:
    """Their averages are dense, and momentum is the optimizer's."""
    for make in (with_momentum, with_adamw):
        Training(comm, make, compress=telegrad.LowRank(1, 64)).train()


def quantised_values(comm: Communicator) -> None:
    net = Training(comm, hook=False).net
    sync = Synchronizer(net, comm, compress=telegrad.Quantised("int8", small_elements=64), plan="fixed")
    for optimizer in (with_adamw(net.parameters()), with_momentum(net.parameters())):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 40)).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step()
    sync.close()


def momentum_with_replicas(comm: Communicator) -> None:
    """They have no momentum correction."""
    replicas(comm, with_momentum)


RIGHT = [
    momentum_with_replicas,
    averages_of_low_rank_that_are_clipped,
    sgd,
    corrected_momentum,
    momentum_of_dense_averages,
    adamw_with_dense_first_steps,
    adamw_after_dense_training_without_a_hook,
    other_adaptive_optimizers,
    an_optimizer_of_other_parameters,
    local_clipping,
    clipping_that_never_clips,
    a_scaler,
    an_unknown_scaler,
    accumulation,
    scaling_by_the_number_of_tokens,
    gradients_that_the_program_changes,
    skipped_steps_and_discarded_passes,
    resumed_with_its_state,
    resumed_within_a_falling_warmup,
    states_of_a_new_optimizer,
    another_step_of_the_same_process,
    wrapped_once,
    matrices_of_low_rank,
    quantised_values,
]


def told_of(scenario: Callable[[Communicator], None], comm: Communicator) -> list[str]:
    """The texts of ChoiceWarning, each as often as it came."""
    choices._told.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scenario(comm)
    for one in caught:
        assert one.category is not ChoiceWarning or one.filename == __file__, one.filename
    return [str(one.message) for one in caught if one.category is ChoiceWarning]


def _joined(init_method: str) -> Communicator:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size)
    return Communicator.from_torch()


def run_all(init_method: str) -> None:
    """Prints one line for each scenario. A failed one ends the program."""
    comm = _joined(init_method)
    for scenario in (*WRONG, *RIGHT):
        try:
            said: list[str] | str = told_of(scenario, comm)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise
        finally:
            print(scenario.__name__, json.dumps(said), flush=True)
    comm.close()
    dist.destroy_process_group()


def run_some(init_method: str) -> None:
    """Wrong ones of each kind."""
    comm = _joined(init_method)
    kinds = (adamw_from_the_first_step, momentum_of_sgd, clip_grad_norm, resumed_without_its_state)
    said = [told_of(one, comm) for one in (*kinds, resumed_with_another_density, wrapped_twice)]
    print(sum(map(len, said)), "told", flush=True)
    comm.close()
    dist.destroy_process_group()
