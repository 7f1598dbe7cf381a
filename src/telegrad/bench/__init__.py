"""Benchmarks: each measures telegrad beside a peer, in the same processes and interleaved, and knows the bound of
theory.

``registry`` lists them, ``runner`` starts the ranks, ``networks`` says over what, ``peers`` who is compared with.
"""
