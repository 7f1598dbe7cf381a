"""Allreduces beside those of peers, in the same processes and interleaved, and the bound of theory."""
