"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_unshard`."""

from hyper_parallel.testing.conformance.test_unshard import *
