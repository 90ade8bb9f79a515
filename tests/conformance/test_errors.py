"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_errors`."""

from hyper_parallel.testing.conformance.test_errors import *
