"""What the ranks of test_ddp.py do with residual methods, optimisers and checkpoints: as in ddp_program."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_discards_program import SCENARIOS as SCENARIOS_OF_DISCARDS
from ddp_program import SCENARIOS as SCENARIOS_OF_HOOKS
from ddp_program import Net, assert_equal, data
from ddp_program import run_all as run_scenarios
from ddp_watch_program import SCENARIOS as SCENARIOS_OF_MISUSE
from torch.nn.parallel import DistributedDataParallel
from varied_options import objects_of

import telegrad
from telegrad import Communicator, DDPState, LowRank, TopK, Warmup
from telegrad.compress import ExactTopK, RandomK
from telegrad.ddp import ParameterCompression, ParameterInfo, RankState, load_resharded

Parameters = Iterable[torch.nn.Parameter]
SGD = torch.optim.SGD


def with_momentum(parameters: Parameters) -> torch.optim.Optimizer:
    """Of its own, as error feedback without momentum correction leaves it."""
    return SGD(parameters, 0.02, momentum=0.5)


class Job:
    """DDP with or without (``hook=False``) telegrad; ``optimizer`` makes one of parameters."""

    def __init__(
        self,
        comm: Communicator,
        optimizer: Callable[[Parameters], torch.optim.Optimizer],
        *,
        hook: bool = True,
        prepare: Callable[[Net], Any] = lambda model: None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.comm, self.model = comm, Net()
        prepare(self.model)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=1)
        self.optimizer = optimizer(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        self.scaler = options.get("scaler")
        self.poison = False
        if hook:
            self.state = DDPState(comm, self.ddp, **objects_of(optimizer=self.optimizer, **options))
            self.ddp.register_comm_hook(self.state, telegrad.ddp_hook)

    def backward(self, step: int) -> float:
        x, y = data(step, self.comm.rank)
        if self.poison:
            x = x * float("inf")
        with torch.autocast("cpu", torch.bfloat16, enabled=self.scaler is not None):
            loss = torch.nn.functional.mse_loss(self.ddp(x).float(), y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.item()

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = self.backward(step)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def run(self, first: int, last: int) -> list[float]:
        return [self.step(step) for step in range(first, last)]

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def learns(self, steps: int = 30) -> None:
        """Trains; the loss falls, and the ranks' models stay the same."""
        self.has_learnt(self.run(0, steps))

    def has_learnt(self, losses: list[float]) -> None:
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
        for other in self.comm.all_gather(self.flat()):
            assert_equal(other, self.flat())


def momentum_is_that_of_sgd(comm: Communicator) -> None:
    for nesterov in (False, True):
        plain = Job(comm, lambda p, nesterov=nesterov: SGD(p, 0.02, momentum=0.9, nesterov=nesterov), hook=False)  # type: ignore[misc]
        cases: list[dict[str, Any]] = [{"compress": None}, {"density": 1.0, "masking": False}, {"warmup_steps": 9}]
        jobs = [Job(comm, lambda p: SGD(p, 0.02), momentum=0.9, nesterov=nesterov, **case) for case in cases]
        losses = plain.run(0, 8)
        for job in jobs:
            np.testing.assert_allclose(job.run(0, 8), losses, rtol=1e-4)
            torch.testing.assert_close(job.flat(), plain.flat(), rtol=1e-3, atol=1e-5)


def momentum_correction_learns(comm: Communicator) -> None:
    for options in ({}, {"nesterov": True}, {"masking": False}, {"select": "topk", "values": "packed-bf16"}):
        Job(comm, lambda p: SGD(p, 0.005), momentum=0.8, density=0.05, **options).learns()


def adam_learns(comm: Communicator) -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        plain = Job(comm, lambda p, kind=kind: kind(p, 0.002), hook=False)  # type: ignore[misc]
        full = Job(comm, lambda p, kind=kind: kind(p, 0.002), density=1.0)  # type: ignore[misc]
        assert plain.run(0, 5) == full.run(0, 5)
        assert_equal(plain.flat(), full.flat())
        Job(comm, lambda p, kind=kind: kind(p, 0.002), density=0.02).learns()  # type: ignore[misc]


def parameter_groups_and_a_falling_rate(comm: Communicator) -> None:
    def optimizer(parameters: Parameters) -> torch.optim.Optimizer:
        first, *others = parameters
        return SGD([{"params": [first], "lr": 0.03}, {"params": others}], lr=0.02, momentum=0.5)

    plain = Job(comm, optimizer, hook=False)
    full = Job(comm, optimizer, density=1.0, feedback="steps")
    sparse = Job(comm, optimizer, density=0.05, feedback="steps")
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 30) for job in (plain, full, sparse)]
    losses = []
    for step in range(30):
        if step < 10:
            assert plain.step(step) == full.step(step)
        losses.append(sparse.step(step))
        for schedule in schedules:
            schedule.step()
    assert_equal(plain.flat(), full.flat())
    sparse.has_learnt(losses)
    rates = {entry["unit"] for entry in sparse.state.state_dict()["compressor"]["parameters"].values()}
    assert len(rates) == 2


