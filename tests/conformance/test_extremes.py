"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_extremes`."""

from hyper_parallel.testing.conformance.test_extremes import *
