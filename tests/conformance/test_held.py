"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_held`."""

from hyper_parallel.testing.conformance.test_held import *
