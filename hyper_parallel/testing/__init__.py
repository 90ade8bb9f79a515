"""For authors of backends: the conformance suite, and the processes that it runs in.

`hyper_parallel.testing.conformance` is the command and the checks, `hyper_parallel.testing.adapters` what a framework
gives to them, `hyper_parallel.testing.pool` a pool of worker processes, `hyper_parallel.testing.spmd` helpers for what
runs there. No program imports any of it.
"""
