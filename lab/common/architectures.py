"""Networks of the papers that nobody trains any more, beside those that ``telegrad advise`` knows."""

from __future__ import annotations

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


def _lstm() -> Parameters:
    """Zaremba, Sutskever, Vinyals, 2014, "large": 2 layers of 1,500 on the Penn Treebank, unrolled 35 steps."""
    width, vocabulary, steps = 1500, 10_000, 35
    yield Parameter("embedding", vocabulary * width, rows=vocabulary)
    for layer in range(2):
        for part in ("input", "hidden"):
            yield from linear(f"lstm{layer}.{part}", width, 4 * width, steps)
    yield from linear("output", width, vocabulary, steps)


_WORDS = TrainedOn("sequence of 35 words", "sgd", "language")
EVERY = {
    **ARCHITECTURES,
    "googlenet": (IMAGES, 32, _googlenet),
    "alexnet": (IMAGES, 128, _alexnet),
    "lstm": (_WORDS, 20, _lstm),
}
"""As ``ARCHITECTURES``."""


def architecture(name: str) -> Architecture:
    """Raises ``KeyError`` for a name that is none of ``EVERY``."""
    return built(name, *EVERY[name])
