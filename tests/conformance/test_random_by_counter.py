"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_random_by_counter`."""

from hyper_parallel.testing.conformance.test_random_by_counter import *
