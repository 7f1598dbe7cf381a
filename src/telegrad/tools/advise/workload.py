"""What each rank computes in a step, for any mini-batch, and on which device: how fast that multiplies, and how fast it
goes through its memory.

The figures are assumptions for planning. Give the time of your own step where you know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from telegrad.synchronizer.trace import Trace

# The tensors of well-known networks: how many elements each has, and how much work the forward pass does with it.
# Computed from the architectures' descriptions. Biases and the scales of normalisations count as no work: what they
# take is memory traffic, which the network's other layers hide.


@dataclass(frozen=True)
class Parameter:
    """``macs``: multiplications with it in the forward pass of one sample."""

    name: str
    elements: int
    macs: int = 0


@dataclass(frozen=True)
class Architecture:
    """``parameters``: in the order of the forward pass. ``sample``: what one is."""

    name: str
    sample: str
    parameters: tuple[Parameter, ...]

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(one.elements for one in self.parameters)

    @property
    def macs(self) -> int:
        """Of the forward pass of one sample."""
        return sum(one.macs for one in self.parameters)

    def by_layer(self) -> Architecture:
        """With a layer's weight and bias as one tensor, as in Caffe."""
        joined: dict[str, Parameter] = {}
        for one in self.parameters:
            layer = one.name.removesuffix(".weight").removesuffix(".bias")
            before = joined.get(layer, Parameter(layer, 0))
            joined[layer] = Parameter(layer, before.elements + one.elements, before.macs + one.macs)
        return Architecture(self.name, self.sample, tuple(joined.values()))


Parameters = Iterator[Parameter]


def architecture(name: str) -> Architecture:
    """Raises ``ValueError`` for a name that is none of ``ARCHITECTURES``."""
    if name not in ARCHITECTURES:
        raise ValueError(f"model={name!r} is not known: use one of {', '.join(ARCHITECTURES)}, or record a profile")
    sample, build = ARCHITECTURES[name]
    return Architecture(name, sample, tuple(build()))


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False, width: int | None = None
) -> Parameters:
    """``side``: of the output. ``width``: of the kernel, if it is not square."""
    elements = inputs * outputs * kernel * (kernel if width is None else width)
    yield Parameter(f"{name}.weight", elements, elements * side * side)
    if bias:
        yield Parameter(f"{name}.bias", outputs)


def _norm(name: str, channels: int) -> Parameters:
    yield Parameter(f"{name}.weight", channels)
    yield Parameter(f"{name}.bias", channels)


def _linear(name: str, inputs: int, outputs: int, positions: int = 1) -> Parameters:
    yield Parameter(f"{name}.weight", inputs * outputs, inputs * outputs * positions)
    yield Parameter(f"{name}.bias", outputs)


def _resnet50() -> Parameters:
    """He, Zhang, Ren, Sun, CVPR 2016, with the stride in the 3x3 convolution."""
    yield from _convolution("conv1", 3, 64, 7, 112)
    yield from _norm("bn1", 64)
    inputs, side = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            before = side
            if stage > 1 and block == 0:
                side //= 2
            yield from _convolution(f"{name}.conv1", inputs, width, 1, before)
            yield from _norm(f"{name}.bn1", width)
            yield from _convolution(f"{name}.conv2", width, width, 3, side)
            yield from _norm(f"{name}.bn2", width)
            yield from _convolution(f"{name}.conv3", width, 4 * width, 1, side)
            yield from _norm(f"{name}.bn3", 4 * width)
            if block == 0:
                yield from _convolution(f"{name}.downsample", inputs, 4 * width, 1, side)
                yield from _norm(f"{name}.downsample.bn", 4 * width)
            inputs = 4 * width
    yield from _linear("fc", 2048, 1000)


def _vgg16() -> Parameters:
    """Simonyan, Zisserman, ICLR 2015, configuration D."""
    inputs, side = 3, 224
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for layer in range(count):
            yield from _convolution(f"conv{stage}.{layer}", inputs, width, 3, side, bias=True)
            inputs = width
        side //= 2
    yield from _linear("fc6", 512 * 7 * 7, 4096)
    yield from _linear("fc7", 4096, 4096)
    yield from _linear("fc8", 4096, 1000)


