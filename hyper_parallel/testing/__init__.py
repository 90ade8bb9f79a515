"""Tools for authors of backends: the conformance suite, and the worker processes in which it runs.

`hyper_parallel.testing.conformance` has the command and the checks. `hyper_parallel.testing.adapters` adapts the checks
to a framework. `hyper_parallel.testing.pool` is a pool of worker processes, and `hyper_parallel.testing.spmd` has
helpers for the functions that run in the workers. User programs import none of these modules.
"""
