"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_overlooked`."""

from hyper_parallel.testing.conformance.test_overlooked import *
