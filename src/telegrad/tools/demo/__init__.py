"""The demo: the same language model trained three times on this machine, by plain DDP and over telegrad.

``job`` has the data and the settings, starts the ranks, and judges the results; ``training`` is one rank's part.
Importing this package needs neither torch nor rich.
"""
