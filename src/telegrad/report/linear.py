"""How the training of a linear model looks: a line for each epoch, and what is said of a model's predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from telegrad.report.durations import duration


def table_of(epochs: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The messages ``"epoch"`` of ``telegrad.linear.job``. Columns that no epoch has are left out."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "epoch": lambda one: str(one["epoch"]),
        "loss": lambda one: loss_text(one["loss"]),
        "held-out\nloss": lambda one: "" if math.isnan(one["held_out_loss"]) else loss_text(one["held_out_loss"]),
        "accuracy": lambda one: _or_blank(100 * one["accuracy"], "{:.2f} %"),
        "AUC": lambda one: _or_blank(one["auc"], "{:.4f}"),
        "compute": lambda one: duration(one["compute_s"]),
        "commun-\nication": lambda one: duration(one["comm_s"]),
        "entries\na step": lambda one: f"{one['entries'] / one['steps']:,.0f}",
    }
    shown = {name: [cell(one) for one in epochs] for name, cell in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cells)}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def _or_blank(value: float, text: str) -> str:
    return "" if math.isnan(value) else text.format(value)


def loss_text(loss: float) -> str:
    """Short, also where a training has diverged."""
    return f"{loss:.5f}" if abs(loss) < 1e5 else f"{loss:.4g}"
