"""The framework of this backend for the conformance suite: torch, as it is.

A backend of another framework writes the names of `hyper_parallel.testing.labs.protocol.Lab` itself.
"""

from hyper_parallel.testing.labs.torch_lab import *  # noqa: F403
