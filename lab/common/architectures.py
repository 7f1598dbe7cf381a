"""Networks of the papers that nobody trains any more, beside those that ``telegrad advise`` knows."""

from __future__ import annotations

from typing import Any

from telegrad.tools.advise.architectures import (
    ARCHITECTURES,
    IMAGES,
    Architecture,
    Parameter,
    Parameters,
    TrainedOn,
    built,
    convolution,
    linear,
    norm,
)


def _alexnet() -> Parameters:
    """Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014."""
    for name, inputs, outputs, kernel, side in (
        ("conv1", 3, 64, 11, 55),
        ("conv2", 64, 192, 5, 27),
        ("conv3", 192, 384, 3, 13),
        ("conv4", 384, 256, 3, 13),
        ("conv5", 256, 256, 3, 13),
    ):
        yield from convolution(name, inputs, outputs, kernel, side, bias=True)
    yield from linear("fc6", 256 * 6 * 6, 4096)
    yield from linear("fc7", 4096, 4096)
    yield from linear("fc8", 4096, 1000)


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
    yield from convolution("conv1", 3, 64, 7, 112, bias=True)
    yield from convolution("conv2.reduce", 64, 64, 1, 56, bias=True)
    yield from convolution("conv2", 64, 192, 3, 56, bias=True)
    for block, inputs, side, (one, reduce3, three, reduce5, five, pooled) in _INCEPTION:
        name = f"inception{block}"
        yield from convolution(f"{name}.1x1", inputs, one, 1, side, bias=True)
        yield from convolution(f"{name}.3x3.reduce", inputs, reduce3, 1, side, bias=True)
        yield from convolution(f"{name}.3x3", reduce3, three, 3, side, bias=True)
        yield from convolution(f"{name}.5x5.reduce", inputs, reduce5, 1, side, bias=True)
        yield from convolution(f"{name}.5x5", reduce5, five, 5, side, bias=True)
        yield from convolution(f"{name}.pool", inputs, pooled, 1, side, bias=True)
        if block in ("4a", "4d"):
            outputs = one + three + five + pooled
            yield from convolution(f"aux{block}.conv", outputs, 128, 1, 4, bias=True)
            yield from linear(f"aux{block}.fc1", 128 * 4 * 4, 1024)
            yield from linear(f"aux{block}.fc2", 1024, 1000)
    yield from linear("fc", 1024, 1000)


def _normed(name: str, inputs: int, outputs: int, kernel: int, side: int, width: int | None = None) -> Parameters:
    """A convolution and the normalization behind it."""
    yield from convolution(name, inputs, outputs, kernel, side, width=width)
    yield from norm(f"{name}.bn", outputs)


