"""Operations on arrays, one folder each.

``cpu`` calls the core's kernels, ``triton`` runs on a GPU; ``placement`` says which of them an array is for. The
oracles of both are ``tests/python/*_reference.py``.
"""
