"""Operations on host memory, one folder each: ``naive`` is the oracle in numpy, ``cpu`` calls the core's kernels."""
