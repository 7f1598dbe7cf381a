"""The fake device's fixtures."""

from __future__ import annotations

from device_fixtures import comms, device, streams

__all__ = ["comms", "device", "streams"]
