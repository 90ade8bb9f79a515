"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_numbers`."""

from hyper_parallel.testing.conformance.test_numbers import *
