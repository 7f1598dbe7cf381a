"""Allreduces beside those of peers, in the same processes and interleaved, and the bound of theory.

``networks`` says over what ranks talk, and starts them, ``peers`` who is compared with.
"""
