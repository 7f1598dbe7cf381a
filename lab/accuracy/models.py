"""The models of the study, beside the demo's GPT: small enough for thousands of steps on a core. Needs torch.

No model has buffers that depend on the batch (GroupNorm, not BatchNorm): what a rank computes depends on the weights
and its own samples only, so that one process can play all ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lab.accuracy.fashion import CLASSES

_GROUPS = 4


def _convolution(into: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, padding=1, bias=False), nn.GroupNorm(_GROUPS, out), nn.ReLU())


class VggLike(nn.Module):
    """Pairs of 3 x 3 convolutions between poolings, then two wide layers that hold most of the parameters (Simonyan and
    Zisserman 2015). Takes images of shape (batch, 1, 28, 28); gives logits, (batch, 10). ``width``: channels at first.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(1, width, stride=2),
            _convolution(width, width),
            nn.MaxPool2d(2),
            _convolution(width, 2 * width),
            _convolution(2 * width, 2 * width),
            nn.MaxPool2d(2, ceil_mode=True),
        )
        self.hidden = nn.Linear(2 * width * 4 * 4, hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.hidden(self.features(images).flatten(1))))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions around which the stream goes (He et al. 2016, with projection where the shape changes)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(into, out, stride)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(_GROUPS, out)
        self.around = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.second(self.first(x))) + self.around(x))


class ResNetLike(nn.Module):
    """``blocks`` residual blocks at each of ``stages`` widths, each twice the last, and no wide layer. Shapes as for
    ``VggLike``.
    """

    def __init__(self, width: int, stages: int, blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(1, width, stride=2), nn.MaxPool2d(2)]
        for stage in range(stages):
            out = width << stage
            for block in range(blocks):
                changes = stage > 0 and block == 0
                layers.append(ResidualBlock(out // 2 if changes else out, out, stride=2 if changes else 1))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width << stages - 1, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


class LstmLanguageModel(nn.Module):
    """Two LSTM layers over codes of ``vocabulary`` tokens. Takes int64 of shape (batch, length); gives the next token's
    logits, (batch, length, vocabulary).
    """

    def __init__(self, vocabulary: int, code: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(vocabulary, code)
        self.recurrent = nn.LSTM(code, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.codes(tokens))
        logits: Tensor = self.head(states)
        return logits
