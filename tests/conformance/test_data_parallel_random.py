"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_data_parallel_random`."""

from hyper_parallel.testing.conformance.test_data_parallel_random import *
