"""Allreduces beside those of peers, in the same processes and interleaved, and the bound of theory.

``runner`` starts the ranks, ``networks`` says over what, ``peers`` who is compared with.
"""
