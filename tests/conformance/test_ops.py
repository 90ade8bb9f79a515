"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_ops`."""

from hyper_parallel.testing.conformance.test_ops import *
