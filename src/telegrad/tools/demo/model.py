"""A small GPT over bytes: made to learn something within two minutes on one core per two ranks. Needs torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from telegrad.tools.demo.settings import ModelSize, Settings
from telegrad.tools.demo.text import VOCABULARY


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