def _alexnet() -> Parameters:
    """Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014."""
    for name, inputs, outputs, kernel, side in (
        ("conv1", 3, 64, 11, 55),
        ("conv2", 64, 192, 5, 27),
        ("conv3", 192, 384, 3, 13),
        ("conv4", 384, 256, 3, 13),
        ("conv5", 256, 256, 3, 13),
    ):
        yield from _convolution(name, inputs, outputs, kernel, side, bias=True)
    yield from _linear("fc6", 256 * 6 * 6, 4096)
    yield from _linear("fc7", 4096, 4096)
    yield from _linear("fc8", 4096, 1000)


# 1x1; 3x3 after its reduction; 5x5 after its reduction; 1x1 after pooling.
_INCEPTION = (
    ("3a", 192, 28, (64, 96, 128, 16, 32, 32)),
    ("3b", 256, 28, (128, 128, 192, 32, 96, 64)),
    ("4a", 480, 14, (192, 96, 208, 16, 48, 64)),
    ("4b", 512, 14, (160, 112, 224, 24, 64, 64)),
    ("4c", 512, 14, (128, 128, 256, 24, 64, 64)),
    ("4d", 512, 14, (112, 144, 288, 32, 64, 64)),
    ("4e", 528, 14, (256, 160, 320, 32, 128, 128)),
    ("5a", 832, 7, (256, 160, 320, 32, 128, 128)),
    ("5b", 832, 7, (384, 192, 384, 48, 128, 128)),
)


def _googlenet() -> Parameters:
    """Szegedy et al., CVPR 2015, Table 1, with both auxiliary classifiers."""
    yield from _convolution("conv1", 3, 64, 7, 112, bias=True)
    yield from _convolution("conv2.reduce", 64, 64, 1, 56, bias=True)
    yield from _convolution("conv2", 64, 192, 3, 56, bias=True)
    for block, inputs, side, (one, reduce3, three, reduce5, five, pooled) in _INCEPTION:
        name = f"inception{block}"
        yield from _convolution(f"{name}.1x1", inputs, one, 1, side, bias=True)
        yield from _convolution(f"{name}.3x3.reduce", inputs, reduce3, 1, side, bias=True)
        yield from _convolution(f"{name}.3x3", reduce3, three, 3, side, bias=True)
        yield from _convolution(f"{name}.5x5.reduce", inputs, reduce5, 1, side, bias=True)
        yield from _convolution(f"{name}.5x5", reduce5, five, 5, side, bias=True)
        yield from _convolution(f"{name}.pool", inputs, pooled, 1, side, bias=True)
        if block in ("4a", "4d"):
            outputs = one + three + five + pooled
            yield from _convolution(f"aux{block}.conv", outputs, 128, 1, 4, bias=True)
            yield from _linear(f"aux{block}.fc1", 128 * 4 * 4, 1024)
            yield from _linear(f"aux{block}.fc2", 1024, 1000)
    yield from _linear("fc", 1024, 1000)


def _transformer(name: str, width: int, positions: int, *, fused: bool) -> Parameters:
    """One layer. ``fused``: queries, keys and values come of one matrix. Attention itself has no parameters: what it
    multiplies is counted with the projection of its output."""
    for part in ("qkv",) if fused else ("query", "key", "value"):
        yield from _linear(f"{name}.attention.{part}", width, 3 * width if fused else width, positions)
    weight, bias = _linear(f"{name}.attention.output", width, width, positions)
    yield Parameter(weight.name, weight.elements, weight.macs + 2 * positions * positions * width)
    yield bias
    yield from _norm(f"{name}.norm1", width)
    yield from _linear(f"{name}.mlp.1", width, 4 * width, positions)
    yield from _linear(f"{name}.mlp.2", 4 * width, width, positions)
    yield from _norm(f"{name}.norm2", width)


_BERT_POSITIONS, _GPT_POSITIONS = 512, 1024


def _bert_base() -> Parameters:
    """Devlin et al., NAACL 2019, the encoder, on sequences of 512 tokens."""
    width = 768
    for name, rows in (("word", 30522), ("position", 512), ("type", 2)):
        yield Parameter(f"embedding.{name}", rows * width)
    yield from _norm("embedding.norm", width)
    for layer in range(12):
        yield from _transformer(f"layer{layer}", width, _BERT_POSITIONS, fused=False)
    yield from _linear("pooler", width, width)


