"""Is this installation, on this machine, fit to work? Checks as plain functions, and a self-test with real ranks.

``finding`` is what a check says and how checks are run, ``checks`` lists them; ``installation``, ``transports``,
``host`` and ``network`` hold them. ``environment`` describes the machine for a bug report. ``selftest`` starts ranks
and compares. Only the self-test needs the compiled core, and nothing torch or rich: what may be broken is tried in a
process of its own.
"""
