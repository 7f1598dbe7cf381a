"""Compression and averages of gradients on a GPU, in its streams. Loaded where a gradient is on one."""