def _gpt2_small() -> Parameters:
    """Radford et al., 2019, on sequences of 1,024 tokens. The output layer has the weights of the embedding, whose
    gradient is whole only at the end of the backward pass; its work, which comes first there, has no elements."""
    width, vocabulary = 768, 50257
    yield Parameter("embedding.word", vocabulary * width)
    yield Parameter("embedding.position", 1024 * width)
    for layer in range(12):
        yield from _transformer(f"layer{layer}", width, _GPT_POSITIONS, fused=True)
    yield from _norm("norm", width)
    yield Parameter("output", 0, vocabulary * width * _GPT_POSITIONS)


def _lstm() -> Parameters:
    """Zaremba, Sutskever, Vinyals, 2014, "large": 2 layers of 1,500 on the Penn Treebank, unrolled 35 steps."""
    width, vocabulary, steps = 1500, 10_000, 35
    yield Parameter("embedding", vocabulary * width)
    for layer in range(2):
        for part in ("input", "hidden"):
            yield from _linear(f"lstm{layer}.{part}", width, 4 * width, steps)
    yield from _linear("output", width, vocabulary, steps)


ARCHITECTURES: dict[str, tuple[str, Callable[[], Parameters]]] = {
    "resnet50": ("image of 224 x 224", _resnet50),
    "googlenet": ("image of 224 x 224", _googlenet),
    "alexnet": ("image of 224 x 224", _alexnet),
    "vgg16": ("image of 224 x 224", _vgg16),
    "bert-base": ("sequence of 512 tokens", _bert_base),
    "gpt2-small": ("sequence of 1,024 tokens", _gpt2_small),
    "lstm": ("sequence of 35 words", _lstm),
}
"""By name: what a sample is, and the parameters."""


def trace_of(model: Architecture, compute_s: float, *, element_bytes: int = 4) -> Trace:
    """A model of the step: ``compute_s`` seconds, a third of them forward, the rest divided among the gradients as
    the multiplications with their parameters are.

    Raises ``ValueError`` for a time that is not above 0 and finite.
    """
    if not 0 < compute_s < math.inf:
        raise ValueError(f"compute_s={compute_s} must be above 0 and finite: the seconds of a step on one rank")
    backward = [*reversed(model.parameters)]
    per_mac = compute_s * _BACKWARD_SHARE / model.macs
    return Trace(
        tuple(one.name for one in backward),
        tuple(one.elements * element_bytes for one in backward),
        tuple(one.macs * per_mac for one in backward),
        compute_s * (1 - _BACKWARD_SHARE),
        f"{model.name}, a step of {compute_s * 1e3:g} ms divided by multiplications",
    )


_BACKWARD_SHARE = 2 / 3


_FLOP_PER_MAC = 2
_FORWARD_AND_BACKWARD = 3  # the backward pass multiplies twice as much
ELEMENT_BYTES = 4
REUSED_BYTES, EXACT_BYTES = 12, 36
"""Of memory traffic for an element: to add a gradient to its residual and take what a known threshold lets through; and
to find the threshold before, in six further readings."""
_ENTRY_BYTES = 16  # an index and a value are read, the entry of the vector is read and written


