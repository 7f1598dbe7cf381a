"""One rank's training run of the demo, and its model, a small GPT over bytes. Needs torch.

The runs differ only in the hook that DDP is given. On a GPU all ranks train on the same one. A scheme that
DDPState refuses there is reported as ``refused``, with the reason.

Messages go to standard output, one JSON object a line; ``job`` reads them. Definitions, the same for all runs:

*Step time*: from drawing the batch to the end of the optimizer's step, on rank 0. *Training time*: the sum of it,
without validation and start-up. *Exposed communication*: from the moment when the backward pass has computed this
rank's last gradient to the moment when ``backward()`` returns, which is when all averaged gradients are there. A step
would be shorter by this time if the network, and everything done for it after the last gradient, took no time; waiting
for slower ranks is in it. On a device both moments are points of its stream. *Bytes*: the increase of the interface's
sent bytes over the training steps, headers and dense warm-up included; the first broadcast of the weights and the
validation's few bytes are outside. Where telegrad's ranks meet in shared memory, its own counter of sent bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from telegrad.tools.bench.device import BenchmarkDevice, Cuda
from telegrad.tools.demo.job import (
    FP16,
    LOW_RANK,
    OUTER,
    POWERSGD,
    POWERSGD_DENSE_STEPS,
    SCHEMES,
    SPARSELOCO,
    STREAMING,
    TORCHFT,
    VOCABULARY,
    Corpus,
    ModelSize,
    Settings,
    Tokens,
    number_in,
    training_batch,
    validation_batches,
)

# A small GPT over bytes: made to learn something within two minutes on one core per two ranks. Needs torch.


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each on top of the stream (pre-norm)."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for layer in (self.queries_keys_values, self.up):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        for layer in (self.attention_out, self.down):  # together they add about one unit of variance to the stream
            nn.init.normal_(layer.weight, std=(2 * layers * layer.in_features) ** -0.5)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.queries_keys_values(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        down: Tensor = self.down(F.gelu(self.up(self.perceptron_norm(x))))
        return x + down


class ByteGPT(nn.Module):
    """Takes bytes, int64 of shape (batch, length ≤ context); gives the next byte's logits, (batch, length, 256).

    A position sees the codes of its own byte and of the ``history`` − 1 before it at once, so that the first steps
    already learn which letters follow each other.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        if size.width % size.heads:
            raise ValueError(f"width={size.width} must be a multiple of heads={size.heads}")
        self.codes = nn.ModuleList(nn.Embedding(VOCABULARY, size.width) for _ in range(size.history))
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads, size.layers) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for code in self.codes:
            assert isinstance(code, nn.Embedding)
            nn.init.normal_(code.weight, std=size.history**-0.5)
        nn.init.normal_(self.positions.weight, std=0.1)
        nn.init.zeros_(self.head.weight)  # all bytes equally likely at first

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x: Tensor = self.positions.weight[:length]
        for back, code in enumerate(self.codes):
            x = x + code(F.pad(tokens[:, : length - back], (back, 0)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate_at(step: int, settings: Settings) -> float:
    """A ramp up, then half a cosine down to ``final_learning_rate``."""
    if step < settings.ramp_steps:
        return settings.learning_rate * (step + 1) / settings.ramp_steps
    done = (step - settings.ramp_steps) / max(1, settings.steps - settings.ramp_steps)
    low, high = settings.final_learning_rate, settings.learning_rate
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * done))


class StepTimes(NamedTuple):
    """Seconds; see ``worker`` for what they are."""

    step_s: float
    exposed_s: float


class StepClock(Protocol):
    """Called in this order in each step."""

    def begin(self) -> None: ...

    def reduced(self) -> None:
        """``backward()`` has returned."""

    def end(self) -> StepTimes:
        """The optimizer's step has been called."""


