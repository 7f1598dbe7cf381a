"""Is this installation, on this machine, fit to work? Checks as plain functions, and a self-test with real ranks.

``installation``, ``transports`` and ``host`` hold the checks; ``host`` also describes the machine for a bug report.
``selftest`` starts ranks and compares. Only the self-test needs the compiled core, and nothing torch or rich: what may
be broken is tried in a process of its own.
"""
