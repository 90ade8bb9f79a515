"""HyperParallel on NumPy: a small tape, ranks as local processes, and the backend that ties them to the library."""