class HostStepClock:
    """Hooks on all parameters, below and before DDP's own, note when the last gradient is computed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._begun_s = self._last_s = self._reduced_s = 0.0
        _on_each_gradient(model, self._note)

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def reduced(self) -> None:
        self._reduced_s = time.perf_counter()

    def end(self) -> StepTimes:
        return StepTimes(time.perf_counter() - self._begun_s, self._reduced_s - self._last_s)

    def _note(self, _: torch.Tensor) -> None:
        self._last_s = time.perf_counter()


class DeviceStepClock:
    """The same where the host only puts kernels into a stream: marks there take the place of the host's time, and a
    step is over when the stream has come to its end."""

    def __init__(self, model: torch.nn.Module, device: BenchmarkDevice) -> None:
        self._device = device
        self._begun_s = 0.0
        self._last: Any = None
        self._reduced: Any = None
        _on_each_gradient(model, self._note)

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def reduced(self) -> None:
        self._reduced = self._device.mark()

    def end(self) -> StepTimes:
        self._device.synchronize()
        step_s = time.perf_counter() - self._begun_s
        return StepTimes(step_s, self._device.seconds(self._last, self._reduced))

    def _note(self, _: torch.Tensor) -> None:
        self._last = self._device.mark()


def _on_each_gradient(model: torch.nn.Module, note: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(note)  # type: ignore[no-untyped-call]


def main(settings_json: str) -> None:
    """What the launcher calls in each rank's process, with torchrun's environment variables set."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    settings = Settings.from_json(settings_json)
    torch.set_num_threads(1)
    device = Cuda() if settings.device == "cuda" else None  # before anything else meets CUDA
    dist.init_process_group("gloo")
    try:
        _Trainer(
            settings, lambda model: HostStepClock(model) if device is None else DeviceStepClock(model, device)
        ).train()
    except RefusedError as refused:
        tell(kind="refused", reason=str(refused))
    finally:
        dist.destroy_process_group()
    # All is said and closed. Finalising the interpreter could still abort the process: one of torch's threads that asks
    # for Python's lock then is ended in the middle of C++ code that must not be unwound.
    sys.stdout.flush()
    os._exit(0)