def _densenet(growth: int, channels: int, *layers_of_blocks: int) -> Parameters:
    """Huang et al., CVPR 2017, with bottlenecks and half of the channels kept between blocks."""
    yield from _normed("conv0", 3, channels, 7, 112)
    side = 56
    for block, layers in enumerate(layers_of_blocks, 1):
        for layer in range(layers):
            name = f"block{block}.{layer}"
            yield from norm(f"{name}.norm1", channels)
            yield from _normed(f"{name}.conv1", channels, 4 * growth, 1, side)
            yield from convolution(f"{name}.conv2", 4 * growth, growth, 3, side)
            channels += growth
        yield from norm(f"norm{block}", channels)
        if block < len(layers_of_blocks):
            yield from convolution(f"transition{block}", channels, channels // 2, 1, side)
            channels, side = channels // 2, side // 2
    yield from linear("classifier", channels, 1000)


# By branch the convolutions: outputs, and the kernel's height and width; "+" begins beside the one before it.
_STEM = (((64, 1, 1), (96, 3, 3)), ((64, 1, 1), (64, 1, 7), (64, 7, 1), (96, 3, 3)))
_INCEPTION_4: dict[str, tuple[tuple[tuple[Any, ...], ...], ...]] = {
    "a": (((96, 1, 1),), ((64, 1, 1), (96, 3, 3)), ((64, 1, 1), (96, 3, 3), (96, 3, 3)), ((96, 1, 1),)),
    "b": (
        ((384, 1, 1),),
        ((192, 1, 1), (224, 1, 7), (256, 7, 1)),
        ((192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)),
        ((128, 1, 1),),
    ),
    "c": (
        ((256, 1, 1),),
        ((384, 1, 1), (256, 1, 3), (256, 3, 1, "+")),
        ((384, 1, 1), (448, 3, 1), (512, 1, 3), (256, 1, 3), (256, 3, 1, "+")),
        ((256, 1, 1),),
    ),
}


def _branches(name: str, inputs: int, side: int, branches: Any, last_side: int | None = None) -> Parameters:
    """``last_side``: of what the last convolution of each branch leaves, if it is smaller."""
    for number, branch in enumerate(branches):
        before = given = inputs
        for place, (outputs, height, width, *beside) in enumerate(branch):
            given, before = (given if beside else before), outputs
            is_last = place == len(branch) - 1 and last_side is not None
            here = last_side if is_last and last_side is not None else side
            yield from _normed(f"{name}.{number}.{place}", given, outputs, height, here, width)


def _inception_v4() -> Parameters:
    """Szegedy et al., AAAI 2017, Figures 3 to 9, on images of 224 x 224."""
    yield from _normed("conv1", 3, 32, 3, 111)
    yield from _normed("conv2", 32, 32, 3, 109)
    yield from _normed("conv3", 32, 64, 3, 109)
    yield from _normed("conv4", 64, 96, 3, 54)
    yield from _branches("stem", 160, 54, _STEM, 52)
    yield from _normed("conv5", 192, 192, 3, 25)
    for number in range(4):
        yield from _branches(f"a{number}", 384, 25, _INCEPTION_4["a"])
    yield from _branches("reduction-a", 384, 25, (((384, 3, 3),), ((192, 1, 1), (224, 3, 3), (256, 3, 3))), 12)
    for number in range(7):
        yield from _branches(f"b{number}", 1024, 12, _INCEPTION_4["b"])
    smaller = (((192, 1, 1), (192, 3, 3)), ((256, 1, 1), (256, 1, 7), (320, 7, 1), (320, 3, 3)))
    yield from _branches("reduction-b", 1024, 12, smaller, 5)
    for number in range(3):
        yield from _branches(f"c{number}", 1536, 5, _INCEPTION_4["c"])
    yield from linear("fc", 1536, 1000)


def wide_resnet(times: int, *blocks_of_stages: int) -> Parameters:
    """He et al., CVPR 2016, of blocks of two 3x3 convolutions, with so many times the channels."""
    inputs, side = 64 * times, 56
    yield from _normed("conv1", 3, inputs, 7, 112)
    for stage, blocks in enumerate(blocks_of_stages, 1):
        width = 32 * times << stage
        side //= 2 if stage > 1 else 1
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from _normed(f"{name}.conv1", inputs, width, 3, side)
            yield from _normed(f"{name}.conv2", width, width, 3, side)
            if inputs != width:
                yield from _normed(f"{name}.downsample", inputs, width, 1, side)
            inputs = width
    yield from linear("fc", inputs, 1000)


def _resnet110() -> Parameters:
    """He et al., CVPR 2016, §4.2, for images of 32 x 32, whose shortcuts have no parameters."""
    inputs, side = 16, 32
    yield from _normed("conv1", 3, 16, 3, 32)
    for stage in range(3):
        width, side = 16 << stage, 32 >> stage
        for block in range(18):
            yield from _normed(f"layer{stage}.{block}.conv1", inputs, width, 3, side)
            yield from _normed(f"layer{stage}.{block}.conv2", width, width, 3, side)
            inputs = width
    yield from linear("fc", 64, 10)


def _vgg16_small() -> Parameters:
    """VGG-16's convolutions, with normalization, for images of 32 x 32, and one layer behind them."""
    inputs, side = 3, 32
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for layer in range(count):
            yield from convolution(f"conv{stage}.{layer}", inputs, width, 3, side, bias=True)
            yield from norm(f"conv{stage}.{layer}.bn", width)
            inputs = width
        side //= 2
    yield from linear("fc", 512, 10)


def _lstm(vocabulary: int = 10_000) -> Parameters:
    """Zaremba, Sutskever, Vinyals, 2014, "large": 2 layers of 1,500 on the Penn Treebank, unrolled 35 steps."""
    width, steps = 1500, 35
    yield Parameter("embedding", vocabulary * width, rows=vocabulary)
    for layer in range(2):
        for part in ("input", "hidden"):
            yield from linear(f"lstm{layer}.{part}", width, 4 * width, steps)
    yield from linear("output", width, vocabulary, steps)


_SMALL = TrainedOn("image of 32 x 32", "sgd-momentum", "vision")
_WORDS = TrainedOn("sequence of 35 words", "sgd", "language")
EVERY = {
    **ARCHITECTURES,
    "googlenet": (IMAGES, 32, _googlenet),
    "alexnet": (IMAGES, 128, _alexnet),
    "lstm": (_WORDS, 20, _lstm),
    "lstm-wiki2": (_WORDS, 20, lambda: _lstm(33_278)),
    "vgg16-cifar": (_SMALL, 64, _vgg16_small),
    "resnet110-cifar": (_SMALL, 16, _resnet110),
    "densenet161": (IMAGES, 64, lambda: _densenet(48, 96, 6, 12, 36, 24)),
    "densenet201": (IMAGES, 64, lambda: _densenet(32, 64, 6, 12, 48, 32)),
    "inception-v4": (IMAGES, 128, _inception_v4),
    "resnet18-4x": (IMAGES, 8, lambda: wide_resnet(4, 2, 2, 2, 2)),
    "resnet34-4x": (IMAGES, 8, lambda: wide_resnet(4, 3, 4, 6, 3)),
}
"""As ``ARCHITECTURES``."""


def architecture(name: str) -> Architecture:
    """Raises ``KeyError`` for a name that is none of ``EVERY``."""
    return built(name, *EVERY[name])
