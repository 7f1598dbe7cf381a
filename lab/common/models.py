"""Three small models whose steps several experiments measure."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def _small() -> tuple[nn.Module, Tensor]:
    """48 narrow layers: 194 gradients, none above 36 KiB; 1.8 MB."""
    blocks = [_Residual(96) for _ in range(48)]
    return nn.Sequential(*blocks, nn.Linear(96, 10)), torch.randn(192, 96)


def _large() -> tuple[nn.Module, Tensor]:
    """Four wide layers: 8 gradients, the largest 3 MiB; 8.4 MB."""
    layers = [nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(768, 256)), torch.randn(96, 512)


def _mixed() -> tuple[nn.Module, Tensor]:
    """Convolutions with normalisation, then wide layers, as in VGG: 42 gradients from 40 bytes to 2 MiB; 3.9 MB."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 16, 32, 32, 64, 64, 64, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        if width != channels and channels != 3:
            layers.append(nn.MaxPool2d(2))
        channels = width
    wide = [nn.Flatten(), nn.Linear(64 * 16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *wide), torch.randn(8, 3, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"small": _small, "large": _large, "mixed": _mixed}
"""By name: what makes a model and its input, by torch's generator."""
