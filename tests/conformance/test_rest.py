"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_rest`."""

from hyper_parallel.testing.conformance.test_rest import *
