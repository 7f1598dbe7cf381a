"""Ranks that shrink, grow and join under random further faults, in virtual time, from seeds: do all agree?

The library's own code runs: the agreement over the store, the exchange of addresses, communicators, and the core's
sessions on a simulated network. Time, the store and the operating system are virtual (``virtual``). ``world`` has the
programs, what their processes do, and what must hold.
"""
