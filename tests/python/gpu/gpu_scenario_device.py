"""The device that scenarios run on, by the environment of their ranks."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("TELEGRAD_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
