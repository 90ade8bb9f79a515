"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_partial_sums`."""

from hyper_parallel.testing.conformance.test_partial_sums import *
