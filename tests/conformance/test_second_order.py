"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_second_order`."""

from hyper_parallel.testing.conformance.test_second_order import *
