"""Tools for authors of backends: the conformance suite, and the processes that it runs in.

`hyper_parallel.testing.conformance` is the command and the checks. `hyper_parallel.testing.adapters` is the part of a
framework in them. `hyper_parallel.testing.pool` is a pool of worker processes, and `hyper_parallel.testing.spmd` has
helpers for the functions that run there. No program imports any of it.
"""
