"""The conformance suite: the requirements for every backend, written once, and the command that runs it.

    python -m hyper_parallel.testing.conformance torch-cpu --report conformance.md

See docs/platform.md. pytest must be installed.
"""
