"""``telegrad profile --meta``: shapes without memory, what a device takes for them, and times freed of noise."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import typer  # noqa: E402
from torch import nn  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from telegrad.synchronizer.trace import Trace  # noqa: E402
from telegrad.tools.advise.architectures import architecture  # noqa: E402
from telegrad.tools.advise.workload import Device, device_of  # noqa: E402
from telegrad.tools.bench import model_profile  # noqa: E402
from telegrad.tools.bench.model_profile import counted, on_meta, steadied  # noqa: E402
from telegrad.tools.cli import profile as command  # noqa: E402

_app = typer.Typer()
_app.command()(command.profile)

SLOW = Device("slow", 1e6, 1e30, launch_s=0.0)
"""Its memory takes no time, so that only arithmetic counts."""

FACTORIES = """
import numpy as np
import torch
from torch import nn

def model(batch=4):
    x = torch.randn(batch, 6)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), lambda model: model(x).square().mean()

def needs_values():
    x = torch.randn(4, 6)
    return nn.Linear(6, 1), lambda model: model(x[: int(x.sum().item())]).sum()

def needs_numpy():
    x = torch.randn(4, 6)
    return nn.Linear(6, 1), lambda model: model(x).sum() * float(x.numpy().sum())

def wrong_type():
    raise TypeError("a mistake of one's own")

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), lambda model: model(torch.ones(3, 2)).sum()
"""


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_arithmetic_is_counted_by_gradient() -> None:
    with on_meta():
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        x = torch.randn(4, 6)
        trace = counted(model, lambda model: model(x).sum(), SLOW)
    assert trace.forward_s == pytest.approx(2 * 4 * (6 * 5 + 5 * 2) / 1e6)
    there = dict(zip(trace.names, trace.backward_times, strict=True))
    # The second layer's weight and its input have a gradient each, the first layer's weight alone.
    assert there["1.weight"] + there["1.bias"] == pytest.approx(2 * 2 * 4 * 5 * 2 / 1e6)
    assert there["0.weight"] + there["0.bias"] == pytest.approx(2 * 4 * 6 * 5 / 1e6)
    assert dict(zip(trace.names, trace.sizes, strict=True))["0.weight"] == 120


def test_memory_traffic_is_counted_where_it_takes_longer() -> None:
    device = Device("narrow", 1e30, 1e3, launch_s=0.0)
    with on_meta():
        model = nn.PReLU(8)
        x = torch.randn(10, 8)
        trace = counted(model, lambda model: model(x).sum(), device)
    read_and_written = 4 * (80 + 8 + 80)
    summed, first_gradient = 4 * 81, 4 * 2
    assert trace.forward_s == pytest.approx((read_and_written + summed + first_gradient) / 1e3)


def test_attention_is_that_of_a_fused_kernel() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.query(x)[:, None]
            return nn.functional.scaled_dot_product_attention(query, query, value=query, is_causal=True)

    with on_meta():
        x = torch.randn(2, 64, 8)
        trace = counted(Attends(), lambda model: model(x).sum(), SLOW)
    attention_s = 2 * 2 * 64 * 64 * (8 + 8) / 1e6
    linear_s = 2 * 2 * 64 * 8 * 8 / 1e6
    assert trace.forward_s == pytest.approx(linear_s + attention_s)
    assert trace.backward_s == pytest.approx(linear_s + 2.5 * attention_s)


def test_a_language_model_of_a_billion_parameters_takes_seconds(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "llama.py").write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def make(batch=1):\n"
        "    config = LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,\n"
        "        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)\n"
        "    tokens = torch.randint(128256, (batch, 4096))\n"
        "    return LlamaForCausalLM(config), lambda model: model(tokens, labels=tokens).loss\n"
    )
    file = folder / "trace.json"
    begin = time.process_time()
    status, said = _run("llama.py:make", "--meta", "--device", "h100", "--batch", "2", "--json", str(file))
    assert status == 0, said
    assert time.process_time() - begin < 60  # of the processor: without memory for 5 GB of weights, and their gradients
    trace = Trace.from_json(file.read_text())
    assert trace.bytes == 4 * architecture("llama-1b").elements
    assert trace.samples == 2
    assert "llama.py:make, counted for h100" in said
    assert "H100 SXM: 40% of its peak" in said
    arithmetic_s = device_of("h100").compute_s(architecture("llama-1b"), 2)
    assert arithmetic_s < trace.compute_s < 3 * arithmetic_s


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        ("model", ["--steps", "3"], "--steps: --meta runs no step: leave this out"),
        ("model", ["--threads", "1"], "--threads: --meta runs no step: leave this out"),
        ("needs_values", [], "it does not run without values: "),
        ("needs_numpy", [], "it does not run without values: "),
        ("frozen", [], "no parameter that requires a gradient"),
        ("model", ["--device", "tpu"], "device 'tpu' is not known"),
    ],
)
def test_misuse_is_refused(folder: Path, target: str, arguments: list[str], said: str) -> None:
    status, text = _run(f"factories.py:{target}", "--meta", *arguments)
    assert status == 2
    assert said in text.replace("'--", "--").replace("steps'", "steps").replace("threads'", "threads")


def test_a_model_of_ones_own_needs_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from telegrad.tools.cli.advise import advise

    advising = typer.Typer()
    advising.command()(advise)
    monkeypatch.setitem(sys.modules, "telegrad.tools.bench.model_profile", None)
    monkeypatch.delattr("telegrad.tools.bench.model_profile")
    arguments = ["--model", "factories.py:model"]
    done = CliRunner().invoke(advising, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "torch is not installed: pip install 'telegrad[torch]'" in done.output
    status, said = _run("factories.py:model", "--meta")
    assert status == 2
    assert "torch is not installed: pip install 'telegrad[torch]'" in said


def test_a_device_without_meta_is_refused(folder: Path) -> None:
    status, said = _run("factories.py:model", "--device", "h100")
    assert status == 2
    assert "without --meta this machine computes: leave this out" in said


def test_a_factory_s_own_mistake_is_its_own_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="a mistake of one's own"):
        _run("factories.py:wrong_type", "--meta")


def test_samples_are_those_of_the_factory(folder: Path) -> None:
    factory = model_profile.open_factory("factories.py:model")
    assert (model_profile.samples_of(factory, None), model_profile.samples_of(factory, 9)) == (4.0, 9.0)
    assert model_profile.samples_of(model_profile.open_factory("factories.py:frozen"), None) is None
    file = folder / "trace.json"
    assert _run("factories.py:model", "--steps", "1", "--skip", "0", "--json", str(file))[0] == 0
    assert Trace.from_json(file.read_text()).samples == 4


def test_noise_does_not_lengthen_the_gradient_that_came_next() -> None:
    names, sizes = ("bias", "weight", "other"), (3 << 10, 9 << 20, 9 << 20)
    count = Trace(names, sizes, (0.001, 0.049, 0.05), 0.05)
    noisy = Trace(names, sizes, (0.055, 0.22, 0.225), 0.25)  # 11 % for a bias of 3 KiB
    found = steadied(noisy, count)
    assert found.backward_s == pytest.approx(0.5)
    assert found.backward_times[0] / found.backward_s == pytest.approx(0.02 / (0.02 + 0.445), rel=1e-6)
    assert found.backward_times[1] / found.backward_times[2] == pytest.approx(0.22 / 0.225)
    assert (found.names, found.sizes, found.forward_s) == (names, sizes, 0.25)


def test_what_is_near_its_count_or_has_none_stays() -> None:
    measured = Trace(("a", "b"), (4, 4), (0.3, 0.1), 0.2)
    assert steadied(measured, Trace(("a", "b"), (4, 4), (1.0, 1.0), 0.1)).backward_times == pytest.approx((0.3, 0.1))
    assert steadied(measured, Trace(("c",), (4,), (1.0,), 0.1)).backward_times == pytest.approx((0.3, 0.1))
    assert steadied(measured, Trace(("a", "b"), (4, 4), (0.0, 0.0), 0.0)) is measured
    other = Trace(("a", "b"), (4, 4), (0.0, 1.0), 0.1)
    alone = Trace(("a",), (4,), (0.3,), 0.2)
    assert steadied(alone, other) is alone  # its share is 0, and nothing else was measured
    still = Trace(("a",), (4,), (0.0,), 0.0)
    assert steadied(still, Trace(("a",), (4,), (1.0,), 0.1)) is still


class _Delayed(torch.autograd.Function):
    """Sleeps in the backward pass, as where another program runs."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.2)
        return gradient


class _Sleeping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Delayed.apply(x)  # type: ignore[no-any-return]


def test_a_small_gradient_of_a_real_model_is_bounded_by_its_work() -> None:
    model = nn.Sequential(nn.Linear(64, 12), _Sleeping(), nn.Linear(12, 1024), nn.Linear(1024, 1024))
    x = torch.randn(16, 64)
    trace = model_profile.profile(model, lambda model: model(x).square().mean(), steps=2, skip=1)
    shares = {name: one / trace.backward_s for name, one in zip(trace.names, trace.backward_times, strict=True)}
    assert trace.backward_s > 0.2
    assert shares["0.bias"] + shares["0.weight"] < 0.15  # 3 KiB, which 0.2 s of sleep would make most of it
