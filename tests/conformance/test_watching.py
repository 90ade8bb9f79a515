"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_watching`."""

from hyper_parallel.testing.conformance.test_watching import *
