"""Scenarios of gpu_training_program.py that hold a device's compression against the host's, bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from gpu_scenario_device import DEVICE, ON_GPU
from torch import nn
from varied_options import module_of, objects_of

import telegrad
from telegrad import Communicator, DDPState
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.ddp import ByShape

STEPS = 6


def compressed_bits() -> None:
    """What the device averages, and what waits there, has the bits of the host's compression of the same gradients;
    from the second step on what was captured is replayed."""
    _hold_against_the_host(
        {"select": "topk"},
        {"select": "reused", "interval": 3},
        {"select": "topk", "momentum": 0.9, "nesterov": True},
        {"select": "topk", "dtype": torch.bfloat16, "nonfinite": "skip"},
        {"select": "topk", "values": "packed-bf16"},
        {"select": "topk", "values": "int8", "nonfinite": "skip"},
    )


def combined_bits() -> None:
    """So it has with selections that search, draw or look at buckets, and however ranks combine entries."""
    _hold_against_the_host(
        {"select": "buckets"},
        {"select": "random"},
        {"select": "sampled", "interval": 3},
        {"select": "search", "momentum": 0.9},
        {"select": "gaussian"},
        {"select": "topk", "same_sign": True, "output": [], "values": "auto"},
        {"select": "reused", "combine": "oktopk"},
        {"select": "topk", "combine": "oktopk", "values": "int8", "momentum": 0.9},
        {"select": "topk", "combine": "gtopk", "nonfinite": "skip"},
        {"select": "topk", "combine": "bounded", "values": "auto"},
        {"select": "topk", "combine": "allgather", "dtype": torch.bfloat16},
    )


def _hold_against_the_host(*ways: dict[str, Any]) -> None:
    from handmade_buckets import Bucket

    shapes = {"large": (600, 600), "middle": (40, 300), "small": (50,)}
    buckets = [["middle", "small"], ["large"]]
    for options in ways:
        dtype = options.pop("dtype", torch.float32)
        given = {"density": 0.02, "small_elements": 100, "values": "packed", **options}
        with Communicator.from_torch(timeout_s=60) as comm:
            states, parameters, buffers = [], [], {}
            for device in (torch.device("cpu"), DEVICE):
                own = {
                    name: nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for name, shape in shapes.items()
                }
                optimizer = {"optimizer": torch.optim.SGD(own.values(), lr=0.1)} if "momentum" in given else {}
                states.append(DDPState(comm, module_of(own), **objects_of(**given, **optimizer)))
                parameters.append(own)
            replays = _counted_replays()
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(100 * step + comm.rank)
                for number, names in enumerate(buckets):
                    sizes = [parameters[0][name].numel() for name in names]
                    gradient = torch.randn(sum(sizes), generator=generator).pow(3).to(dtype)
                    averages = []
                    for state, own in zip(states, parameters, strict=True):
                        made = torch.empty_like(gradient, device=own[names[0]].device)
                        buffer = buffers.setdefault((number, id(state)), made)
                        buffer.copy_(gradient)
                        bucket = Bucket([own[name] for name in names], buffer, number, number == len(buckets) - 1)
                        averages.append((buffer, telegrad.ddp_hook(state, bucket)))
                    if number == len(buckets) - 1 or given.get("nonfinite") != "skip":
                        for _, future in averages:
                            future.wait()
                        assert torch.equal(averages[0][0], averages[1][0].cpu()), (options, step, names)
            host, device_state = (state.state_dict()["compressor"] for state in states)
            for group, kind in (("parameters", "residual"), ("velocities", "velocity")):
                for name, entry in host.get(group, {}).items():
                    assert torch.equal(entry[kind], device_state[group][name][kind]), (options, name)
            states[0].load_state_dict(states[1].state_dict())
            assert len(replays) == (len(buckets) * (STEPS - 1) if ON_GPU else 0)
            comm.barrier()


def low_rank_sums() -> None:
    """What the device averages is about what the host does, with the same bits on all ranks, and nothing is lost."""
    from handmade_buckets import Bucket

    shapes = {"large": (600, 600), "middle": (40, 300), "small": (50,)}
    mixed = telegrad.LowRank(policy=ByShape(2, 100, ("middle",), 0.05))
    for compress in (telegrad.LowRank(2, 100, "f32"), telegrad.LowRank(2, 100), mixed):
        with Communicator.from_torch(timeout_s=60) as comm:
            given, sent = torch.zeros(372_050, dtype=torch.float64), torch.zeros(372_050, dtype=torch.float64)
            states, parameters = [], []
            for device in (torch.device("cpu"), DEVICE):
                own = {name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in shapes.items()}
                states.append(DDPState(comm, module_of(own), compress=compress, nonfinite="skip"))
                parameters.append([*own.values()])
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(100 * step + comm.rank)
                gradient = torch.randn(given.numel(), generator=generator)
                averages = []
                for state, members in zip(states, parameters, strict=True):
                    buffer = gradient.to(members[0].device, copy=True)
                    telegrad.ddp_hook(state, Bucket(members, buffer, 0, True)).wait()  # type: ignore[arg-type]
                    averages.append(buffer.cpu())
                same = [averages[1].clone(), averages[1].clone()]
                comm.all_reduce(same[0], "min")
                comm.all_reduce(same[1], "max")
                assert torch.equal(same[0], same[1]), (compress, step)
                assert (averages[1] - averages[0]).norm() < 0.02 * averages[0].norm(), (compress, step)
                given += gradient
                sent += comm.world_size * averages[1].double()
            comm.all_reduce(given)
            entries = states[1].state_dict()["compressor"]["parameters"]
            kept = torch.cat([entries[name]["residual"] for name in ("large", "middle")] + [torch.zeros(50)]).double()
            comm.all_reduce(kept)
            torch.testing.assert_close(sent + kept, given, rtol=0, atol=1e-3)
            comm.barrier()


def _counted_replays() -> list[Any]:
    """Of captured work, from here on."""
    found: list[Any] = []
    if ON_GPU:
        runtime = runtime_of(DEVICE.type)
        plain = type(runtime).replay
        runtime.replay = lambda captured: [found.append(captured), plain(runtime, captured)]  # type: ignore[method-assign]
    return found