def gradient_scaler(comm: Communicator) -> None:
    """bfloat16 autocast, float32 gradients; a rank's infinite step is skipped by all, and the scale falls on all."""
    for options in ({"density": 0.05}, {"compress": None}, {"density": 0.05, "momentum": 0.5, "clip_norm": 5.0}):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        make = (lambda p: SGD(p, 0.02)) if "momentum" in options else with_momentum
        job = Job(comm, make, scaler=scaler, nonfinite="skip", **options)
        job.run(0, 3)
        before, memory, scale = job.flat(), repr(job.state.state_dict()), scaler.get_scale()
        job.poison = comm.rank == 1
        job.step(3)
        job.poison = False
        assert job.state.skipped
        assert_equal(job.flat(), before)
        assert repr(job.state.state_dict()) == memory
        assert scaler.get_scale() == scale / 2
        job.learns(40)
        assert scaler.get_scale() > scale


def counters_of_the_whole_job(comm: Communicator) -> None:
    """Of the hook, of a Synchronizer and of a group, over the network."""
    job = Job(comm, lambda p: SGD(p, 0.02), density=0.05)
    before = comm.stats()["bytes_sent"]
    job.run(0, 3)
    by_hook = comm.stats()["bytes_sent"] - before
    assert by_hook > 0
    assert comm.stats()["bytes_sent"] == comm.stats(own=True)["bytes_sent"]
    sync = telegrad.Synchronizer(Net(), comm, plan="fixed")
    group = comm.split(0, key=-comm.rank)
    assert group is not None
    own = comm.stats(own=True)["bytes_sent"]
    group.all_gather(np.zeros(1000, np.float32))
    parts = sync.comm.stats()["bytes_sent"] + 4000
    assert comm.stats()["bytes_sent"] == own + parts
    assert comm.stats()["bytes_sent_to"][1 - comm.rank] == own + parts
    group.close()
    sync.close()
    assert comm.stats()["bytes_sent"] == own + parts


def local_clipping(comm: Communicator) -> None:
    loose = Job(comm, lambda p: SGD(p, 0.02), clip_norm=1e6, density=0.05)
    plain = Job(comm, lambda p: SGD(p, 0.02), density=0.05)
    assert loose.run(0, 5) == plain.run(0, 5)
    assert_equal(loose.flat(), plain.flat())
    tight = Job(comm, lambda p: SGD(p, 0.2), clip_norm=0.5, density=0.05)
    tight.learns()
    assert tight.state.stats.clipped_steps > 5


def wires_learn(comm: Communicator) -> None:
    for wire in ("int8", "qsgd8", "packed-qsgd4", "f16"):
        Job(comm, with_momentum, density=0.05, values=wire).learns()


def one_signed_layers_learn(comm: Communicator) -> None:
    def policy(tensor: ParameterInfo) -> ParameterCompression:
        if tensor.elements <= 2048:
            return ParameterCompression(None)
        return ParameterCompression(ExactTopK() if tensor.is_output else ExactTopK(same_sign=True), 0.05)

    job = Job(comm, with_momentum, policy=policy)
    job.learns(40)


def shared_and_frozen_parameters(comm: Communicator) -> None:
    def prepare(model: Net) -> None:
        model.branch.weight = model.middle.weight
        model.norm.requires_grad_(False)

    for options in ({"momentum": 0.9, "masking": False}, {"feedback": "steps"}):
        momentum = float(options.get("momentum", 0.0))
        plain = Job(comm, lambda p, m=momentum: SGD(p, 0.02, momentum=m), hook=False, prepare=prepare)  # type: ignore[misc]
        full = Job(comm, lambda p: SGD(p, 0.02), density=1.0, prepare=prepare, **options)
        np.testing.assert_allclose(full.run(0, 6), plain.run(0, 6), rtol=1e-5)
        Job(comm, with_momentum, density=0.05, prepare=prepare, feedback="steps").learns()


