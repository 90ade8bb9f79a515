"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_distribute`."""

from hyper_parallel.testing.conformance.test_distribute import *
