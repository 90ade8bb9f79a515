"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_random`."""

from hyper_parallel.testing.conformance.test_random import *