def accumulation_with_momentum(comm: Communicator) -> None:
    """The velocity moves once for each synchronised pass."""
    plain = Job(comm, lambda p: SGD(p, 0.02, momentum=0.9), hook=False)
    dense = Job(comm, lambda p: SGD(p, 0.02), compress=None, momentum=0.9)
    for job in (plain, dense):
        for step in range(4):
            job.optimizer.zero_grad()
            for part in range(3):
                with job.ddp.no_sync() if part < 2 else contextlib.nullcontext():
                    job.backward(3 * step + part)
            job.optimizer.step()
    torch.testing.assert_close(dense.flat(), plain.flat(), rtol=1e-3, atol=1e-5)


def distributed_checkpoint(comm: Communicator) -> None:
    """Two ranks save; two go on bitwise, and one alone finds the sum of both."""
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    options: dict[str, Any] = {"density": 0.05, "momentum": 0.8}
    first = Job(comm, lambda p: SGD(p, 0.01), **options)
    first.run(0, 5)
    saved = {"model": first.model.state_dict(), "telegrad": RankState(first.state)}
    dcp.save(saved, checkpoint_id=folders[0])
    second = Job(comm, lambda p: SGD(p, 0.01), **options)
    loaded = {"model": second.model.state_dict(), "telegrad": RankState(second.state)}
    dcp.load(loaded, checkpoint_id=folders[0])
    second.model.load_state_dict(loaded["model"])
    assert repr(second.state.state_dict()) == repr(first.state.state_dict())

    with contextlib.closing(Communicator.local(1)[0]) as own:
        alone = DDPState(own, first.ddp, **objects_of(optimizer=first.optimizer, **options))
        load_resharded(alone, folders[0])
        found = alone.state_dict()["compressor"]
    for group, kind in (("parameters", "residual"), ("velocities", "velocity")):
        for name, entry in first.state.state_dict()["compressor"][group].items():
            total = entry[kind].double()
            comm.all_reduce(total)
            torch.testing.assert_close(found[group][name][kind].double(), total, rtol=1e-5, atol=1e-7)
            assert total.any()
    assert first.run(5, 12) == second.run(5, 12)
    assert_equal(first.flat(), second.flat())


def the_synchronizer_trains_as_ddp_does(comm: Communicator) -> None:
    """Unused, shared and frozen parameters, accumulation and clipping; the plan changes on the way."""

    def prepare(model: Net) -> None:
        model.branch.weight = model.middle.weight
        model.norm.requires_grad_(False)

    def steps(model: torch.nn.Module, no_sync: Callable[[], Any], clip: Callable[[], Any]) -> torch.Tensor:
        optimizer = SGD([one for one in model.parameters() if one.requires_grad], 0.02, momentum=0.9)
        for step in range(100):
            optimizer.zero_grad()
            for part in range(1 + step % 2):
                with no_sync() if part < step % 2 else contextlib.nullcontext():
                    x, y = data(2 * step + part, comm.rank)
                    takes_branch = step % 3 > 0 or comm.rank == 1
                    torch.nn.functional.mse_loss(model(x, step % 5 > 0 and takes_branch), y).backward()
            clip()
            optimizer.step()
        return torch.cat([one.detach().reshape(-1) for one in model.parameters()])

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
        prepare(models[-1])
    ddp = DistributedDataParallel(models[0], bucket_cap_mb=1, find_unused_parameters=True)
    sync = telegrad.Synchronizer(models[1], comm, clip_norm=0.5)
    by_ddp = steps(ddp, ddp.no_sync, lambda: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5))
    torch.testing.assert_close(steps(models[1], sync.no_sync, lambda: None), by_ddp, rtol=1e-3, atol=1e-5)
    assert sync.plan is not None


def low_rank_learns(comm: Communicator) -> None:
    """Over several buckets, which DDP lays out anew; with the optimizer's momentum; and on from a checkpoint."""
    Job(comm, with_momentum, compress=LowRank(2, 16)).learns()
    Job(comm, lambda p: torch.optim.AdamW(p, 0.002), compress=LowRank(1, 16), warmup=Warmup(3)).learns()
    for values in ("f32", "int8"):
        jobs = [Job(comm, with_momentum, compress=LowRank(2, 16, values), nonfinite="skip") for _ in range(2)]
        first, second = jobs
        first.run(0, 6)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))  # which shares its tensors
        second.state.load_state_dict(first.state.state_dict())
        if values == "f32":
            assert first.run(6, 9) == second.run(6, 9)
            assert_equal(first.flat(), second.flat())
        else:  # DDP's first pass has its matrices in other buckets, where others share their scales
            np.testing.assert_allclose(first.run(6, 9), second.run(6, 9), rtol=1e-2)


