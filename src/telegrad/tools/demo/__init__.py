"""The demo: the same language model trained three times on this machine, by plain DDP and over telegrad.

``text`` is its data, ``model`` its model, ``settings`` what all ranks agree on, ``worker`` one rank's training, ``job``
starts the ranks and listens to them, ``results`` what comes out. Importing this package needs neither torch nor rich.
"""
