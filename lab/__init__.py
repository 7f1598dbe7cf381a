"""Experiments that show what telegrad's claims rest on. No part of the package: nothing in src/ imports them.

``python -m lab`` lists them, ``python -m lab EXPERIMENT --help`` says what one can be asked. Run it from the root of
the tree, or with the root in PYTHONPATH.

An experiment is one file with its settings, what its ranks run, its table and its plot; a package where that would have
more than 1,000 lines. ``command`` in it is the Typer command, ``rank_main`` what each of its ranks runs. ``common``
holds what several share.
"""

from lab.common.programs import let_children_import_lab

let_children_import_lab()
