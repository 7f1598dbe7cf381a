"""Operations on arrays, one folder each.

``naive`` is the oracle in numpy, ``cpu`` calls the core's kernels, ``triton`` runs on a GPU; ``placement`` says which
of them an array is for.
"""
