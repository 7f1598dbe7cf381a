"""The tensors of well-known networks: how many elements each has, and how much work the forward pass does with it.

Computed from the architectures' published configurations. Biases and the scales of normalizations count as no work:
their time is memory traffic, which the network's other layers hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Parameter:
    """``macs``: multiplications with it in the forward pass of one sample. ``rows``: its first dimension, which LowRank
    takes for the rows of a matrix; 1 of a vector."""

    name: str
    elements: int
    macs: int = 0
    rows: int = 1


@dataclass(frozen=True)
class Architecture:
    """``parameters``: in the order of the forward pass. ``sample``: what one is. ``mini_batch``: of a rank, if nothing
    else is asked for. ``optimizer``: with which it is trained as a rule, a name in ``advice.RECIPES``; ``family``: one
    of ``advice.FAMILIES``."""

    name: str
    sample: str
    parameters: tuple[Parameter, ...]
    mini_batch: int = 1
    optimizer: str = "adamw"
    family: str = "language"

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(one.elements for one in self.parameters)

    @property
    def macs(self) -> int:
        """Of the forward pass of one sample."""
        return sum(one.macs for one in self.parameters)


Parameters = Iterator[Parameter]


def architecture(name: str) -> Architecture:
    """Raises ``ValueError`` for a name that is none of ``ARCHITECTURES``."""
    if name not in ARCHITECTURES:
        raise ValueError(f"model={name!r} is not known: use one of {', '.join(ARCHITECTURES)}, or record a profile")
    return built(name, *ARCHITECTURES[name])


def built(name: str, kind: TrainedOn, mini_batch: int, build: Callable[[], Parameters]) -> Architecture:
    """Of an entry of ``ARCHITECTURES``."""
    return Architecture(name, kind.sample, tuple(build()), mini_batch, kind.optimizer, kind.family)


def convolution(
    name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False, width: int | None = None
) -> Parameters:
    """``side``: of the output. ``width``: of the kernel, if it is not square."""
    elements = inputs * outputs * kernel * (kernel if width is None else width)
    yield Parameter(f"{name}.weight", elements, elements * side * side, outputs)
    if bias:
        yield Parameter(f"{name}.bias", outputs)


def norm(name: str, channels: int) -> Parameters:
    yield Parameter(f"{name}.weight", channels)
    yield Parameter(f"{name}.bias", channels)


def linear(name: str, inputs: int, outputs: int, positions: int = 1, *, bias: bool = True) -> Parameters:
    yield Parameter(f"{name}.weight", inputs * outputs, inputs * outputs * positions, outputs)
    if bias:
        yield Parameter(f"{name}.bias", outputs)


def _resnet(*blocks_of_stages: int) -> Parameters:
    """He, Zhang, Ren, Sun, CVPR 2016, with the stride in the 3x3 convolution."""
    yield from convolution("conv1", 3, 64, 7, 112)
    yield from norm("bn1", 64)
    inputs, side = 64, 56
    for stage, blocks in enumerate(blocks_of_stages, 1):
        width = 32 << stage
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            before = side
            if stage > 1 and block == 0:
                side //= 2
            yield from convolution(f"{name}.conv1", inputs, width, 1, before)
            yield from norm(f"{name}.bn1", width)
            yield from convolution(f"{name}.conv2", width, width, 3, side)
            yield from norm(f"{name}.bn2", width)
            yield from convolution(f"{name}.conv3", width, 4 * width, 1, side)
            yield from norm(f"{name}.bn3", 4 * width)
            if block == 0:
                yield from convolution(f"{name}.downsample", inputs, 4 * width, 1, side)
                yield from norm(f"{name}.downsample.bn", 4 * width)
            inputs = 4 * width
    yield from linear("fc", 2048, 1000)


def _vgg16() -> Parameters:
    """Simonyan, Zisserman, ICLR 2015, configuration D."""
    inputs, side = 3, 224
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for layer in range(count):
            yield from convolution(f"conv{stage}.{layer}", inputs, width, 3, side, bias=True)
            inputs = width
        side //= 2
    yield from linear("fc6", 512 * 7 * 7, 4096)
    yield from linear("fc7", 4096, 4096)
    yield from linear("fc8", 4096, 1000)


def _transformer(name: str, width: int, positions: int, *, fused: bool) -> Parameters:
    """One layer. ``fused``: queries, keys and values come of one matrix. Attention itself has no parameters: what it
    multiplies is counted with the projection of its output."""
    for part in ("qkv",) if fused else ("query", "key", "value"):
        yield from linear(f"{name}.attention.{part}", width, 3 * width if fused else width, positions)
    weight, bias = linear(f"{name}.attention.output", width, width, positions)
    yield replace(weight, macs=weight.macs + 2 * positions * positions * width)
    yield bias
    yield from norm(f"{name}.norm1", width)
    yield from linear(f"{name}.mlp.1", width, 4 * width, positions)
    yield from linear(f"{name}.mlp.2", 4 * width, width, positions)
    yield from norm(f"{name}.norm2", width)


_BERT_POSITIONS, _GPT_POSITIONS = 512, 1024


def _bert(width: int, layers: int) -> Parameters:
    """Devlin et al., NAACL 2019, the encoder, on sequences of 512 tokens."""
    for name, rows in (("word", 30522), ("position", 512), ("type", 2)):
        yield Parameter(f"embedding.{name}", rows * width, rows=rows)
    yield from norm("embedding.norm", width)
    for layer in range(layers):
        yield from _transformer(f"layer{layer}", width, _BERT_POSITIONS, fused=False)
    yield from linear("pooler", width, width)


def _gpt2(width: int, layers: int) -> Parameters:
    """Radford et al., 2019, on sequences of 1,024 tokens. The output layer has the weights of the embedding, whose
    gradient is whole only at the end of the backward pass; its work, which comes first there, has no elements."""
    vocabulary = 50257
    yield Parameter("embedding.word", vocabulary * width, rows=vocabulary)
    yield Parameter("embedding.position", 1024 * width, rows=1024)
    for layer in range(layers):
        yield from _transformer(f"layer{layer}", width, _GPT_POSITIONS, fused=True)
    yield from norm("norm", width)
    yield Parameter("output", 0, vocabulary * width * _GPT_POSITIONS)


_VIT_POSITIONS = 197  # 14 x 14 patches and a class token


def _vit(width: int, layers: int) -> Parameters:
    """Dosovitskiy et al., ICLR 2021, patches of 16 x 16 pixels."""
    yield Parameter("class", width)
    yield Parameter("embedding.position", _VIT_POSITIONS * width, rows=_VIT_POSITIONS)
    yield from convolution("patches", 3, width, 16, 14, bias=True)
    for layer in range(layers):
        yield from _transformer(f"layer{layer}", width, _VIT_POSITIONS, fused=True)
    yield from norm("norm", width)
    yield from linear("head", width, 1000)


@dataclass(frozen=True)
class _Decoder:
    """The published configuration of a decoder with grouped queries, RMSNorm and a gated perceptron: its
    ``config.json``. ``tied``: the output layer has the weights of the embedding, as in ``_gpt2``."""

    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    tied: bool = False
    query_bias: bool = False
    query_norm: bool = False

    def parameters(self, positions: int = 4096) -> Parameters:
        width, queries, keys = self.width, self.heads * self.head, self.key_heads * self.head
        yield Parameter("embedding", self.vocabulary * width, rows=self.vocabulary)
        for layer in range(self.layers):
            name = f"layer{layer}"
            yield Parameter(f"{name}.norm1.weight", width)
            for part, outputs in (("query", queries), ("key", keys), ("value", keys)):
                yield from linear(f"{name}.attention.{part}", width, outputs, positions, bias=self.query_bias)
            for part in ("query", "key") if self.query_norm else ():
                yield Parameter(f"{name}.attention.{part}.norm.weight", self.head)
            attended = 2 * positions * positions * queries
            macs = queries * width * positions + attended
            yield Parameter(f"{name}.attention.output.weight", queries * width, macs, rows=width)
            yield Parameter(f"{name}.norm2.weight", width)
            for part in ("gate", "up"):
                yield from linear(f"{name}.mlp.{part}", width, self.inner, positions, bias=False)
            yield from linear(f"{name}.mlp.down", self.inner, width, positions, bias=False)
        yield Parameter("norm.weight", width)
        elements = self.vocabulary * width
        yield Parameter("output", 0 if self.tied else elements, elements * positions, rows=self.vocabulary)


_UNET_TIME, _UNET_TEXT, _UNET_TOKENS = 1280, 768, 77


def _unet_block(name: str, inputs: int, outputs: int, side: int, *, attends: bool) -> Parameters:
    """Two convolutions around the time step's embedding, and attention to the image and the text."""
    yield from norm(f"{name}.norm1", inputs)
    yield from convolution(f"{name}.conv1", inputs, outputs, 3, side, bias=True)
    yield from linear(f"{name}.time", _UNET_TIME, outputs)
    yield from norm(f"{name}.norm2", outputs)
    yield from convolution(f"{name}.conv2", outputs, outputs, 3, side, bias=True)
    if inputs != outputs:
        yield from convolution(f"{name}.shortcut", inputs, outputs, 1, side, bias=True)
    if attends:
        yield from _unet_attention(f"{name}.attention", outputs, side)


