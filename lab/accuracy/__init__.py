"""What compressed gradients cost in accuracy and save in bytes: the same models, data and order for all methods.

``tasks`` is what is trained (``fashion`` and the demo's ``text`` are its data, ``models`` its models), ``methods`` how
gradients are exchanged, ``runs`` which runs make the study. ``training`` is one run, whose ranks ``one_process`` plays;
``checkpoint`` lets it go on after a kill, ``worker`` and ``job`` do many on all cores, ``results`` is what comes out.
Importing this package needs neither torch nor rich.
"""