def sent_bytes(interface: str) -> int:
    """What ``interface`` has sent since it exists, in this process's network namespace. Raises ``ValueError`` if there
    is no such interface.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    raise ValueError(f"interface={interface!r} does not exist here: see `ip link` for those that do")


class RefusedError(Exception):
    """This run cannot be done on this device."""


def tell(**message: Any) -> None:
    """Says something to whoever has started the ranks; only rank 0 is heard."""
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


class _Trainer:
    def __init__(self, settings: Settings, clock_of: Callable[[torch.nn.Module], StepClock]) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.corpus = Corpus.open(Path(settings.corpus))
        torch.manual_seed(settings.seed)
        model = ByteGPT(settings.model).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.clock = clock_of(model)
        self.model = model
        self.ddp: torch.nn.Module = model
        self.comm: Any = None
        self.state: Any = None
        self.diloco: Any = None
        self.optimizer = optimizer_of(model, settings)
        self.ends = contextlib.ExitStack()
        outer = {kind: number for kind in OUTER if (number := number_in(settings.run, kind))}
        if outer:
            self._use_diloco(*outer.popitem())
        elif every := number_in(settings.run, TORCHFT):
            self._use_torchft(every)
        else:
            self._use_ddp(model)
        self.sent = 0.0  # bytes in training steps so far
        self.training_s = 0.0

    def _use_ddp(self, model: torch.nn.Module) -> None:
        settings, rank = self.settings, number_in(self.settings.run, POWERSGD)
        # Over Gloo sums of buckets that PowerSGD has under way at once get mixed up, so it gets a single one.
        bucket_mb = settings.bucket_mb if rank is None else 1 + 4 * self.parameters / 2**20
        self.ddp = ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        if settings.run == FP16:
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif rank is not None:
            dense = max(settings.warmup_steps, POWERSGD_DENSE_STEPS)
            ddp.register_comm_hook(
                powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=dense), powerSGD_hook.powerSGD_hook
            )
        elif settings.run != "ddp-gloo":
            self._use_telegrad(ddp)

    def _use_diloco(self, kind: str, every: int) -> None:
        """All that a user changes in a script that trains on one machine."""
        import telegrad

        self.comm = telegrad.Communicator.from_torch()
        classes = {SPARSELOCO: telegrad.DiLoCo.sparse, STREAMING: telegrad.DiLoCo.streaming}
        make: Any = classes.get(kind, telegrad.DiLoCo)
        self.diloco = make(self.model, self.comm, self.optimizer, every=every)

    def _use_torchft(self, every: int) -> None:
        """Each rank is a replica of its own. Rank 0 has the server by which they find each other."""
        os.environ.setdefault("RUST_LOG", "error")
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # which sends nothing
            way.connect((os.environ["MASTER_ADDR"], 1))
            own = way.getsockname()[0]
        server = [""]
        if self.rank == 0:
            lighthouse = LighthouseServer(bind=f"{own}:0", min_replicas=self.world_size)
            self.ends.callback(lighthouse.shutdown)
            server = [f"http://{own}:{lighthouse.address().rpartition(':')[2]}"]
        dist.broadcast_object_list(server)
        self.ends.callback(dist.barrier)  # the server stays until all replicas have ended
        store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.ends.callback(lambda: store)  # which lives as long
        manager = Manager(
            ProcessGroupGloo(),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=self.world_size,
            use_async_quorum=False,
            init_sync=False,  # all replicas begin with the same weights
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=store.port,
            lighthouse_addr=server[0],
            replica_id=f"rank{self.rank}",
            hostname=own,
        )
        self.ends.callback(manager.shutdown)
        # What telegrad.DiLoCo has by default.
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.ends.enter_context(DiLoCo(manager, [self.model], self.optimizer, outer, sync_every=every))

    def _use_telegrad(self, ddp: DistributedDataParallel) -> None:
        """All that a user changes in a training script."""
        import telegrad

        self.comm = telegrad.Communicator.from_torch()
        mode = self.settings.run.removeprefix("telegrad-")
        options: dict[str, Any] = {"compress": None}
        if mode == "sparse":
            compress = telegrad.TopK(self.settings.density, **SCHEMES[self.settings.scheme])
            options = {"compress": compress, "warmup": telegrad.Warmup(self.settings.warmup_steps)}
        elif (rank := number_in(self.settings.run, LOW_RANK)) is not None:
            warmup = telegrad.Warmup(self.settings.warmup_steps)
            options = {"compress": telegrad.LowRank(rank), "warmup": warmup}
        try:
            self.state = telegrad.DDPState(self.comm, ddp, **options)
        except TypeError as error:
            self.comm.close()
            raise RefusedError(str(error)) from error
        ddp.register_comm_hook(self.state, telegrad.ddp_hook)

    def train(self) -> None:
        settings = self.settings
        tokens = settings.batch * settings.model.context * self.world_size
        tell(kind="start", parameters=self.parameters, tokens=tokens)
        validations = settings.validation_steps()
        dist.barrier()
        sent_before = self._counted()
        for step in range(settings.steps):
            self._step(step, sent_before)
            if step + 1 in validations:
                self.sent += self._counted() - sent_before
                tell(kind="validation", step=step + 1, loss=self._validate(), **self._totals())
                dist.barrier()
                sent_before = self._counted()
        if self.state is not None:
            self.state.synchronize()
        if self.diloco is not None:
            self.diloco.exchange()
        tell(kind="end", **self._totals(), **self._over_ranks())
        if self.comm is not None:
            self.comm.close()
        self.ends.close()

    def _step(self, step: int, sent_before: float) -> None:
        self.clock.begin()
        self.optimizer.param_groups[0]["lr"] = learning_rate_at(step, self.settings)
        inputs, targets = training_batch(
            self.corpus.training,
            seed=self.settings.seed,
            step=step,
            rank=self.rank,
            batch=self.settings.batch,
            context=self.settings.model.context,
        )
        loss = loss_of(self.ddp(self._placed(inputs)), self._placed(targets))
        loss.backward()  # type: ignore[no-untyped-call]
        self.clock.reduced()
        self.optimizer.step()
        self.optimizer.zero_grad()
        times = self.clock.end()
        self.training_s += times.step_s
        sent = self.sent + self._counted() - sent_before
        tell(kind="step", step=step + 1, loss=loss.item(), sent=sent, **times._asdict())

    def _placed(self, tokens: Tokens) -> torch.Tensor:
        return torch.from_numpy(tokens).to(self.device)

    def _validate(self) -> float:
        """The mean loss on the held-out windows, each rank taking its share of them."""
        total = torch.zeros(2, dtype=torch.float64)
        model = self.model
        with torch.no_grad():
            for inputs, targets in validation_batches(
                self.corpus.held_out,
                windows=self.settings.validation_windows,
                batch=8,
                context=self.settings.model.context,
                rank=self.rank,
                world_size=self.world_size,
            ):
                loss = loss_of(model(self._placed(inputs)), self._placed(targets))
                total += torch.tensor([loss.item() * len(inputs), len(inputs)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _totals(self) -> dict[str, float]:
        return {"training_s": self.training_s, "sent": self.sent}

    def _over_ranks(self) -> dict[str, list[float]]:
        """Every rank's sent bytes, and a checksum of its weights' bytes, by which one sees that all ranks are alike."""
        weights = 0
        for parameter in self.ddp.parameters():
            weights = zlib.crc32(parameter.detach().cpu().contiguous().numpy().data.cast("B"), weights)
        own = torch.tensor([self.sent, float(weights)], dtype=torch.float64)
        everybody = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everybody, own)
        return {
            "sent_by_rank": [float(one[0]) for one in everybody],
            "weights_by_rank": [float(one[1]) for one in everybody],
        }

    def _counted(self) -> float:
        """Bytes that this rank has sent so far, of which only differences say something. The loopback interface is
        everybody's: a rank's share of it is an average."""
        settings = self.settings
        if settings.shared_memory and self.comm is not None:
            return float(self.comm.stats()["bytes_sent"])
        sent = sent_bytes(settings.interface)
        return sent / self.world_size if settings.interface == "lo" else float(sent)