@dataclass(frozen=True)
class Device:
    """``flops_per_s`` and ``memory_bytes_per_s`` as they are reached; ``launch_s``: to start a kernel. ``about``: where
    they come from. Raises ``ValueError`` for rates that are not above 0 and for a launch below 0."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 1e-5
    about: str = ""

    def __post_init__(self) -> None:
        for field in fields(self)[1:3]:
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be above 0 and finite")
        if not 0 <= self.launch_s < math.inf:
            raise ValueError(f"launch_s={self.launch_s} must be 0 or more seconds, and finite")

    def compute_s(self, model: Architecture, samples: float) -> float:
        """Forward and backward, of so many samples."""
        return samples * model.macs * _FLOP_PER_MAC * _FORWARD_AND_BACKWARD / self.flops_per_s

    def pass_s(self, size: float, *, kernels: int = 1) -> float:
        """To move so many bytes of memory, in so many kernels."""
        return kernels * self.launch_s + size / self.memory_bytes_per_s

    def select_s(self, size: int, *, element_bytes: float = REUSED_BYTES, kernels: int = 2) -> float:
        """To select from a gradient of so many bytes, with ``element_bytes`` of traffic for each of its elements."""
        return self.pass_s(size / ELEMENT_BYTES * element_bytes, kernels=kernels)

    def scatter_s(self, entries: float, messages: int = 1) -> float:
        """To add the entries of so many messages, ``entries`` in all, to a vector, a kernel for each message."""
        return self.pass_s(entries * _ENTRY_BYTES, kernels=messages)


def _half_of_peak(name: str, long_name: str, peak_tflops: float, peak_gb_per_s: float) -> Device:
    about = (
        f"{long_name}: half of its peak of {peak_tflops:g} Tflop/s in float32, two thirds of its memory's "
        f"{peak_gb_per_s:g} GB/s, 10 µs to start a kernel"
    )
    return Device(name, peak_tflops * 1e12 / 2, peak_gb_per_s * 1e9 * 2 / 3, about=about)


DEVICES = {
    one.name: one
    for one in (
        _half_of_peak("k80", "one of the two GK210 of a Tesla K80", 4.37, 240),
        _half_of_peak("p100", "Tesla P100", 9.3, 732),
        _half_of_peak("v100", "Tesla V100", 15.7, 900),
        _half_of_peak("a100", "A100, without TF32", 19.5, 1555),
    )
}
"""By name: published peaks, and an assumption of how much of them is reached."""

SAMPLES = {
    "resnet50": 32,
    "googlenet": 32,
    "alexnet": 128,
    "vgg16": 32,
    "bert-base": 8,
    "gpt2-small": 4,
    "lstm": 20,
}
"""A rank's mini-batch where nothing else is asked for, by the architecture's name."""


def device_of(name: str) -> Device:
    """Raises ``ValueError`` for a name that is none of ``DEVICES``."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not known: use one of {', '.join(DEVICES)}, or say what a step takes")
    return DEVICES[name]


@dataclass(frozen=True)
class Workload:
    """``trace``: of a step of ``samples`` on one rank; ``fixed_s``: the part of it that does not shrink with the
    mini-batch, such as starting kernels, which is why small batches are inefficient. ``model``: its name.

    Raises ``ValueError`` for samples that are not above 0 and for a fixed part beyond the whole.
    """

    model: str
    trace: Trace
    samples: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.samples < math.inf:
            raise ValueError(f"samples={self.samples} must be above 0 and finite: the mini-batch of a rank")
        if not 0 <= self.fixed_s <= self.trace.compute_s:
            raise ValueError(
                f"fixed_s={self.fixed_s} must be from 0 to {self.trace.compute_s:g}, which the whole step takes"
            )

    def of(self, samples: float) -> Workload:
        """The same with another mini-batch. Raises ``ValueError`` for one that is not above 0."""
        if not 0 < samples < math.inf:
            raise ValueError(f"samples={samples} must be above 0 and finite: the mini-batch of a rank")
        whole_s = self.trace.compute_s
        if samples == self.samples or whole_s == 0:
            return replace(self, samples=samples)
        compute_s = self.fixed_s + (whole_s - self.fixed_s) * samples / self.samples
        return replace(self, trace=scaled(self.trace, compute_s / whole_s), samples=samples)


def of_model(
    name: str, device: Device, *, samples: float | None = None, compute_s: float | None = None, fixed_s: float = 0.0
) -> Workload:
    """A step of a known architecture: of ``samples`` (``None``: ``SAMPLES``) in ``compute_s`` seconds (``None``: those
    of its multiplications on ``device``, and ``fixed_s``).

    Raises ``ValueError`` for unknown names and for numbers that make no sense.
    """
    shape = architecture(name)
    count = SAMPLES[name] if samples is None else samples
    if not 0 < count < math.inf:
        raise ValueError(f"samples={count} must be above 0 and finite: the mini-batch of a rank")
    seconds = fixed_s + device.compute_s(shape, count) if compute_s is None else compute_s
    return Workload(name, trace_of(shape, seconds), count, fixed_s)


def scaled(trace: Trace, factor: float) -> Trace:
    """With all times multiplied. Raises ``ValueError`` for a factor that is below 0 or not finite."""
    if not 0 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be 0 or more, and finite")
    times = tuple(one * factor for one in trace.backward_times)
    return replace(trace, backward_times=times, forward_s=trace.forward_s * factor)