def _unet_attention(name: str, width: int, side: int) -> Parameters:
    positions = side * side
    yield from norm(f"{name}.norm", width)
    yield from convolution(f"{name}.in", width, width, 1, side, bias=True)
    for part, context, keys in (("self", width, positions), ("cross", _UNET_TEXT, _UNET_TOKENS)):
        yield from norm(f"{name}.{part}.norm", width)
        yield from linear(f"{name}.{part}.query", width, width, positions, bias=False)
        for one in ("key", "value"):
            yield from linear(f"{name}.{part}.{one}", context, width, keys, bias=False)
        weight, bias = linear(f"{name}.{part}.output", width, width, positions)
        yield replace(weight, macs=weight.macs + 2 * positions * keys * width)
        yield bias
    yield from norm(f"{name}.mlp.norm", width)
    yield from linear(f"{name}.mlp.1", width, 8 * width, positions)  # half of it gates the other half
    yield from linear(f"{name}.mlp.2", 4 * width, width, positions)
    yield from convolution(f"{name}.out", width, width, 1, side, bias=True)


def _unet() -> Parameters:
    """Rombach et al., CVPR 2022, as Stable Diffusion 1.5 configures it, on latents of 64 x 64."""
    widths, sides = (320, 640, 1280, 1280), (64, 32, 16, 8)
    yield from linear("time.1", 320, _UNET_TIME)
    yield from linear("time.2", _UNET_TIME, _UNET_TIME)
    yield from convolution("in", 4, 320, 3, 64, bias=True)
    inputs, skipped = 320, [320]
    for stage, (width, side) in enumerate(zip(widths, sides, strict=True)):
        for block in range(2):
            yield from _unet_block(f"down{stage}.{block}", inputs, width, side, attends=stage < 3)
            inputs = width
            skipped.append(width)
        if stage < 3:
            yield from convolution(f"down{stage}.smaller", width, width, 3, side // 2, bias=True)
            skipped.append(width)
    yield from _unet_block("middle.0", 1280, 1280, 8, attends=True)
    yield from _unet_block("middle.1", 1280, 1280, 8, attends=False)
    for stage, (width, side) in enumerate(zip(widths[::-1], sides[::-1], strict=True)):
        for block in range(3):
            yield from _unet_block(f"up{stage}.{block}", inputs + skipped.pop(), width, side, attends=stage > 0)
            inputs = width
        if stage < 3:
            yield from convolution(f"up{stage}.larger", width, width, 3, 2 * side, bias=True)
    yield from norm("norm", 320)
    yield from convolution("out", 320, 4, 3, 64, bias=True)


class TrainedOn(NamedTuple):
    """What a sample is, a name in ``advice.RECIPES``, and one in ``advice.FAMILIES``."""

    sample: str
    optimizer: str
    family: str


IMAGES = TrainedOn("image of 224 x 224", "sgd-momentum", "vision")
_PATCHES = TrainedOn("image of 224 x 224", "adamw", "vision")
_LATENTS = TrainedOn("image of 512 x 512, as a latent of 64 x 64", "adamw", "vision")
_BERT = TrainedOn("sequence of 512 tokens", "adamw", "language")
_GPT2 = TrainedOn("sequence of 1,024 tokens", "adamw", "language")
_LONG = TrainedOn("sequence of 4,096 tokens", "adamw", "language")
_LLAMA_1B = _Decoder(2048, 8192, 16, 32, 8, 64, 128_256, tied=True)
_LLAMA_8B = _Decoder(4096, 14_336, 32, 32, 8, 128, 128_256)
_QWEN_1B = _Decoder(1536, 8960, 28, 12, 2, 128, 151_936, tied=True, query_bias=True)
_QWEN_8B = _Decoder(4096, 12_288, 36, 32, 8, 128, 151_936, query_norm=True)
_QWEN_72B = _Decoder(8192, 29_568, 80, 64, 8, 128, 152_064, query_bias=True)

ARCHITECTURES: dict[str, tuple[TrainedOn, int, Callable[[], Parameters]]] = {
    "resnet50": (IMAGES, 32, lambda: _resnet(3, 4, 6, 3)),
    "resnet152": (IMAGES, 32, lambda: _resnet(3, 8, 36, 3)),
    "vgg16": (IMAGES, 32, _vgg16),
    "vit-b16": (_PATCHES, 32, lambda: _vit(768, 12)),
    "vit-l16": (_PATCHES, 32, lambda: _vit(1024, 24)),
    "sd15-unet": (_LATENTS, 4, _unet),
    "bert-base": (_BERT, 8, lambda: _bert(768, 12)),
    "bert-large": (_BERT, 8, lambda: _bert(1024, 24)),
    "gpt2-small": (_GPT2, 4, lambda: _gpt2(768, 12)),
    "gpt2-medium": (_GPT2, 4, lambda: _gpt2(1024, 24)),
    "gpt2-large": (_GPT2, 4, lambda: _gpt2(1280, 36)),
    "llama-1b": (_LONG, 1, _LLAMA_1B.parameters),
    "llama-8b": (_LONG, 1, _LLAMA_8B.parameters),
    "qwen-1.5b": (_LONG, 1, _QWEN_1B.parameters),
    "qwen-8b": (_LONG, 1, _QWEN_8B.parameters),
    "qwen-72b": (_LONG, 1, _QWEN_72B.parameters),
}
"""By name: what a sample is and how it is trained, a rank's mini-batch, and the parameters. Llama is Llama 3.2 1B and
Llama 3.1 8B, Qwen is Qwen2.5 1.5B and Qwen3 8B."""
