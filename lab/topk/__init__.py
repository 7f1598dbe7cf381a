"""Schemes that sum what ranks have selected, Ok-Topk and its rivals, measured here or in virtual time.

``schemes`` is what is compared, ``streams`` what ranks select; ``simulated``, ``weak_scaling`` and ``balancing`` are
virtual time (``processes``: on all cores), ``measured`` is this machine (``ranks``: each rank of it), ``training`` a
training run with Ok-Topk.
"""