def ranks_that_were_given_others_are_told(comm: Communicator) -> None:
    """On all of them, when the state is made; the communicator stays usable."""
    ddp = DistributedDataParallel(Net())

    def refused(error: type[Exception], said: str, *options: dict[str, Any]) -> None:
        with pytest.raises(error, match=said):
            DDPState(comm, ddp, **objects_of(**options[comm.rank]))

    for name, values in (
        ("compress", ["topk", None]),
        ("density", [0.01, 0.1]),
        ("momentum", [0.5, 0.9]),
        ("clip_norm", [None, 1.0]),
        ("nonfinite", ["skip", "raise"]),
        ("select", ["reused", "topk"]),
        ("values", ["auto", "int8"]),
    ):
        optimizer = SGD(ddp.parameters(), 0.1)
        shown = ["TopK", None] if name == "compress" else values
        said = rf"{name} of rank 1 and rank 0 differ: .* \(rank 1: {shown[1]}, rank 0: {shown[0]}\)"
        refused(ValueError, said, *({name: one, "optimizer": optimizer} for one in values))
    one_sign = [{"policy": lambda _, same=same: ParameterCompression(ExactTopK(same), 0.1)} for same in (False, True)]
    refused(ValueError, "what is compressed of rank 1 and rank 0 differ", *one_sign)  # type: ignore[misc]
    scaler = torch.amp.GradScaler("cpu")
    refused(ValueError, "a scaler of rank 1", {"nonfinite": "skip"}, {"nonfinite": "skip", "scaler": scaler})
    wrong = "clip_norm=0 must be above 0"
    refused(ValueError, wrong if comm.rank == 1 else f"on rank 1: {wrong}", {}, {"clip_norm": 0})

    seeded = functools.partial(ParameterCompression, RandomK(rank=comm.rank), 0.1)  # what rightly differs
    DDPState(comm, ddp, compress=TopK(policy=lambda _: seeded()))
    DDPState(comm, ddp, compress=TopK(select=RandomK(rank=comm.rank)))  # type: ignore[arg-type]


def a_synchronizer_that_compresses_loses_nothing(comm: Communicator) -> None:
    """Over plans from measured times; what arrived and what waits is what all ranks gave, and weights stay equal."""
    for compression in ("topk", "cheapest"):
        torch.manual_seed(0)
        model = Net()
        totals: list[dict[str, torch.Tensor]] = [
            {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in model.named_parameters()}
            for _ in range(2)
        ]
        given, accounted = totals

        def note(name: str, given: dict[str, torch.Tensor], one: torch.Tensor) -> None:
            given[name] += one.grad.double()

        for name, one in model.named_parameters():  # before the Synchronizer's, so of what this rank gives
            one.register_post_accumulate_grad_hook(functools.partial(note, name, given))
        options: dict[str, Any] = {"density": 0.05, "small_elements": 16}
        sync = telegrad.Synchronizer(model, comm, **objects_of(compress=compression, plan_after=4, **options))
        optimizer = SGD(model.parameters(), 0.02)
        for step in range(20):
            optimizer.zero_grad()
            x, y = data(step, comm.rank)
            torch.nn.functional.mse_loss(model(x, True), y).backward()
            for name, one in model.named_parameters():
                accounted[name] += one.grad.double()  # on each rank the average
            optimizer.step()
        assert sync.plan is not None
        assert sync.stats is not None
        assert sync.stats.selected > 0 or compression == "cheapest"
        for name, entry in sync.state_dict()["compressor"]["parameters"].items():
            accounted[name] += entry["residual"].double().view_as(accounted[name]) * entry["unit"]
        for name, total in given.items():
            comm.all_reduce(total)
            comm.all_reduce(accounted[name])
            torch.testing.assert_close(accounted[name], total, rtol=1e-4, atol=1e-6)
        weights = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
        every = comm.all_gather(weights)
        assert (every == every[0]).all()
        sync.close()


SCENARIOS: list[Callable[[Communicator], None]] = [
    momentum_is_that_of_sgd,
    momentum_correction_learns,
    adam_learns,
    parameter_groups_and_a_falling_rate,
    gradient_scaler,
    local_clipping,
    counters_of_the_whole_job,
    wires_learn,
    one_signed_layers_learn,
    shared_and_frozen_parameters,
    accumulation_with_momentum,
    distributed_checkpoint,
    low_rank_learns,
    ranks_that_were_given_others_are_told,
    the_synchronizer_trains_as_ddp_does,
    a_synchronizer_that_compresses_loses_nothing,
]


def run_all(init_method: str) -> None:
    """Those of ddp_program and ddp_discards_program, these, and those of ddp_watch_program."""
    run_scenarios(init_method, [*SCENARIOS_OF_HOOKS, *SCENARIOS_OF_DISCARDS, *SCENARIOS, *SCENARIOS_OF_MISUSE])
