"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_long_sequences`."""

from hyper_parallel.testing.conformance.test_long_sequences import *
