"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_replicate`."""

from hyper_parallel.testing.conformance.test_replicate import *
