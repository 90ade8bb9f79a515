"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_dtensor`."""

from hyper_parallel.testing.conformance.test_dtensor import *
